//! Compares every page that holds bytes with its checksum.

use super::report::{Finding, Report};
use super::{FsckOptions, Progress};
use crate::bits;
use crate::meta::Survey;
use crate::meta::{Store, StoredMarks};
use crate::pool::sums::{DEFAULT_CACHE_BYTES, MarkStore, PageSums, SummedDisk, Verdict};
use crate::pool::{PoolDirectory, UringDisk};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{Extent, ExtentState};
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Pages that are checked at a time: 1 MiB.
const STEP_PAGES: u64 = 256;

pub(super) fn check(
    options: &FsckOptions,
    opened: &PoolDirectory,
    store: &Arc<dyn Store>,
    survey: &Survey,
    report: &mut Report,
    progress: Progress<'_>,
) -> io::Result<()> {
    report.pages = opened.pages();
    let inside = |extent: &Extent| {
        let end = extent.pool_page.0.saturating_add(extent.len_pages).min(opened.pages());
        extent.pool_page.0.min(end)..end
    };
    report.used_pages = survey.extents.iter().map(|(_, extent)| inside(extent).count() as u64).sum();
    let written: Vec<&(InodeNo, Extent)> =
        survey.extents.iter().filter(|(_, extent)| extent.state == ExtentState::Written).collect();
    let layout = opened.data_files().sum_layout();
    let runs = bits::of(opened.pages(), written.iter().map(|(_, extent)| inside(extent)));
    let marks = Arc::new(StoredMarks(store.clone()));
    let marked = survey.marks.iter().copied();
    let sums = Arc::new(PageSums::new(layout, DEFAULT_CACHE_BYTES, runs, marked, marks.clone()));
    // fsck uses no frames.
    let frames = Arc::new(SharedMemory::new("cuttlefs-fsck", PAGE_SIZE)?);
    let ring = Rc::new(UringDisk::new(opened.data_files().clone(), frames.clone())?);
    let disk = SummedDisk::new(ring.clone(), frames, sums);
    if options.checksums {
        let all: u64 = written.iter().map(|(_, extent)| inside(extent).count() as u64).sum();
        let mut done = 0;
        for (ino, extent) in written {
            let pages = inside(extent);
            for first in pages.clone().step_by(STEP_PAGES as usize) {
                progress("pages", done, all);
                let step = first..pages.end.min(first + STEP_PAGES);
                done += step.end - step.start;
                look(options, &ring, &disk, report, survey, (*ino, extent, step))?;
            }
        }
        progress("pages", done, all);
    }
    if options.repair {
        if options.checksums {
            while let Some(zone) = disk.next_recovering() {
                // Pages that hold bytes have their sums by now, and the other pages need none.
                disk.recovered(&zone);
            }
        }
        ring.block_on(disk.finish())??;
        ring.block_on(marks.flush_marks())??;
    }
    Ok(())
}

fn look(
    options: &FsckOptions,
    ring: &UringDisk,
    disk: &SummedDisk,
    report: &mut Report,
    survey: &Survey,
    (ino, extent, pages): (InodeNo, &Extent, Range<u64>),
) -> io::Result<()> {
    let verdicts = ring.block_on(disk.examine(pages.clone()))??;
    report.verified_pages += verdicts.iter().filter(|verdict| **verdict == Verdict::Good).count() as u64;
    if verdicts.iter().any(|verdict| matches!(verdict, Verdict::NoSum | Verdict::InFlight)) {
        let unsettled = |verdict: &&Verdict| matches!(verdict, Verdict::NoSum | Verdict::InFlight);
        report.unsettled_pages += verdicts.iter().filter(unsettled).count() as u64;
        if options.repair {
            ring.block_on(disk.settle(pages.clone()))??;
        }
    }
    // The bytes of a page with an image are those of the image.
    let judged = pages.zip(verdicts).filter(|(page, _)| !survey.images.contains(&PoolPage(*page)));
    for (page, verdict) in judged {
        let (kind, what) = match verdict {
            Verdict::Rotten => ("rotten-page", "its bytes do not match its checksum"),
            Verdict::Unreadable => ("unreadable-page", "the device cannot read it"),
            _ => continue,
        };
        let file_page = extent.file_page.0 + (page - extent.pool_page.0);
        let finding = Finding {
            kind,
            ino: ino.0,
            page: Some(file_page),
            path: None,
            what: format!("inode {ino}: page {file_page}, pool page {page}: {what}"),
            repair: (kind == "rotten-page").then_some("--accept-rotten gives it a checksum of what it holds"),
        };
        if verdict == Verdict::Rotten && options.repair && options.accept_rotten {
            ring.block_on(disk.accept(page..page + 1))??;
            report.repaired(finding);
        } else {
            report.find(finding);
        }
    }
    Ok(())
}
