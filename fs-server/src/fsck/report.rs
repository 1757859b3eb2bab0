//! The findings of a check, as text and as JSON.

use cuttlefs_common::ids::InodeNo;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Findings that are kept in full; further ones are only counted.
pub(super) const MOST_FINDINGS: usize = 10_000;

/// Exit code: nothing is wrong.
pub(super) const CLEAN: u8 = 0;
/// Exit code: something was wrong, and all of it was repaired.
pub(super) const CORRECTED: u8 = 1;
/// Exit code: something is wrong.
pub(super) const UNCORRECTED: u8 = 4;

/// One fault of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its name in docs/fsck.md.
    pub kind: &'static str,
    /// The inode; 0 if the finding is not about an inode.
    pub ino: u64,
    /// The file page or pool page, if the finding is about one.
    pub page: Option<u64>,
    /// The file's path, if it is known.
    pub path: Option<String>,
    /// The finding in words.
    pub what: String,
    /// What `--repair` does about it, if it can do something.
    pub repair: Option<&'static str>,
}

impl Finding {
    /// A finding about the pool as a whole, which cannot be repaired.
    pub(super) fn pool(kind: &'static str, what: String) -> Self {
        Self { kind, ino: 0, page: None, path: None, what, repair: None }
    }

    fn json(&self, repaired: bool) -> Value {
        json!({
            "kind": self.kind,
            "ino": self.ino,
            "page": self.page,
            "path": self.path,
            "what": self.what,
            "repair": self.repair,
            "repaired": repaired,
        })
    }
}

/// All findings.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Faults that are still there.
    pub left: Vec<Finding>,
    /// Faults that were repaired.
    pub repairs: Vec<Finding>,
    /// How many more faults and repairs there were than are kept.
    pub untold: u64,
    /// Inodes.
    pub inodes: u64,
    /// Directory entries.
    pub entries: u64,
    /// Pages of the pool.
    pub pages: u64,
    /// Pages that extents name.
    pub used_pages: u64,
    /// Pages whose checksums were verified.
    pub verified_pages: u64,
    /// Pages that were being written when the server went down, or whose write failed: served as they are.
    pub unsettled_pages: u64,
    /// Pages whose synced bytes are in images; the next start writes these to their places.
    pub page_images: u64,
}

impl Report {
    /// The files with pages that cannot be read.
    pub(super) fn files_with_bad_pages(&self) -> BTreeSet<InodeNo> {
        let pages = self.left.iter().chain(&self.repairs).filter(|finding| finding.kind.ends_with("-page"));
        pages.map(|finding| InodeNo(finding.ino)).collect()
    }

    /// Adds the paths of files with such pages, for whoever restores them.
    pub(super) fn name_files(&mut self, paths: &BTreeMap<InodeNo, Vec<u8>>) {
        let pages =
            self.left.iter_mut().chain(&mut self.repairs).filter(|finding| finding.kind.ends_with("-page"));
        for finding in pages {
            // A name may have any bytes, also newlines.
            finding.path = paths.get(&InodeNo(finding.ino)).map(|path| match std::str::from_utf8(path) {
                Ok(text) if !text.contains(char::is_control) => text.to_owned(),
                _ => path.escape_ascii().to_string(),
            });
            if let Some(path) = &finding.path {
                finding.what = format!("{path}: {}", finding.what);
            }
        }
    }

    pub(super) fn find(&mut self, finding: Finding) {
        Self::keep(&mut self.left, &mut self.untold, finding);
    }

    pub(super) fn repaired(&mut self, finding: Finding) {
        Self::keep(&mut self.repairs, &mut self.untold, finding);
    }

    fn keep(list: &mut Vec<Finding>, untold: &mut u64, finding: Finding) {
        if list.len() < MOST_FINDINGS {
            list.push(finding);
        } else {
            *untold += 1;
        }
    }

    /// The exit code, as fsck(8) defines it.
    pub fn exit_code(&self) -> u8 {
        match (self.left.is_empty(), self.repairs.is_empty()) {
            (false, _) => UNCORRECTED,
            (true, false) => CORRECTED,
            (true, true) => CLEAN,
        }
    }

    /// The report for programs.
    pub fn json(&self) -> Value {
        let findings = self.repairs.iter().map(|finding| finding.json(true));
        json!({
            "clean": self.left.is_empty(),
            "exit": self.exit_code(),
            "findings": findings.chain(self.left.iter().map(|finding| finding.json(false))).collect::<Vec<_>>(),
            "untold": self.untold,
            "inodes": self.inodes,
            "entries": self.entries,
            "pages": self.pages,
            "used_pages": self.used_pages,
            "verified_pages": self.verified_pages,
            "unsettled_pages": self.unsettled_pages,
            "page_images": self.page_images,
        })
    }

    /// The report for people: a line for each finding, and one for the whole.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for finding in &self.repairs {
            lines.push(format!("repaired: {} [{}]", finding.what, finding.kind));
        }
        for finding in &self.left {
            let way = finding.repair.map_or_else(String::new, |repair| format!("; --repair {repair}"));
            lines.push(format!("{} [{}]{way}", finding.what, finding.kind));
        }
        if self.untold > 0 {
            lines.push(format!("and {} more", self.untold));
        }
        let Self { inodes, entries, pages, used_pages, verified_pages, unsettled_pages, .. } = self;
        lines.push(format!(
            "{inodes} inodes, {entries} entries, {used_pages} of {pages} pages used, {verified_pages} verified, \
             {unsettled_pages} were being written"
        ));
        if self.page_images > 0 {
            lines
                .push(format!("{} synced pages are put in their places at the next start", self.page_images));
        }
        lines.push(match self.exit_code() {
            CLEAN => "clean".to_owned(),
            CORRECTED => format!("{} repaired, clean now", self.repairs.len()),
            _ => format!("{} wrong, {} repaired", self.left.len(), self.repairs.len()),
        });
        lines
    }
}
