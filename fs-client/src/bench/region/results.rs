//! A figure's results as a table for people, JSON for programs and two plots.

use super::campaign::Results;
use super::paper::{self, Comparison};
use super::point::Point;
use crate::bench::chart::{self, Chart};
use crate::bench::report::{Table, coloured};
use anyhow::Context as _;
use serde::Serialize;
use std::path::Path;

/// What was measured and how.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    /// Files are named after it.
    pub(super) name: String,
    pub(super) title: String,
    /// Number of the paper's figure, if it has one.
    pub(super) paper_figure: Option<u8>,
    /// Link, DRAM, threads, device, in words.
    pub(super) setup: String,
    /// What a place of the figure is.
    pub(super) x_label: String,
    pub(super) points: Vec<Point>,
    pub(super) paper: Vec<Comparison>,
    pub(super) notes: Vec<String>,
}

impl Figure {
    /// Puts results beside the paper.
    pub(super) fn new(
        name: &str,
        title: &str,
        paper_figure: Option<u8>,
        setup: String,
        x_label: &str,
        results: Results,
    ) -> Self {
        Self {
            name: name.to_owned(),
            title: title.to_owned(),
            paper_figure,
            setup,
            x_label: x_label.to_owned(),
            paper: paper_figure.map_or_else(Vec::new, |number| paper::compare(number, &results.points)),
            points: results.points,
            notes: results.notes,
        }
    }

    /// Prints the tables and writes JSON and plots into `out`.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn publish(&self, out: &Path, charts: &[Chart]) -> anyhow::Result<()> {
        cuttlefs_common::say!("{}\n{}", self.title, self.setup);
        cuttlefs_common::say!("{}", self.table().render(coloured()).trim_end());
        if !self.paper.is_empty() {
            cuttlefs_common::say!("Beside the paper (TeRM, FAST '24)");
            cuttlefs_common::say!("{}", self.paper_table().render(coloured()).trim_end());
        }
        cuttlefs_common::say!(
            "MISS: disk reads for each value; TWICE: one-sided reads that found the magic pattern, for each value; DISK: the disk alone, kops/s; BOUND: the least of PIN and what the disk \
             allows at that MISS"
        );
        for note in &self.notes {
            cuttlefs_common::say!("note: {note}");
        }
        std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
        let path = |extension: &str| out.join(format!("{}.{extension}", self.name));
        let write = |extension: &str, text: &str| {
            let path = path(extension);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        write("json", &self.json()?)?;
        let heading = chart::Heading { title: &self.title, subtitle: &self.setup };
        write("svg", &chart::svg(&heading, charts)?)?;
        chart::png(&path("png"), &heading, charts)?;
        cuttlefs_common::say!("written: {}/{}.{{json,svg,png}}", out.display(), self.name);
        Ok(())
    }

    /// All of it as JSON.
    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self).context("cannot encode the results")? + "\n")
    }

    fn table(&self) -> Table {
        let with_latencies = self.points.iter().any(|point| self.paper_latencies(point).is_some());
        let mut table = Table::default();
        let mut heading = vec![
            "PART", "AT", "POLICY", "KOPS/S", "P50 us", "P99 us", "MISS", "TWICE", "DISK", "BOUND",
            "OF BOUND", "OF PIN", "TERM/IT", "PAPER",
        ];
        if with_latencies {
            heading.extend(["PAPER P50", "PAPER P99"]);
        }
        table.plain(&heading);
        for point in &self.points {
            let term = self.points.iter().find(|at| {
                at.policy == super::policy::Policy::Term && (at.panel, &at.x) == (point.panel, &point.x)
            });
            let over = term.filter(|term| term.policy != point.policy);
            let paper = self
                .paper_figure
                .and_then(|number| paper::ratio_at(number, point.panel, &point.x, point.policy));
            let mut cells = vec![
                point.panel.to_owned(),
                point.x.clone(),
                point.policy.label().to_owned(),
                kilo(Some(point.operations_per_second)),
                format!("{:.1}", point.p50_us),
                format!("{:.1}", point.p99_us),
                format!("{:.3}", point.disk_reads_per_value),
                format!("{:.4}", point.twice_per_value),
                kilo(point.disk_reads_per_second),
                kilo(point.bound_operations_per_second),
                share(point.of_bound()),
                share(point.of_pin()),
                share(over.map(|term| term.operations_per_second / point.operations_per_second.max(1e-9))),
                share(paper),
            ];
            if with_latencies {
                let latencies = self.paper_latencies(point);
                cells.push(latencies.map_or_else(String::new, |(p50, _)| format!("{p50:.1}")));
                cells.push(latencies.map_or_else(String::new, |(_, p99)| format!("{p99:.1}")));
            }
            let cells: Vec<&str> = cells.iter().map(String::as_str).collect();
            table.plain(&cells);
        }
        table
    }

    fn paper_latencies(&self, point: &Point) -> Option<(f64, f64)> {
        paper::latencies_at(self.paper_figure?, &point.x, point.policy)
    }

    fn paper_table(&self) -> Table {
        let mut table = Table::default();
        table.plain(&["RATIO", "OF", "SECTION", "PAPER", "MEASURED"]);
        for compared in &self.paper {
            let paper = match compared.paper_least {
                None => format!("up to {:.2}", compared.paper_most),
                Some(least) => between(least, compared.paper_most),
            };
            table.plain(&[
                &compared.ratio,
                compared.what,
                compared.section,
                &paper,
                &between(compared.least, compared.most),
            ]);
        }
        table
    }
}

