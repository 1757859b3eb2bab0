//! Figures 8 to 15 of the TeRM paper as points to run, each with what its panels show.
//!
//! A point's place, policies and loads are those of the paper; sizes, threads and seconds fit a laptop unless they
//! are asked for otherwise. Where the paper's axis is not told in its text, the places are our choice.

use super::campaign::Case;
use super::file_load::Load;
use super::point::Point;
use super::policy::Policy;
use super::settings::Settings;
use crate::bench::chart::{Chart, Kind, Series};
use cuttlefs_common::size::ByteSize;

/// A figure to run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) name: String,
    pub(super) title: String,
    pub(super) paper_figure: Option<u8>,
    pub(super) cases: Vec<Case>,
    pub(super) panels: Vec<Panel>,
    /// Other values become hot at half time, and throughput is shown over time.
    pub(super) dynamic: bool,
}

/// What one panel shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel {
    /// As in its points.
    pub(super) key: &'static str,
    pub(super) x_label: &'static str,
    pub(super) kind: Kind,
    pub(super) logarithmic: bool,
}

/// The four that most figures compare.
const COMPARED: [Policy; 4] = [Policy::Pin, Policy::Term, Policy::Rpc, Policy::Odp];
/// Figure 10's: what is added one after the other.
const TECHNIQUES: [Policy; 7] = [
    Policy::Rpc,
    Policy::RpcBuffer,
    Policy::RpcDirect,
    Policy::Tiering,
    Policy::Hotspot,
    Policy::Magic,
    Policy::TermUnits,
];
/// The paper's skew.
pub(super) const THETA: f64 = 0.99;
const SMALL: u64 = 256;
const LARGE: u64 = 4096;

