//! A figure's table, JSON, SVG and PNG, with the paper's ratios beside the measured ones.

use super::figures::{Plan, Point, Shown};
use super::paper::{self, Comparison, Of};
use crate::bench::chart::{self, Chart, Series};
use crate::bench::report::{Table, coloured};
use anyhow::Context as _;
use plotters::style::RGBColor;
use serde::Serialize;
use std::path::Path;

/// Everything of one figure.
#[derive(Debug, Serialize)]
pub(super) struct Figure<'a> {
    pub(super) title: &'a str,
    /// Link, log device, threads, machine: what was the same for all.
    pub(super) setup: &'a str,
    pub(super) points: &'a [Point],
    pub(super) paper: Vec<Comparison>,
    /// Best durable kind over best other system, by place: throughput, p99.
    pub(super) best: Vec<(String, f64, f64)>,
}

fn shown(point: &Point, what: Shown) -> f64 {
    match what {
        Shown::Throughput => point.operations_per_second / 1e3,
        Shown::MeanLatency => point.mean_us,
        Shown::P99Latency => point.p99_us,
        Shown::Seconds => point.seconds,
    }
}

impl Shown {
    fn label(self) -> &'static str {
        match self {
            Self::Throughput => "throughput (kops/s)",
            Self::MeanLatency => "mean latency (us)",
            Self::P99Latency => "99th percentile (us)",
            Self::Seconds => "time in all (s)",
        }
    }
}

/// Prints the tables and writes the files.
pub(super) fn publish(
    plan: &Plan,
    figure: &str,
    setup: &str,
    points: &[Point],
    out: &Path,
) -> anyhow::Result<()> {
    let mut places: Vec<String> = points.iter().map(|point| point.x.clone()).collect();
    places.dedup();
    let best: Vec<_> = places
        .iter()
        .filter_map(|x| {
            let rate = paper::ratio(points, x, Of::Throughput, None)?;
            let p99 = paper::ratio(points, x, Of::P99, None).unwrap_or(f64::NAN);
            Some((x.clone(), rate, p99))
        })
        .collect();
    let result = Figure { title: plan.title, setup, points, paper: paper::compare(figure, points), best };
    cuttlefs_common::say!("\n{}\n{setup}\n", plan.title);
    cuttlefs_common::say!("{}", table(plan, points).render(coloured()).trim_end());
    if plan.shown != Shown::Seconds {
        for (x, rate, p99) in &result.best {
            cuttlefs_common::say!("{x}: best durable over best other: throughput {rate:.2}, p99 {p99:.2}");
        }
    }
    if !result.paper.is_empty() {
        cuttlefs_common::say!("\nThe paper's ratios (best durable kind over best other of its family):");
        let mut table = Table::default();
        table.plain(&["OF", "SECTION", "PAPER", "MEASURED"]);
        for compared in &result.paper {
            table.plain(&[
                compared.what,
                compared.section,
                &between(compared.paper_least, compared.paper_most),
                &between(compared.least, compared.most),
            ]);
        }
        cuttlefs_common::say!("{}", table.render(coloured()).trim_end());
    }
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let path = |extension: &str| out.join(format!("{}.{extension}", plan.name));
    let write = |extension: &str, text: &str| {
        std::fs::write(path(extension), text)
            .with_context(|| format!("cannot write {}", path(extension).display()))
    };
    write("json", &(serde_json::to_string_pretty(&result).context("cannot encode the results")? + "\n"))?;
    let charts = [chart_of(plan, points, &places)];
    let heading = chart::Heading { title: plan.title, subtitle: setup };
    write("svg", &chart::svg(&heading, &charts)?)?;
    chart::png(&path("png"), &heading, &charts)?;
    cuttlefs_common::say!("written: {}/{}.{{json,svg,png}}", out.display(), plan.name);
    Ok(())
}

fn between(least: f64, most: f64) -> String {
    if (least - most).abs() < 0.005 { format!("{most:.2}") } else { format!("{least:.2} to {most:.2}") }
}

fn table(plan: &Plan, points: &[Point]) -> Table {
    let mut table = Table::default();
    if plan.shown == Shown::Seconds {
        table.plain(&["AT", "SYSTEM", "SECONDS", "OF DaRPC", "FAILURES", "KEPT", "RESENT"]);
        for point in points {
            let baseline =
                points.iter().find(|at| at.x == point.x && at.system == super::system::System::Darpc);
            let share = baseline.map_or_else(String::new, |at| format!("{:.2}", point.seconds / at.seconds));
            table.plain(&[
                &point.x,
                point.system.label(),
                &format!("{:.2}", point.seconds),
                &share,
                &point.failures.to_string(),
                &point.kept.to_string(),
                &point.resent.to_string(),
            ]);
        }
        return table;
    }
    table.plain(&[
        "AT",
        "SYSTEM",
        "KOPS/S",
        "MEAN us",
        "P50 us",
        "P99 us",
        "WRITE P99",
        "READ P99",
        "SLOWED",
    ]);
    for point in points {
        let number = |value: f64| format!("{value:.1}");
        table.plain(&[
            &point.x,
            point.system.label(),
            &format!("{:.2}", point.operations_per_second / 1e3),
            &number(point.mean_us),
            &number(point.p50_us),
            &number(point.p99_us),
            &number(point.write_p99_us),
            &number(point.read_p99_us),
            &point.slowed.to_string(),
        ]);
    }
    table
}

fn chart_of(plan: &Plan, points: &[Point], places: &[String]) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for point in points {
        let Some(place) = places.iter().position(|x| *x == point.x) else { continue };
        let value = (place as f64, shown(point, plan.shown));
        match series.iter_mut().find(|series| series.label == point.system.label()) {
            Some(series) => series.values.push(value),
            None => {
                let (red, green, blue) = point.system.colour();
                let colour = RGBColor(red, green, blue);
                series.push(Series { label: point.system.label(), colour, values: vec![value] });
            }
        }
    }
    Chart {
        caption: String::new(),
        kind: plan.kind,
        logarithmic: plan.shown != Shown::Seconds,
        x_label: plan.x_label.to_owned(),
        y_label: plan.shown.label().to_owned(),
        places: places.to_vec(),
        series,
        marks: Vec::new(),
    }
}
