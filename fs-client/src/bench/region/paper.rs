//! What the TeRM paper says in numbers, to stand beside what is measured: FAST '24, section 6.
//!
//! Only numbers of its text and tables are here. Where it shows a plot and no number there is nothing, and the table's
//! cell stays empty. All are ratios of throughputs, of TeRM over something at the same place of the same figure.

use super::point::Point;
use super::policy::Policy;
use serde::Serialize;

/// A ratio the paper gives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// Number of the figure.
    pub(super) figure: u8,
    pub(super) section: &'static str,
    /// As a person reads it.
    pub(super) what: &'static str,
    pub(super) over: Policy,
    pub(super) under: Policy,
    /// Which part of the figure; `None`: any.
    pub(super) panel: Option<&'static str>,
    /// Which place; `None`: the least and the most over all places.
    pub(super) x: Option<&'static str>,
    /// `None` where the paper says only "up to".
    pub(super) least: Option<f64>,
    pub(super) most: f64,
}

const fn at(
    figure: u8,
    section: &'static str,
    what: &'static str,
    ratio: (Policy, Policy),
    panel: Option<&'static str>,
    x: Option<&'static str>,
    value: f64,
) -> Claim {
    Claim { figure, section, what, over: ratio.0, under: ratio.1, panel, x, least: Some(value), most: value }
}

const fn range(
    figure: u8,
    section: &'static str,
    what: &'static str,
    ratio: (Policy, Policy),
    panel: Option<&'static str>,
    least: Option<f64>,
    most: f64,
) -> Claim {
    Claim { figure, section, what, over: ratio.0, under: ratio.1, panel, x: None, least, most }
}

use Policy::{Hotspot, Magic, Odp, Pin, Rpc, RpcBuffer, RpcDirect, Term, Tiering};

/// Everything section 6 says of throughput ratios.
pub(super) const CLAIMS: &[Claim] = &[
    range(8, "6.2.1", "reads, all sizes", (Term, Odp), None, Some(30.46), 549.63),
    range(8, "6.2.1", "reads, all sizes", (Term, Rpc), None, Some(9.05), 45.19),
    at(8, "6.2.1", "reads of 1 KiB", (Term, Pin), None, Some("1K"), 0.5455),
    at(8, "6.2.1", "reads of 4 KiB", (Term, Pin), None, Some("4K"), 0.9671),
    range(9, "6.2.2", "writes, all sizes", (Term, Odp), None, None, 1195.81),
    range(9, "6.2.2", "writes, all sizes", (Term, Rpc), None, None, 12.60),
    at(9, "6.2.2", "writes of 4 KiB", (Term, Pin), None, Some("4K"), 0.7869),
    at(9, "6.2.2", "writes of 16 KiB", (Term, Pin), None, Some("16K"), 0.9632),
    range(10, "6.3", "direct over buffered IO", (RpcDirect, RpcBuffer), None, Some(1.90), 12.05),
    range(10, "6.3", "tiering", (Tiering, RpcDirect), None, Some(1.16), 3.10),
    range(10, "6.3", "hotspots", (Hotspot, Tiering), None, Some(1.16), 2.31),
    range(10, "6.3", "one-sided reads", (Magic, Hotspot), None, Some(1.56), 1.73),
    at(12, "6.5.1", "uniform reads", (Term, Odp), Some("skewness"), Some("0"), 265.24),
    at(12, "6.5.1", "uniform reads", (Term, Rpc), Some("skewness"), Some("0"), 40.40),
    at(12, "6.5.1", "uniform reads", (Term, Pin), Some("skewness"), Some("0"), 0.9122),
    range(13, "6.5.4", "server threads", (Term, Rpc), Some("server threads"), Some(2.84), 10.76),
    at(14, "6.5.5", "20 % DRAM, skewed", (Term, Pin), Some("skewed"), Some("20"), 0.9510),
    at(14, "6.5.5", "20 % DRAM, uniform", (Term, Pin), Some("uniform"), Some("20"), 0.6193),
    at(14, "6.5.5", "100 % DRAM: overhead 2.63 %", (Term, Pin), Some("skewed"), Some("100"), 0.9737),
    range(14, "6.5.5", "all shares of DRAM", (Term, Odp), None, None, 388.29),
    range(14, "6.5.5", "all shares of DRAM", (Term, Rpc), None, None, 41.78),
    range(15, "6.5.6", "SSDs of 0.6 M reads a second", (Term, Odp), None, None, 158.83),
    range(15, "6.5.6", "SSDs of 0.6 M reads a second", (Term, Rpc), None, None, 9.22),
    range(16, "6.6.1", "Octopus", (Term, Odp), None, Some(82.99), 642.23),
    range(16, "6.6.1", "Octopus", (Term, Rpc), None, Some(1.77), 7.68),
    range(17, "6.6.2", "XStore", (Term, Odp), None, None, 102.97),
    range(17, "6.6.2", "XStore", (Term, Rpc), None, None, 2.69),
    at(17, "6.6.2", "XStore, theta 0.99", (Term, Pin), None, Some("0.99"), 0.3007),
];