/// As a person writes it, which is how the paper's places are named here.
pub(super) fn size_name(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

/// The points of a figure; `value_sizes` replaces those of figures 8 and 9.
///
/// # Errors
/// If there is no such figure.
pub(super) fn plan(figure: u8, settings: &Settings, value_sizes: &[u64]) -> anyhow::Result<Plan> {
    let compared = settings.policies(&COMPARED);
    let build = Builder { settings };
    let panel = |key, x_label, kind, logarithmic| Panel { key, x_label, kind, logarithmic };
    let (title, cases, panels): (_, Vec<Case>, Vec<Panel>) = match figure {
        8 | 9 => {
            let key = if figure == 8 { "read" } else { "write" };
            let usual = settings.choose(&[64, 256, 1024, 4096, 16384], &[256, 4096]);
            let sizes = if value_sizes.is_empty() { &usual } else { value_sizes };
            let writes = if figure == 8 { 0 } else { 100 };
            let cases = sizes.iter().map(|&bytes| {
                build.case(key, size_name(bytes), settings.load(bytes, writes, THETA), &compared)
            });
            let title =
                if figure == 8 { "Read throughput (Figure 8)" } else { "Write throughput (Figure 9)" };
            (title, cases.collect(), vec![panel(key, "value size (bytes)", Kind::Lines, true)])
        }
        10 => {
            let policies = settings.policies(&TECHNIQUES);
            let loads = settings.choose(&[(0, SMALL), (0, LARGE), (100, SMALL), (100, LARGE)], &[(0, LARGE)]);
            let cases = loads.iter().map(|&(writes, bytes)| {
                let name = format!("{} {}", if writes == 0 { "read" } else { "write" }, size_name(bytes));
                // One-sided reads change nothing about writes, as in the paper.
                let policies: Vec<Policy> = policies
                    .iter()
                    .copied()
                    .filter(|&p| writes == 0 || !matches!(p, Policy::Magic | Policy::TermUnits))
                    .collect();
                build.case("technique", name, settings.load(bytes, writes, THETA), &policies)
            });
            let panels = vec![panel("technique", "operation and value size", Kind::Bars, false)];
            ("Contribution of each technique (Figure 10)", cases.collect(), panels)
        }
        11 => {
            let policies: Vec<Policy> = compared.iter().copied().filter(|p| !p.holds_everything()).collect();
            let case = build.case("time", "change".to_owned(), settings.load(LARGE, 0, THETA), &policies);
            let panels = vec![panel("time", "time (s)", Kind::Curve, false)];
            ("Dynamic hotspots (Figure 11)", vec![case], panels)
        }
        12 => {
            let thetas = settings.choose(&[0.0, 0.5, 0.9, 0.99], &[0.0, 0.99]);
            let writes = settings.choose(&[0, 25, 50, 75, 100], &[50]);
            let skews = thetas.iter().map(|&theta| {
                build.case("skewness", theta.to_string(), settings.load(LARGE, 0, theta), &compared)
            });
            let ratios = writes.iter().map(|&writes| {
                build.case("write ratio", writes.to_string(), settings.load(LARGE, writes, THETA), &compared)
            });
            let panels = vec![
                panel("skewness", "Zipfian theta", Kind::Lines, true),
                panel("write ratio", "writes (%)", Kind::Lines, true),
            ];
            ("Skewness and write ratio, 4 KiB (Figure 12)", skews.chain(ratios).collect(), panels)
        }
        13 => {
            let clients = settings.choose(&[1, 2, 4, 8, 16], &[1, 4]);
            let servers = settings.choose(&[1, 2, 4], &[1]);
            let of_clients = clients.iter().map(|&threads| {
                let load = Load { threads, ..settings.load(LARGE, 0, THETA) };
                build.case("client threads", threads.to_string(), load, &compared)
            });
            let two: Vec<Policy> = settings
                .policies(&[Policy::Term, Policy::Rpc])
                .into_iter()
                .filter(|policy| !policy.needs_nic())
                .collect();
            let of_servers = servers.iter().map(|&workers| Case {
                workers: Some(workers),
                ..build.case("server threads", workers.to_string(), settings.load(LARGE, 0, THETA), &two)
            });
            let panels = vec![
                panel("client threads", "client threads", Kind::Lines, true),
                panel("server threads", "server threads", Kind::Lines, true),
            ];
            (
                "Client and server threads, read 4 KiB (Figure 13)",
                of_clients.chain(of_servers).collect(),
                panels,
            )
        }
        14 => {
            let shares = settings.choose(&[20, 40, 60, 80, 100], &[20, 100]);
            let cases = [("uniform", 0.0), ("skewed", THETA)].into_iter().flat_map(|(key, theta)| {
                let (compared, build) = (&compared, &build);
                shares.iter().map(move |&dram_percent| Case {
                    dram_percent,
                    ..build.case(
                        key,
                        dram_percent.to_string(),
                        build.settings.load(LARGE, 0, theta),
                        compared,
                    )
                })
            });
            let panels = vec![
                panel("uniform", "DRAM (% of the data)", Kind::Lines, true),
                panel("skewed", "DRAM (% of the data)", Kind::Lines, true),
            ];
            ("Share of DRAM, read 4 KiB (Figure 14)", cases.collect(), panels)
        }
        15 => {
            // Run once for each device; `region` puts the device's number in front.
            let sizes = settings.choose(&[SMALL, LARGE], &[LARGE]);
            let cases = sizes.iter().map(|&bytes| {
                let key = if bytes == SMALL { "read 256" } else { "read 4K" };
                build.case(key, String::new(), settings.load(bytes, 0, THETA), &compared)
            });
            let panels = sizes.iter().map(|&bytes| {
                let key = if bytes == SMALL { "read 256" } else { "read 4K" };
                panel(key, "device", Kind::Bars, true)
            });
            ("Devices (Figure 15)", cases.collect(), panels.collect())
        }
        _ => anyhow::bail!(
            "there is no figure {figure} here; 8 to 15 are, 16 is `bench octopus`, 17 `bench kv`"
        ),
    };
    Ok(Plan {
        name: format!("figure-{figure}"),
        title: title.to_owned(),
        paper_figure: Some(figure),
        cases,
        panels,
        dynamic: figure == 11,
    })
}

/// A plan of the points that the command line asks for.
pub(super) fn plan_of_points(
    settings: &Settings,
    value_sizes: &[u64],
    write_percent: u32,
    theta: f64,
) -> Plan {
    let policies = settings.policies(&[Policy::Pin, Policy::Term]);
    let sizes = if value_sizes.is_empty() { &[LARGE] } else { value_sizes };
    let build = Builder { settings };
    let cases = sizes.iter().map(|&bytes| {
        build.case("point", size_name(bytes), settings.load(bytes, write_percent, theta), &policies)
    });
    Plan {
        name: "region".to_owned(),
        title: format!("{} % reads, theta {theta}", 100 - write_percent),
        paper_figure: None,
        cases: cases.collect(),
        panels: vec![Panel {
            key: "point",
            x_label: "value size (bytes)",
            kind: Kind::Bars,
            logarithmic: true,
        }],
        dynamic: false,
    }
}

/// Fills in what most cases have in common.
struct Builder<'a> {
    settings: &'a Settings,
}

