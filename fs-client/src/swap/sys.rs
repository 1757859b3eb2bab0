//! userfaultfd(2), and the memory of another process: the calls of the kernel that have no safe form elsewhere.
//!
//! # Invariants
//! Nothing here gives memory of this process to another one or takes a pointer: addresses of the other process are numbers, and bytes are copied.

use super::wire::PAGE;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The kernel's `UFFD_API`.
const API: u64 = 0xaa;
const FEATURE_EVENT_FORK: u64 = 1 << 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
const FEATURE_THREAD_ID: u64 = 1 << 8;
/// Since Linux 6.8.
const FEATURE_MOVE: u64 = 1 << 16;
const MODE_MISSING: u64 = 1;
const COPY_DONT_WAKE: u64 = 1;
const MESSAGE_LEN: usize = 32;
/// An address that no process maps, and that the kernel takes for one.
const NOWHERE: u64 = 0x10000;

/// `_IOWR(0xAA, number, T)`, or `_IOR` where the kernel has it so.
const fn request(direction: u64, number: u64, len: usize) -> libc::c_ulong {
    direction << 30 | (len as u64) << 16 | API << 8 | number
}
const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const IOCTL_API: libc::c_ulong = request(READ_WRITE, 0x3f, size_of::<[u64; 3]>());
const IOCTL_REGISTER: libc::c_ulong = request(READ_WRITE, 0, size_of::<[u64; 4]>());
const IOCTL_WAKE: libc::c_ulong = request(READ, 2, size_of::<[u64; 2]>());
const IOCTL_COPY: libc::c_ulong = request(READ_WRITE, 3, size_of::<[u64; 5]>());
const IOCTL_MOVE: libc::c_ulong = request(READ_WRITE, 5, size_of::<[u64; 5]>());
/// Values of the kernel's headers.
const _: () = assert!(IOCTL_API == 0xc018_aa3f && IOCTL_REGISTER == 0xc020_aa00 && IOCTL_WAKE == 0x8010_aa02);
const _: () = assert!(IOCTL_COPY == 0xc028_aa03 && IOCTL_MOVE == 0xc028_aa05);

/// What a userfaultfd is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Memory that is swapped: the swapper hears of faults, and of whatever changes the memory's layout.
    Swapped,
    /// The staging area: pages are moved there, and nobody hears of anything.
    Staging,
}

/// What the kernel tells.
#[derive(Debug)]
pub enum Message {
    /// A thread waits for a page.
    Fault {
        /// Its address.
        page: u64,
        /// The thread's id, as it knows it itself.
        thread: u32,
    },
    /// The process was forked. The child's userfaultfd.
    Fork(Uffd),
    /// Memory was moved.
    Remap {
        /// From here,
        from: u64,
        /// to here,
        to: u64,
        /// so many bytes.
        len: u64,
    },
    /// The contents of this range are given up; it stays mapped.
    Remove(u64, u64),
    /// This range is no longer mapped.
    Unmap(u64, u64),
    /// Something else.
    Other,
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> Self {
        uffd.0
    }
}

