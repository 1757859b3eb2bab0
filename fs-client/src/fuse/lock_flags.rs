//! What fuser does not pass on of a request for a lock: whether it is flock(2) or fcntl(2).
//!
//! The kernel says so in `lk_flags` of `fuse_lk_in`; fuser 0.18 hands over every field but that one. (An owner is the number
//! of a process or of an open file, and nothing tells which.) The request is in this process's memory: fuser's `Request` is
//! the header at its front, in the buffer the kernel wrote it to, and stays there while the request is handled. So it is read
//! from there, the way a debugger would: through `/proc/self/mem`, which gives an error, and no crash, where there is nothing to
//! read. Every field that fuser does pass on is compared; what does not match in all of them is not believed.
//!
//! # Failure
//! Where the request cannot be found so (no `/proc`, another fuser) locks of both kinds are taken for fcntl's: they then see
//! each other, as they do on NFS. That is logged once.

use cuttlefs_common::locks::LockSpace;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// `fuse_in_header` and `fuse_lk_in` of the kernel's `fuse.h`.
const REQUEST_LEN: usize = 40 + 48;
const FUSE_GETLK: u32 = 31;
const FUSE_SETLKW: u32 = 33;
/// Bit of `lk_flags`.
const FUSE_LK_FLOCK: u32 = 1;

/// A request for a lock, as far as fuser passes it on.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownLock {
    pub(super) unique: u64,
    pub(super) fh: u64,
    pub(super) owner: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) typ: i32,
    pub(super) pid: u32,
}

/// Reads what fuser leaves out.
#[derive(Debug)]
pub(super) struct LockFlags {
    memory: Option<File>,
    warned: AtomicBool,
}

impl LockFlags {
    /// For the process that handles the requests.
    pub(super) fn new() -> Self {
        Self { memory: File::open("/proc/self/mem").ok(), warned: AtomicBool::new(false) }
    }

    /// Which kind of lock a request that is being handled is about.
    pub(super) fn space_of(&self, request: &fuser::Request, known: &KnownLock) -> LockSpace {
        let mut bytes = [0; REQUEST_LEN];
        let at = std::ptr::from_ref(request).addr() as u64;
        let read = self.memory.as_ref().is_some_and(|memory| memory.read_exact_at(&mut bytes, at).is_ok());
        match flags(&bytes, known).filter(|_| read) {
            Some(flags) if flags & FUSE_LK_FLOCK != 0 => LockSpace::Whole,
            Some(_) => LockSpace::Ranges,
            None => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::error!("flock and fcntl cannot be told apart here: their locks see each other");
                }
                LockSpace::Ranges
            }
        }
    }
}

/// `lk_flags`, if these bytes are that request.
fn flags(bytes: &[u8; REQUEST_LEN], known: &KnownLock) -> Option<u32> {
    let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    let long = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
    let is_it = word(0)? as usize == REQUEST_LEN
        && (FUSE_GETLK..=FUSE_SETLKW).contains(&word(4)?)
        && long(8)? == known.unique
        && long(40)? == known.fh
        && long(48)? == known.owner
        && long(56)? == known.start
        && long(64)? == known.end
        && word(72)? == known.typ as u32
        && word(76)? == known.pid;
    if is_it { word(80) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: KnownLock =
        KnownLock { unique: 10, fh: 4, owner: u64::MAX - 3, start: 0, end: i64::MAX as u64, typ: 1, pid: 77 };

    fn request(lk_flags: u32) -> [u8; REQUEST_LEN] {
        let mut bytes = Vec::new();
        let longs = |bytes: &mut Vec<u8>, longs: &[u64]| {
            longs.iter().for_each(|long| bytes.extend_from_slice(&long.to_ne_bytes()));
        };
        let words = |bytes: &mut Vec<u8>, words: &[u32]| {
            words.iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
        };
        words(&mut bytes, &[88, 32]); // len, opcode: FUSE_SETLK
        longs(&mut bytes, &[10, 1000]); // unique, nodeid
        words(&mut bytes, &[0, 0, 78, 0]); // uid, gid, pid (of the thread), padding
        longs(&mut bytes, &[4, u64::MAX - 3, 0, i64::MAX as u64]); // fh, owner, start, end
        words(&mut bytes, &[1, 77, lk_flags, 0]); // type: F_WRLCK, pid, lk_flags, padding
        bytes.try_into().expect("a whole request")
    }

    #[test]
    fn flags_are_found_in_the_request_and_nowhere_else() {
        assert_eq!(flags(&request(1), &KNOWN), Some(1));
        assert_eq!(flags(&request(0), &KNOWN), Some(0));
        for at in [0, 4, 8, 40, 48, 56, 64, 72, 76] {
            let mut other = request(1);
            other[at] ^= 0x40;
            assert_eq!(flags(&other, &KNOWN), None, "a changed byte at {at}");
        }
    }
}