fn between(least: f64, most: f64) -> String {
    if least == most { format!("{most:.2}") } else { format!("{least:.2} to {most:.2}") }
}

/// Thousands, or nothing.
fn kilo(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{:.2}", value / 1e3))
}

fn share(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:.2}"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::region::file_load::Load;
    use crate::bench::region::policy::Policy;

    pub(in crate::bench::region) fn point(panel: &'static str, x: &str, policy: Policy, rate: f64) -> Point {
        Point {
            panel,
            x: x.to_owned(),
            policy,
            load: Load { value_bytes: 4096, write_percent: 0, theta: 0.99, clustered_bytes: 0, threads: 8 },
            dram_percent: 50,
            workers: None,
            operations_per_second: rate,
            rounds: vec![rate],
            p50_us: 10.0,
            p99_us: 20.0,
            disk_reads_per_value: 0.5,
            disk_writes_per_value: 0.0,
            twice_per_value: 0.0,
            pin_operations_per_second: Some(100.0),
            disk_reads_per_second: Some(45.0),
            disk_writes_per_second: None,
            bound_operations_per_second: Some(90.0),
            timeline: Vec::new(),
        }
    }

    fn figure() -> Figure {
        let points = vec![
            point("reads", "4K", Policy::Pin, 100.0),
            point("reads", "4K", Policy::Term, 80.0),
            point("reads", "4K", Policy::Odp, 0.5),
        ];
        let results = Results { points, notes: vec!["RPC is left out".to_owned()] };
        Figure::new("figure-8", "Read throughput", Some(8), "tcp".to_owned(), "size", results)
    }

    #[test]
    fn json_has_what_was_measured_and_what_it_is_judged_by() {
        let parsed: serde_json::Value =
            serde_json::from_str(&figure().json().expect("json")).expect("parses");
        let term = &parsed["points"][1];
        assert_eq!(term["policy"], "TeRM");
        assert_eq!(term["operations_per_second"], 80.0);
        assert_eq!(term["bound_operations_per_second"], 90.0);
        assert_eq!(term["load"]["value_bytes"], 4096);
        assert!(term.get("timeline").is_none());
        assert_eq!(parsed["paper_figure"], 8);
        assert_eq!(parsed["paper"][0]["ratio"], "TeRM/ODP");
        assert_eq!(parsed["notes"][0], "RPC is left out");
    }

    #[test]
    fn the_table_puts_the_paper_beside_it_and_guesses_nothing() {
        let text = figure().table().render(false);
        let line = |policy: &str| {
            text.lines()
                .find(|line| line.contains(&format!(" {policy} |")))
                .map(str::to_owned)
                .unwrap_or_default()
        };
        assert!(line("   PIN").contains("0.97"), "{text}");
        let odp = line("   ODP");
        assert!(odp.contains("160.00") && odp.contains("45781.4"), "{text}");
        assert!(figure().paper_table().render(false).contains("30.46 to 549.63"));
    }
}