impl Builder<'_> {
    fn case(&self, panel: &'static str, x: String, load: Load, policies: &[Policy]) -> Case {
        Case {
            panel,
            x,
            load,
            dram_percent: self.settings.dram_percent,
            workers: self.settings.args.workers,
            policies: policies.to_vec(),
        }
    }
}

/// Points as panels: every policy a series, places in the order of the points.
pub(super) fn charts(panels: &[Panel], points: &[Point], change_at: Option<f64>) -> Vec<Chart> {
    panels
        .iter()
        .enumerate()
        .map(|(index, panel)| {
            let here: Vec<&Point> = points.iter().filter(|point| point.panel == panel.key).collect();
            let mut places: Vec<String> = Vec::new();
            let mut policies: Vec<Policy> = Vec::new();
            for point in &here {
                if !places.contains(&point.x) {
                    places.push(point.x.clone());
                }
                if !policies.contains(&point.policy) {
                    policies.push(point.policy);
                }
            }
            policies.sort_unstable();
            let values = |policy: Policy| {
                let of_policy = here.iter().filter(move |point| point.policy == policy);
                if panel.kind == Kind::Curve {
                    return of_policy
                        .flat_map(|point| point.timeline.iter().map(|&(at, rate)| (at, rate / 1e3)))
                        .collect();
                }
                let placed = of_policy.filter_map(|point| {
                    let place = places.iter().position(|place| *place == point.x)?;
                    Some((place as f64, point.operations_per_second / 1e3))
                });
                placed.collect::<Vec<_>>()
            };
            Chart {
                caption: if panels.len() == 1 {
                    String::new()
                } else {
                    format!("({}) {}", (b'a' + index as u8) as char, panel.key)
                },
                kind: panel.kind,
                logarithmic: panel.logarithmic,
                x_label: panel.x_label.to_owned(),
                y_label: "throughput (kops/s)".to_owned(),
                series: policies
                    .iter()
                    .map(|&policy| Series {
                        label: policy.label(),
                        colour: policy.colour(),
                        values: values(policy),
                    })
                    .collect(),
                places,
                marks: change_at.into_iter().collect(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::region::results::tests::point;
    use crate::bench::region::settings::CommonArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        common: CommonArgs,
    }

    fn settings(arguments: &[&str]) -> Settings {
        let all = std::iter::once("x").chain(arguments.iter().copied());
        Settings::new(&Command::parse_from(all).common).expect("settings")
    }

    #[test]
    fn every_figure_has_points_in_each_of_its_panels() {
        for arguments in [&[][..], &["--quick"]] {
            let settings = settings(arguments);
            for figure in 8..=15 {
                let plan = plan(figure, &settings, &[]).expect("planned");
                for panel in &plan.panels {
                    assert!(plan.cases.iter().any(|case| case.panel == panel.key), "{figure} {}", panel.key);
                }
                let mut places: Vec<_> = plan.cases.iter().map(|case| (case.panel, &case.x)).collect();
                places.dedup();
                assert_eq!(places.len(), plan.cases.len(), "figure {figure} has a place twice");
            }
        }
        assert!(plan(16, &settings(&[]), &[]).is_err());
    }

    #[test]
    fn the_papers_places_are_among_ours() {
        let settings = settings(&[]);
        for claim in crate::bench::region::paper::CLAIMS.iter().filter(|claim| claim.figure < 16) {
            let plan = plan(claim.figure, &settings, &[]).expect("planned");
            let is_there = plan.cases.iter().any(|case| {
                claim.panel.is_none_or(|panel| panel == case.panel) && claim.x.is_none_or(|x| x == case.x)
            });
            assert!(is_there, "{claim:?}");
        }
    }

    #[test]
    fn hardware_costs_replace_odp() {
        let settings = settings(&["--odp-hardware"]);
        assert_eq!(settings.policies(&COMPARED)[3], Policy::OdpHardware);
    }

    #[test]
    fn points_become_series_in_their_places() {
        let points = [
            point("read", "64", Policy::Term, 2000.0),
            point("read", "1K", Policy::Pin, 3000.0),
            point("read", "1K", Policy::Term, 1000.0),
        ];
        let panel = Panel { key: "read", x_label: "x", kind: Kind::Lines, logarithmic: true };
        let charts = charts(&[panel], &points, None);
        assert_eq!(charts[0].places, ["64", "1K"]);
        assert_eq!(charts[0].series[0].label, Policy::Pin.label());
        assert_eq!(charts[0].series[0].values, [(1.0, 3.0)]);
        assert_eq!(charts[0].series[1].values, [(0.0, 2.0), (1.0, 1.0)]);
    }
}