impl Uffd {
    /// One of the calling process's memory.
    ///
    /// # Errors
    /// The kernel has none (before 6.8), or this user may not have one.
    pub fn create(purpose: Purpose) -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given it, to nobody else.
        let own = Self(unsafe { OwnedFd::from_raw_fd(fd as i32) });
        let features = match purpose {
            Purpose::Swapped => {
                FEATURE_EVENT_FORK
                    | FEATURE_EVENT_REMAP
                    | FEATURE_EVENT_REMOVE
                    | FEATURE_EVENT_UNMAP
                    | FEATURE_THREAD_ID
                    | FEATURE_MOVE
            }
            Purpose::Staging => FEATURE_MOVE,
        };
        own.ioctl(IOCTL_API, &mut [API, features, 0])?;
        Ok(own)
    }

    fn ioctl<const N: usize>(&self, request: libc::c_ulong, words: &mut [u64; N]) -> io::Result<()> {
        // SAFETY: each of the requests above has exactly `N` words at its pointer (their length is in the request), and they live until it returns.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Has the kernel ask for the pages of a range that are not there.
    ///
    /// # Errors
    /// The range is not anonymous memory of the process.
    pub fn register(&self, start: u64, len: u64) -> io::Result<()> {
        self.ioctl(IOCTL_REGISTER, &mut [start, len, MODE_MISSING, 0])
    }

    /// Puts a page where none is. Wakes nobody.
    ///
    /// # Errors
    /// `EEXIST`: one is there. `EAGAIN`: there are messages to be read first. `ENOENT`: nothing is mapped there. `ESRCH`: the process is gone.
    pub fn put(&self, at: u64, bytes: &[u8; PAGE]) -> io::Result<()> {
        // SAFETY (of the request): the source lives until the call returns, and is only read.
        self.ioctl(IOCTL_COPY, &mut [at, bytes.as_ptr() as u64, PAGE as u64, COPY_DONT_WAKE, 0])
    }

    /// Whether the process whose memory it is has not ended.
    pub fn has_process(&self) -> bool {
        let put = self.put(NOWHERE, &[0; PAGE]);
        !put.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Lets threads that wait for a page try again.
    ///
    /// # Errors
    /// The process is gone.
    pub fn wake(&self, at: u64) -> io::Result<()> {
        self.ioctl(IOCTL_WAKE, &mut [at, PAGE as u64])
    }

    /// Moves a page of the calling process to a place where none is.
    ///
    /// # Errors
    /// `EBUSY`: the page is another process's too, or a device's. `ENOENT`: there is none. `EEXIST`: there is one already. `EINVAL`: the target is not
    /// this one's, or the two places have different rights.
    pub fn move_page(&self, to: u64, from: u64) -> io::Result<()> {
        self.ioctl(IOCTL_MOVE, &mut [to, from, PAGE as u64, 0, 0])
    }

    /// The next message, if there is one: first those of threads that wait for pages, then others in their order.
    ///
    /// # Errors
    /// The kernel's. `EMFILE`, `ENFILE`: the message is a fork's, and there is no descriptor for the child's userfaultfd. It stays with the kernel, where it
    /// comes behind those that are there by then.
    pub fn read(&self) -> io::Result<Option<Message>> {
        let mut bytes = [0u8; MESSAGE_LEN];
        match rustix::io::read(&self.0, &mut bytes) {
            // The kernel gives whole messages.
            Ok(_) => Ok(Some(message(&bytes))),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// `struct uffd_msg`.
fn message(bytes: &[u8; MESSAGE_LEN]) -> Message {
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    match bytes[0] {
        0x12 => Message::Fault { page: word(16) & !(PAGE as u64 - 1), thread: word(24) as u32 },
        0x13 => {
            let fd = u32::from_ne_bytes(std::array::from_fn(|index| bytes[8 + index]));
            // SAFETY: the kernel has put this descriptor into this process's table for whoever reads the message, which is this function alone.
            Message::Fork(Uffd(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
        }
        0x14 => Message::Remap { from: word(8), to: word(16), len: word(24) },
        0x15 => Message::Remove(word(8), word(16)),
        0x16 => Message::Unmap(word(8), word(16)),
        _ => Message::Other,
    }
}

/// Copies memory of another process that is there: over the whole length, or not at all.
///
/// # Errors
/// The process is gone, or has no such memory.
pub fn peek(pid: i32, at: u64, out: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: out.len() };
    // SAFETY: `local` is `out`, which is this function's to write for as long as the call takes; the kernel checks the remote range.
    let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    match usize::try_from(got) {
        Ok(got) if got == out.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_kernel_are_read() {
        let bytes = |kind: u8, words: [u64; 3]| {
            let mut bytes = [0; MESSAGE_LEN];
            bytes[0] = kind;
            for (at, word) in words.iter().enumerate() {
                bytes[8 * (at + 1)..8 * (at + 2)].copy_from_slice(&word.to_ne_bytes());
            }
            bytes
        };
        assert!(matches!(message(&bytes(0x12, [0, 0x7123, 9])), Message::Fault { page: 0x7000, thread: 9 }));
        assert!(matches!(message(&bytes(0x14, [1, 2, 3])), Message::Remap { from: 1, to: 2, len: 3 }));
        assert!(matches!(message(&bytes(0x15, [1, 2, 0])), Message::Remove(1, 2)));
        assert!(matches!(message(&bytes(0x16, [1, 2, 0])), Message::Unmap(1, 2)));
        assert!(matches!(message(&bytes(0x19, [0; 3])), Message::Other));
    }

    #[test]
    fn own_memory_can_be_peeked_at() {
        let bytes = [7u8; 100];
        let mut out = [0; 100];
        peek(std::process::id() as i32, bytes.as_ptr() as u64, &mut out).expect("own memory");
        assert_eq!(out, bytes);
        assert!(peek(std::process::id() as i32, 0, &mut out).is_err());
    }
}