/// A claim and what was measured of the same.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Comparison {
    pub(super) section: &'static str,
    pub(super) what: &'static str,
    /// Such as `TeRM/PIN`.
    pub(super) ratio: String,
    pub(super) paper_least: Option<f64>,
    pub(super) paper_most: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

/// What the paper says of a figure beside what was measured, where it was.
pub(super) fn compare(figure: u8, points: &[Point]) -> Vec<Comparison> {
    CLAIMS
        .iter()
        .filter(|claim| claim.figure == figure)
        .filter_map(|claim| {
            let ratios: Vec<f64> = points.iter().filter_map(|point| measured(claim, point, points)).collect();
            let least = ratios.iter().copied().reduce(f64::min)?;
            let most = ratios.iter().copied().reduce(f64::max)?;
            Some(Comparison {
                section: claim.section,
                what: claim.what,
                ratio: format!("{}/{}", claim.over.label(), claim.under.label()),
                paper_least: claim.least,
                paper_most: claim.most,
                least,
                most,
            })
        })
        .collect()
}

/// The claim's ratio at the place of `point`, if that is the claim's upper one.
fn measured(claim: &Claim, point: &Point, points: &[Point]) -> Option<f64> {
    let here = claim.panel.is_none_or(|panel| panel == point.panel) && claim.x.is_none_or(|x| x == point.x);
    if !here || point.policy != claim.over {
        return None;
    }
    let under = points.iter().find(|at| {
        let same = at.policy == claim.under || (at.policy, claim.under) == (Policy::OdpHardware, Odp);
        same && (at.panel, &at.x) == (point.panel, &point.x)
    })?;
    (under.operations_per_second > 0.0).then(|| point.operations_per_second / under.operations_per_second)
}

/// What the paper gives for TeRM over `under` at a place, if it does.
pub(super) fn ratio_at(figure: u8, panel: &str, x: &str, under: Policy) -> Option<f64> {
    let under = if under == Policy::OdpHardware { Odp } else { under };
    CLAIMS
        .iter()
        .find(|claim| {
            (claim.figure, claim.over, claim.under) == (figure, Term, under)
                && claim.panel.is_none_or(|at| at == panel)
                && claim.x == Some(x)
        })
        .map(|claim| claim.most)
}

/// Latencies of tables 1 and 2, in microseconds: figure, value, policy, p50, p99.
pub(super) const LATENCIES: &[(u8, &str, Policy, f64, f64)] = &[
    (8, "256", Pin, 3.10, 4.21),
    (8, "256", Odp, 3.03, 29_103.92),
    (8, "256", Rpc, 38.55, 109.79),
    (8, "256", Term, 3.50, 30.07),
    (8, "4K", Pin, 21.20, 24.03),
    (8, "4K", Odp, 4.60, 45_781.38),
    (8, "4K", Rpc, 26.01, 93.62),
    (8, "4K", Term, 16.51, 52.02),
    (9, "256", Pin, 2.91, 3.89),
    (9, "256", Odp, 56_158.64, 71_006.89),
    (9, "256", Rpc, 43.89, 131.52),
    (9, "256", Term, 15.22, 117.27),
    (9, "4K", Pin, 21.29, 23.40),
    (9, "4K", Odp, 19_884.87, 41_636.82),
    (9, "4K", Rpc, 317.12, 1_772.35),
    (9, "4K", Term, 21.18, 59.73),
];

/// The paper's p50 and p99 at a place, in microseconds.
pub(super) fn latencies_at(figure: u8, x: &str, policy: Policy) -> Option<(f64, f64)> {
    let policy = if policy == Policy::OdpHardware { Odp } else { policy };
    LATENCIES.iter().find(|row| (row.0, row.1, row.2) == (figure, x, policy)).map(|row| (row.3, row.4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::region::results::tests::point;

    #[test]
    fn ratios_are_of_the_same_place() {
        let points = [
            point("reads", "4K", Pin, 100.0),
            point("reads", "4K", Term, 80.0),
            point("reads", "4K", Rpc, 8.0),
            point("reads", "1K", Term, 60.0),
            point("reads", "1K", Rpc, 20.0),
        ];
        let compared = compare(8, &points);
        let find = |ratio: &str, what: &str| {
            compared.iter().find(|c| c.ratio == ratio && c.what.contains(what)).expect("compared")
        };
        let pin = find("TeRM/PIN", "4 KiB");
        assert_eq!((pin.least, pin.most, pin.paper_most), (0.8, 0.8, 0.9671));
        let rpc = find("TeRM/RPC", "all");
        assert_eq!((rpc.least, rpc.most, rpc.paper_least), (3.0, 10.0, Some(9.05)));
        assert_eq!(compared.len(), 2, "nothing where nothing was measured");
    }

    #[test]
    fn only_what_the_paper_gives_is_there() {
        assert_eq!(ratio_at(8, "reads", "4K", Pin), Some(0.9671));
        assert_eq!(ratio_at(8, "reads", "64", Pin), None);
        assert_eq!(latencies_at(9, "4K", Policy::OdpHardware), Some((19_884.87, 41_636.82)));
        assert!(CLAIMS.iter().all(|claim| claim.least.is_none_or(|least| least <= claim.most)));
    }
}
