//! Tables for people, JSON for programs, and progress while it lasts.
//!
//! Tables go to standard output, progress to standard error, so that a pipe gets the table only. Colours only on a
//! terminal, and not if `NO_COLOR` is set.

use super::items::{Item, Sample, Unit};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::IsTerminal as _;

/// What was asked for.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Header {
    pub(super) block_bytes: u64,
    pub(super) size_bytes: u64,
    pub(super) small_bytes: u64,
    pub(super) small_files: u32,
    pub(super) names: u32,
    pub(super) jobs: u32,
    pub(super) seconds: u32,
    pub(super) rounds: u32,
}

/// The figures of one directory, a sample an item.
#[derive(Clone, Debug)]
pub(super) struct Column {
    pub(super) label: String,
    pub(super) samples: Vec<Sample>,
}

/// How a cell is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tint {
    None,
    Good,
    Fair,
    Poor,
}

impl Tint {
    /// Of a value beside what is good.
    fn of(value: f64, good: Option<f64>) -> Self {
        match good {
            None => Self::None,
            Some(good) if value >= good => Self::Good,
            Some(good) if value >= good / 2.0 => Self::Fair,
            Some(_) => Self::Poor,
        }
    }

    fn paint(self, text: &str) -> String {
        let code = match self {
            Self::None => return text.to_owned(),
            Self::Good => 32,
            Self::Fair => 33,
            Self::Poor => 31,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// A table of cells; widths follow the text, the first column is left-aligned, the others right-aligned.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Vec<(String, Tint)>>,
}

impl Table {
    /// Adds a row; the first one is the heading.
    pub(super) fn row(&mut self, cells: Vec<(String, Tint)>) {
        self.rows.push(cells);
    }

    /// Adds a row without colours.
    pub(super) fn plain(&mut self, cells: &[&str]) {
        self.row(cells.iter().map(|&cell| (cell.to_owned(), Tint::None)).collect());
    }

    /// The table as text.
    pub(super) fn render(&self, coloured: bool) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                self.rows
                    .iter()
                    .filter_map(|row| row.get(column))
                    .map(|(text, _)| text.chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let rule: String =
            widths.iter().map(|width| format!("+{}", "-".repeat(width + 2))).collect::<String>() + "+\n";
        let mut out = rule.clone();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, width) in widths.iter().enumerate() {
                let (text, tint) =
                    row.get(column).map_or(("", Tint::None), |(text, tint)| (text.as_str(), *tint));
                // Padding first: escape sequences have no width.
                let padded = if column == 0 { format!("{text:<width$}") } else { format!("{text:>width$}") };
                out += "| ";
                out += &if coloured { tint.paint(&padded) } else { padded };
                out += " ";
            }
            out += "|\n";
            if index == 0 {
                out += &rule;
            }
        }
        out + &rule
    }
}

/// Whether standard output takes colours.
pub(super) fn coloured() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// Prints header and table.
pub(super) fn print(header: &Header, items: &[Item], columns: &[Column]) {
    cuttlefs_common::say!(
        "BlockSize: {} MiB, BigFileSize: {} MiB, SmallFileSize: {} KiB, SmallFileCount: {}, Names: {}, NumJobs: {}, Rounds: {}",
        header.block_bytes >> 20,
        header.size_bytes >> 20,
        header.small_bytes >> 10,
        header.small_files,
        header.names,
        header.jobs,
        header.rounds
    );
    cuttlefs_common::say!("{}", table(items, columns).render(coloured()).trim_end());
}

fn table(items: &[Item], columns: &[Column]) -> Table {
    let mut table = Table::default();
    match columns {
        [only] => {
            table.plain(&["ITEM", "VALUE", "COST"]);
            for (item, sample) in items.iter().zip(&only.samples) {
                let tint = Tint::of(item.value(sample), item.good);
                table.row(vec![
                    (item.name.to_owned(), Tint::None),
                    (value(item, sample), tint),
                    (cost(item, sample), tint),
                ]);
            }
        }
        [this, baseline, ..] => {
            table.plain(&["ITEM", "VALUE", "COST", "BASELINE", "RATIO"]);
            for ((item, sample), other) in items.iter().zip(&this.samples).zip(&baseline.samples) {
                let ratio = item.value(sample) / item.value(other);
                table.row(vec![
                    (item.name.to_owned(), Tint::None),
                    (value(item, sample), Tint::of(item.value(sample), item.good)),
                    (cost(item, sample), Tint::None),
                    (value(item, other), Tint::None),
                    (format!("{ratio:.2}"), Tint::of(ratio, Some(1.0))),
                ]);
            }
        }
        [] => {}
    }
    table
}

fn value(item: &Item, sample: &Sample) -> String {
    match item.unit {
        Unit::MebibytesPerSecond => format!("{:.1} MiB/s", item.value(sample)),
        Unit::PerSecond(what) => format!("{:.1} {what}s/s", item.value(sample)).replace("entrys", "entries"),
    }
}

