//! Target translation: one READ for each run of pages, then page division and byte detection (TeRM section 4.2).

use super::OneSided;
use super::plan::Plan;
use crate::session::SessionLane;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::Remote;
use cuttlefs_common::region::{MagicPattern, PageSet, divide};

/// Reads the runs of the plan one-sidedly. Without a magic pattern every page counts as there. `None`: the link or the target refused, so fetch
/// everything.
pub(super) fn read(
    lane: &mut SessionLane<'_>,
    filekey: FileKey,
    magic: Option<&MagicPattern>,
    plan: &Plan,
    offset: u64,
    out: &mut [u8],
) -> Option<OneSided> {
    let runs = plan.runs();
    let data = lane.data();
    let lens = lane.read_runs(runs, |start| Remote::File { filekey, offset: offset + start as u64 })?;
    let mut valid_len = out.len();
    for (&(start, len), &got) in runs.iter().zip(&lens) {
        if got > len {
            return None;
        }
        data.read(start, &mut out[start..start + got]);
        if got < len {
            // The file ends in (or before) this run.
            valid_len = valid_len.min(start + got);
        }
    }
    let mut missing = PageSet::none_of_range(offset, valid_len);
    for (index, part) in divide(offset, valid_len).enumerate() {
        let bytes = &out[part.offset_in_request..part.offset_in_request + part.len];
        if plan.is_absent(index) || magic.is_some_and(|magic| magic.covers(part.offset_in_page, bytes)) {
            missing.insert(index);
        }
    }
    Some(OneSided { valid_len, missing })
}
