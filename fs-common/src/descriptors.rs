//! File descriptors of this process: as many as the system grants, and some reserved for its own files.
//!
//! The kernel gives the lowest free number, so a descriptor's number says how many there are at least. Who accepts a
//! connection and is given one of the last `OWN_DESCRIPTORS` for it closes it again, so that the database, logs and `status` still get theirs.
//! Administrators may have half of these, so that all others together do not keep them out.

use rustix::fd::{AsFd, AsRawFd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;

/// Descriptors that peers' connections never get: the metadata store's files, sum blocks, rings, logs.
pub const OWN_DESCRIPTORS: u64 = 256;
/// More than any server needs. Some systems grant a thousand times more, and programs that close all of them would be slow.
const MOST: u64 = 1 << 18;

/// Raises the limit to what the system grants, and returns it.
///
/// # Errors
/// The system refuses a limit that it has granted.
pub fn raise_limit() -> io::Result<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let granted = maximum.unwrap_or(MOST).min(MOST);
    let now = current.unwrap_or(granted);
    if now >= granted {
        return Ok(now);
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(granted), maximum })?;
    Ok(granted)
}

/// Why a process does not begin.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorsError {
    /// The system refuses a limit that it has granted.
    #[error("cannot raise the limit of open files: {0}")]
    Limit(#[from] io::Error),
    /// Half of what it does would fail, or wait for ever.
    #[error(
        "{granted} open files are too few for {whom}; raise the hard limit to {least} or more (ulimit -Hn, LimitNOFILE=)"
    )]
    TooFew {
        /// What the system grants.
        granted: u64,
        /// Who needs more.
        whom: &'static str,
        /// How many.
        least: u64,
    },
}

/// Raises the limit as [`raise_limit`] does, and returns it.
///
/// # Errors
/// The system grants fewer than `least`, which `whom` needs.
pub fn raise_to_at_least(least: u64, whom: &'static str) -> Result<u64, DescriptorsError> {
    match raise_limit()? {
        granted if granted < least => Err(DescriptorsError::TooFew { granted, whom, least }),
        granted => Ok(granted),
    }
}

/// Whether a peer's connection may have this descriptor, that of an administrator or of somebody else.
pub fn is_for_peers(descriptor: impl AsFd, is_administrator: bool) -> bool {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let number = u64::try_from(descriptor.as_fd().as_raw_fd()).unwrap_or(0);
    // A process with a small limit, such as a test or a client, reserves only a part of it.
    let reserve = OWN_DESCRIPTORS.min(limit / 4);
    number < limit - if is_administrator { reserve / 2 } else { reserve }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    /// All in one test, since the limit belongs to the process.
    #[test]
    fn the_last_descriptors_are_not_for_peers() {
        let granted = raise_limit().expect("raised");
        assert_eq!(getrlimit(Resource::Nofile).current, Some(granted));
        assert_eq!(raise_to_at_least(granted, "a test").expect("as many as there are"), granted);
        let few = raise_to_at_least(u64::MAX, "a test").expect_err("more than there are").to_string();
        assert!(few.contains("too few for a test") && few.contains("ulimit -Hn"), "{few}");
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(400), maximum }).expect("lowered");
        let mut all = Vec::new();
        while let Ok(descriptor) = eventfd(0, EventfdFlags::CLOEXEC) {
            all.push(descriptor);
        }
        let for_peers = all.iter().filter(|descriptor| is_for_peers(descriptor, false)).count();
        let kept = [false, true].map(|is_administrator| {
            all.iter().filter(|descriptor| !is_for_peers(descriptor, is_administrator)).count()
        });
        drop(all);
        setrlimit(Resource::Nofile, Rlimit { current: Some(granted), maximum }).expect("raised");
        assert!(for_peers > 0);
        assert_eq!(kept, [100, 50], "a quarter of so few, and half of that");
    }
}