fn cost(item: &Item, sample: &Sample) -> String {
    let what = match item.unit {
        Unit::MebibytesPerSecond => "op",
        Unit::PerSecond(what) => what,
    };
    if sample.mean_latency_us >= 1000.0 {
        format!("{:.2} ms/{what}", sample.mean_latency_us / 1000.0)
    } else {
        format!("{:.1} us/{what}", sample.mean_latency_us)
    }
}

/// The figures as JSON: `{"parameters": {..}, "results": {LABEL: {ROW: {..}}}, "ratio": {ROW: ..}}`.
///
/// # Errors
/// None in practice; the serializer has the last word.
pub(super) fn json(header: &Header, items: &[Item], columns: &[Column]) -> anyhow::Result<String> {
    #[derive(Serialize)]
    struct Report<'a> {
        parameters: &'a Header,
        results: BTreeMap<&'a str, BTreeMap<&'a str, &'a Sample>>,
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        ratio: BTreeMap<&'a str, f64>,
    }
    let results = columns
        .iter()
        .map(|column| {
            (
                column.label.as_str(),
                items.iter().map(|item| item.key).zip(&column.samples).collect::<BTreeMap<_, _>>(),
            )
        })
        .collect();
    let ratio = match columns {
        [this, baseline, ..] => items
            .iter()
            .zip(&this.samples)
            .zip(&baseline.samples)
            .map(|((item, sample), other)| (item.key, item.value(sample) / item.value(other)))
            .collect(),
        _ => BTreeMap::new(),
    };
    Ok(serde_json::to_string_pretty(&Report { parameters: header, results, ratio })? + "\n")
}

/// Says what is being done, on standard error: one line that is overwritten on a terminal, lines elsewhere.
#[derive(Debug)]
pub(super) struct Progress {
    done: usize,
    total: usize,
    terminal: bool,
}

impl Progress {
    /// For `total` steps.
    pub(super) fn new(total: usize) -> Self {
        Self { done: 0, total, terminal: std::io::stderr().is_terminal() }
    }

    /// The next step begins.
    pub(super) fn step(&mut self, what: &str) {
        self.done += 1;
        if self.terminal {
            // Carriage return and clear to the end of the line.
            cuttlefs_common::terminal::write(
                std::io::stderr(),
                format_args!("\r\x1b[K[{}/{}] {what}", self.done, self.total),
            );
        } else {
            cuttlefs_common::tell!("[{}/{}] {what}", self.done, self.total);
        }
    }

    /// Nothing more to come.
    pub(super) fn end(&self) {
        if self.terminal {
            cuttlefs_common::terminal::write(std::io::stderr(), format_args!("\r\x1b[K"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::items::ITEMS;

    fn column(label: &str, factor: f64) -> Column {
        let sample = Sample {
            operations_per_second: 1000.0 * factor,
            bytes_per_second: 512e6 * factor,
            mean_latency_us: 1500.0 / factor,
            p99_latency_us: None,
        };
        Column { label: label.to_owned(), samples: vec![sample; ITEMS.len()] }
    }

    const HEADER: Header = Header {
        block_bytes: 1 << 20,
        size_bytes: 1 << 28,
        small_bytes: 1 << 17,
        small_files: 10,
        names: 10,
        jobs: 1,
        seconds: 1,
        rounds: 1,
    };

    #[test]
    fn a_table_is_aligned_with_and_without_colours() {
        let mut table = Table::default();
        table.plain(&["ITEM", "VALUE"]);
        table.row(vec![("Größe".to_owned(), Tint::None), ("1".to_owned(), Tint::Good)]);
        let expected = "\
+-------+-------+
| ITEM  | VALUE |
+-------+-------+
| Größe |     1 |
+-------+-------+
";
        assert_eq!(table.render(false), expected);
        assert!(table.render(true).contains("\x1b[32m    1\x1b[0m"));
    }

    #[test]
    fn values_costs_and_ratios() {
        let text = table(ITEMS, &[column("a", 1.0), column("b", 2.0)]).render(false);
        assert_eq!(text.lines().count(), ITEMS.len() + 4);
        assert!(text.contains("488.3 MiB/s") && text.contains("1.50 ms/op"), "{text}");
        assert!(text.contains("2000.0 entries/s") && text.contains("0.50"), "{text}");
    }

    #[test]
    fn tints_follow_what_is_good() {
        assert_eq!(Tint::of(10.0, None), Tint::None);
        assert_eq!(Tint::of(10.0, Some(10.0)), Tint::Good);
        assert_eq!(Tint::of(5.0, Some(10.0)), Tint::Fair);
        assert_eq!(Tint::of(4.9, Some(10.0)), Tint::Poor);
    }

    #[test]
    fn json_has_every_row() {
        let text = json(&HEADER, ITEMS, &[column("/mnt", 1.0), column("/base", 2.0)]).expect("json");
        let parsed: serde_json::Value = serde_json::from_str(&text).expect("parses");
        for item in ITEMS {
            assert_eq!(parsed["results"]["/mnt"][item.key]["operations_per_second"], 1000.0, "{}", item.key);
            assert_eq!(parsed["ratio"][item.key], 0.5);
        }
        assert_eq!(parsed["parameters"]["size_bytes"], 1 << 28);
    }
}
