//! Whether a read is taken, and how.

use crate::descriptor::{self, Regular};
use crate::files::Way;
use crate::state::{self, State};
use cuttlefs_client::native::{File, NativeError};
use cuttlefs_client::preload::Count;
use libc::c_int;

/// Readers who share an offset and read at the same moment. Of a file, so many times the length of a read at the offset are left to the kernel at the end.
const SHARERS_MAX: u64 = 64;

/// Where a read begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// At the descriptor's offset, which moves.
    Offset,
    /// At this place (pread(2)).
    Place(i64),
}

/// What became of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// So many bytes were read.
    Got(usize),
    /// The kernel is to do the whole call.
    Left,
    /// The offset was moved over `len` bytes from `at`, and they did not come. The kernel is to read them there, and the offset goes back over what it
    /// has not.
    Claimed { at: u64, len: usize },
}

/// Reads up to `len` bytes by `fill`, which is called with the file, the place and the number of bytes.
pub(crate) fn read(
    fd: c_int,
    from: From,
    len: usize,
    fill: impl FnOnce(&File, u64, usize) -> Result<usize, NativeError>,
) -> Taken {
    try_read(fd, from, len, fill).unwrap_or(Taken::Left)
}

fn try_read(
    fd: c_int,
    from: From,
    len: usize,
    fill: impl FnOnce(&File, u64, usize) -> Result<usize, NativeError>,
) -> Option<Taken> {
    let state = state::get()?;
    if state::is_inside() {
        return None;
    }
    let found = descriptor::regular(fd, |device| state.mount_of(device).is_some())?;
    if len == 0 {
        return None;
    }
    let reading = descriptor::reading(fd)?;
    // A thread of the library's own, or a handler of a fault in it.
    let _inside = state::enter()?;
    if state::is_forked() {
        return leave(state, Count::LeftForked);
    }
    if rustix::process::geteuid().as_raw() != state.plan.uid {
        return leave(state, Count::LeftUser);
    }
    if state.mapped.has(found.id) {
        return leave(state, Count::LeftMapped);
    }
    let (at, len) = match from {
        From::Offset => {
            let at = descriptor::move_by(fd, 0)?;
            if !is_far_from_end(&found, at, len) {
                return leave(state, Count::LeftEnd);
            }
            (at, len)
        }
        From::Place(place) => {
            let at = u64::try_from(place).ok()?;
            (at, before_end(fd, &found, at, len)?)
        }
    };
    if len == 0 {
        return leave(state, Count::LeftEnd);
    }
    let file = match state.files.way(&found, len as u64) {
        Way::Read { is_changing: true, .. } if from == From::Offset => {
            return leave(state, Count::LeftChanging);
        }
        Way::Read { file, .. } => file,
        Way::First => return leave(state, Count::LeftFirst),
        Way::Refused => return leave(state, Count::LeftUnreached),
        Way::Open => {
            let mount = state.mount_of(found.id.device)?;
            let Some(file) = state.engine().and_then(|engine| engine.open(mount, found.id)) else {
                state.files.refused(found.id);
                return leave(state, Count::LeftUnreached);
            };
            state.count(Count::Files, 1);
            state.files.opened(found.id, file);
            // The open took its time, in which others may have moved the offset and the end.
            return leave(state, Count::LeftFirst);
        }
    };
    if !reading.is_direct && state.leaves_cached(&found) && descriptor::is_cached(fd, at, len) {
        return leave(state, Count::LeftCached);
    }
    // The offset is moved first, over all bytes that are wanted, in one step: so readers of the same open file, in other threads and processes too, get
    // parts that follow each other, as they do from the kernel.
    let (at, left) = match from {
        From::Place(_) => (at, Taken::Left),
        From::Offset => {
            let at = descriptor::move_by(fd, len as i64)?.checked_sub(len as u64)?;
            (at, Taken::Claimed { at, len })
        }
    };
    let result = fill(&file, at, len);
    match result {
        // A part of what was claimed is not enough.
        Ok(got) if got == len || (got > 0 && left == Taken::Left) => {
            state.count(Count::Reads, 1);
            state.count(Count::ReadBytes, got as u64);
            Some(Taken::Got(got))
        }
        // The file has become shorter, or the kernel knows a length of before. It would give what it has cached up to that: so it asks now.
        Ok(_) => {
            descriptor::ask_len(fd);
            state.count(Count::LeftEnd, 1);
            Some(left)
        }
        Err(_) => {
            state.files.refused(found.id);
            state.count(Count::LeftUnreached, 1);
            Some(left)
        }
    }
}

fn leave<T>(state: &State, why: Count) -> Option<T> {
    state.count(why, 1);
    None
}

/// How many of `len` bytes precede the end of the file, as the kernel knows it. `None`: the descriptor is gone.
fn before_end(fd: c_int, found: &Regular, at: u64, len: usize) -> Option<usize> {
    let is_inside = at.checked_add(len as u64).is_some_and(|end| end <= found.len);
    let end = if is_inside { found.len } else { descriptor::fresh_len(fd)? };
    Some(end.saturating_sub(at).min(len as u64) as usize)
}

/// Whether a read at the descriptor's offset ends so far before the end of the file that it also would if others who share the offset moved it meanwhile.
/// What is moved over the end must be given back, and then somebody may have got what comes next, if the file grows. So the end is the kernel's, which
/// moves the offset in one step with its read. So is the offset of a file whose length changes ([`Way::Read`]): a thread can stand still between this
/// look and its claim for longer than any number of others' reads.
fn is_far_from_end(found: &Regular, at: u64, len: usize) -> bool {
    at.checked_add((len as u64).saturating_mul(SHARERS_MAX)).is_some_and(|end| end <= found.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::FileId;

    #[test]
    fn the_end_of_a_file_is_the_kernel_s() {
        let found = Regular { id: FileId { device: (0, 1), ino: 2 }, len: 100 * SHARERS_MAX };
        assert!(is_far_from_end(&found, 0, 100) && !is_far_from_end(&found, 1, 100));
        assert!(is_far_from_end(&found, 99 * SHARERS_MAX, 1) && !is_far_from_end(&found, 0, 101));
        assert!(!is_far_from_end(&found, u64::MAX, 1) && !is_far_from_end(&found, 1, usize::MAX));
    }
}
