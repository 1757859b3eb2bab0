//! What the paper says in numbers (SC '21, section 5), to stand beside what is measured. Where it shows a plot and no
//! number there is nothing.

use super::figures::Point;
use super::system::System;
use serde::Serialize;

/// Which of a point's figures a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    /// Throughput, durable over the other.
    Throughput,
    /// Mean latency, durable over the other.
    Mean,
    /// 99th percentile, durable over the other.
    P99,
}

/// A claim: the paper's least and most ratio.
struct Claim {
    figure: &'static str,
    section: &'static str,
    what: &'static str,
    of: Of,
    sends: bool,
    x: Option<&'static str>,
    least: f64,
    most: f64,
}

const fn claim(
    figure: &'static str,
    section: &'static str,
    what: &'static str,
    (of, sends, x): (Of, bool, Option<&'static str>),
    (least, most): (f64, f64),
) -> Claim {
    Claim { figure, section, what, of, sends, x, least, most }
}

const CLAIMS: &[Claim] = &[
    claim("8a", "5.2", "heavy load, WRITE kinds", (Of::Throughput, false, None), (1.58, 1.85)),
    claim("8a", "5.2", "heavy load, SEND kinds", (Of::Throughput, true, None), (1.43, 1.69)),
    claim("8b", "5.2", "light load, 64 KiB, WRITE kinds", (Of::Throughput, false, Some("64K")), (1.20, 1.90)),
    claim("8b", "5.2", "light load, 64 KiB, SEND kinds", (Of::Throughput, true, Some("64K")), (1.42, 1.42)),
    claim("9", "5.2", "p99 of 1 KiB, WRITE kinds", (Of::P99, false, Some("1K")), (0.51, 0.51)),
    claim("9", "5.2", "p99 of 64 KiB, WRITE kinds", (Of::P99, false, Some("64K")), (0.76, 0.76)),
    claim("9", "5.2", "p99, SEND kinds", (Of::P99, true, None), (0.90, 0.90)),
    claim("11", "5.3", "A and E, WRITE kinds: up to 50 % less", (Of::Mean, false, None), (0.50, 1.0)),
    claim("11", "5.3", "SEND kinds: 7 % and 23 % less", (Of::Mean, true, None), (0.77, 0.93)),
    claim(
        "18",
        "5.5",
        "95 % writes, WRITE kinds: 63 % to 71 % less",
        (Of::Mean, false, Some("95 % writes")),
        (0.29, 0.37),
    ),
];

/// A claim and what was measured of the same.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Comparison {
    pub(super) section: &'static str,
    pub(super) what: &'static str,
    pub(super) paper_least: f64,
    pub(super) paper_most: f64,
    /// Best durable kind of the family over the best other system of it, least and most over the places.
    pub(super) least: f64,
    pub(super) most: f64,
}

/// The better of two.
fn best(points: &[&Point], of: Of) -> Option<f64> {
    let values = points.iter().map(|point| match of {
        Of::Throughput => point.operations_per_second,
        Of::Mean => point.mean_us,
        Of::P99 => point.p99_us,
    });
    if of == Of::Throughput { values.reduce(f64::max) } else { values.reduce(f64::min) }
}

/// Best durable over best other at a place, within a family (`None`: over all).
pub(super) fn ratio(points: &[Point], x: &str, of: Of, sends: Option<bool>) -> Option<f64> {
    let here = |durable: bool| -> Vec<&Point> {
        let family = |system: System| sends.is_none_or(|sends| sends == system.sends());
        let is_of =
            |point: &&Point| point.x == x && point.system.kind().is_some() == durable && family(point.system);
        points.iter().filter(is_of).collect()
    };
    let (durable, other) = (best(&here(true), of)?, best(&here(false), of)?);
    (other > 0.0).then_some(durable / other)
}

/// What the paper says of a figure beside what was measured.
pub(super) fn compare(figure: &str, points: &[Point]) -> Vec<Comparison> {
    let mut places: Vec<&str> = points.iter().map(|point| point.x.as_str()).collect();
    places.dedup();
    CLAIMS
        .iter()
        .filter(|claim| claim.figure == figure)
        .filter_map(|claim| {
            let at = places.iter().filter(|x| claim.x.is_none_or(|at| at == **x));
            let ratios: Vec<f64> = at.filter_map(|x| ratio(points, x, claim.of, Some(claim.sends))).collect();
            Some(Comparison {
                section: claim.section,
                what: claim.what,
                paper_least: claim.least,
                paper_most: claim.most,
                least: ratios.iter().copied().reduce(f64::min)?,
                most: ratios.iter().copied().reduce(f64::max)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rpc::figures::tests::point;

    #[test]
    fn ratios_are_of_the_best_at_the_same_place_and_family() {
        let points = [
            point("1K", System::Wflush, 300.0, 10.0),
            point("1K", System::WRflush, 200.0, 20.0),
            point("1K", System::Farm, 100.0, 40.0),
            point("1K", System::L5, 150.0, 50.0),
            point("1K", System::Darpc, 600.0, 5.0),
            point("64K", System::Wflush, 10.0, 10.0),
        ];
        assert_eq!(ratio(&points, "1K", Of::Throughput, Some(false)), Some(2.0));
        assert_eq!(ratio(&points, "1K", Of::Throughput, None), Some(0.5));
        assert_eq!(ratio(&points, "1K", Of::P99, Some(false)), Some(0.25));
        assert_eq!(ratio(&points, "64K", Of::Throughput, Some(false)), None);
        let compared = compare("8a", &points);
        assert_eq!(compared.len(), 1, "no SEND kinds were measured on both sides");
        assert_eq!((compared[0].least, compared[0].paper_most), (2.0, 1.85));
        assert!(CLAIMS.iter().all(|claim| claim.least <= claim.most));
    }
}
