//! Whether a read is taken, and how.

use crate::descriptor::{self, Regular};
use crate::files::Way;
use crate::state::{self, State};
use cuttlefs_client::native::{File, NativeError};
use cuttlefs_client::preload::Count;
use libc::c_int;

/// Where a read begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// At the descriptor's offset, which moves.
    Offset,
    /// At this place (pread(2)).
    Place(i64),
}

/// Reads up to `len` bytes by `fill`, which is called with the file, the place and the number of bytes. `None`: the kernel is to do the whole call.
pub(crate) fn read(
    fd: c_int,
    from: From,
    len: usize,
    fill: impl FnOnce(&File, u64, usize) -> Result<usize, NativeError>,
) -> Option<usize> {
    let state = state::get()?;
    // A thread of the library's own, or a signal handler that interrupts it.
    let _inside = state::enter()?;
    let found = descriptor::regular(fd, |device| state.mount_of(device).is_some())?;
    if len == 0 || !descriptor::is_readable(fd) {
        return None;
    }
    if state::is_forked() {
        return leave(state, Count::LeftForked);
    }
    if rustix::process::geteuid().as_raw() != state.plan.uid {
        return leave(state, Count::LeftUser);
    }
    if state.mapped.has(found.id) {
        return leave(state, Count::LeftMapped);
    }
    let at = match from {
        From::Offset => descriptor::move_by(fd, 0)?,
        From::Place(place) => u64::try_from(place).ok()?,
    };
    let len = before_end(fd, &found, at, len)?;
    if len == 0 {
        return leave(state, Count::LeftEnd);
    }
    let file = match state.files.way(found.id, len as u64) {
        Way::Read(file) => file,
        Way::First => return leave(state, Count::LeftFirst),
        Way::Refused => return leave(state, Count::LeftUnreached),
        Way::Open => {
            let mount = state.mount_of(found.id.device)?;
            let Some(file) = state.engine().and_then(|engine| engine.open(mount, found.id)) else {
                state.files.refused(found.id);
                return leave(state, Count::LeftUnreached);
            };
            state.count(Count::Files, 1);
            state.files.opened(found.id, file.clone());
            file
        }
    };
    let result = match from {
        From::Place(_) => fill(&file, at, len),
        From::Offset => claiming(fd, len, |at| fill(&file, at, len)),
    };
    match result {
        // The file has become shorter, or the kernel knows a length of before. It would give what it has cached up to that: so it asks now.
        Ok(0) => {
            descriptor::ask_len(fd)?;
            leave(state, Count::LeftEnd)
        }
        Ok(got) => {
            state.count(Count::Reads, 1);
            state.count(Count::ReadBytes, got as u64);
            Some(got)
        }
        Err(_) => {
            state.files.refused(found.id);
            leave(state, Count::LeftUnreached)
        }
    }
}

fn leave(state: &State, why: Count) -> Option<usize> {
    state.count(why, 1);
    None
}

/// How many of `len` bytes precede the end of the file, as the kernel knows it. `None`: the descriptor is gone.
fn before_end(fd: c_int, found: &Regular, at: u64, len: usize) -> Option<usize> {
    let is_inside = at.checked_add(len as u64).is_some_and(|end| end <= found.len);
    let end = if is_inside { found.len } else { descriptor::fresh_len(fd)? };
    Some(end.saturating_sub(at).min(len as u64) as usize)
}

/// Reads at the descriptor's offset. The offset is moved first, over all bytes that are wanted, in one step: so readers of the same open file, in other
/// threads and processes too, get parts that follow each other, as they do from the kernel. What does not come is given back.
fn claiming(
    fd: c_int,
    len: usize,
    fill: impl FnOnce(u64) -> Result<usize, NativeError>,
) -> Result<usize, NativeError> {
    let Some(at) = descriptor::move_by(fd, len as i64).and_then(|end| end.checked_sub(len as u64)) else {
        return Ok(0);
    };
    let result = fill(at);
    let got = *result.as_ref().unwrap_or(&0);
    if got < len {
        // It fails only if the program has closed the descriptor meanwhile.
        let _ = descriptor::move_by(fd, got as i64 - len as i64);
    }
    result
}
