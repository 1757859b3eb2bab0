//! What `cuttlefs swap` and the library that it loads into programs tell each other.
//!
//! The plan is a variable of the environment, so that programs that a program starts have it, too. Each process has one connection, a Unix socket that
//! keeps the bounds of messages: the process says hello, the swapper answers, and from then on the swapper asks for pages (`Take`), one message at a
//! time. Numbers are in the host's order: both ends are on one machine, and of one build.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The variable with the plan.
pub const PLAN_VARIABLE: &str = "CUTTLEFS_SWAP";
/// Bytes of a page of the program's memory.
pub const PAGE: usize = 4096;
/// The most pages of one `Take`, and of a process's staging area.
pub const TAKE_MAX: usize = 32;
/// Bytes of a hello.
pub const HELLO_LEN: usize = 64;
/// Bytes of the longest `Take`.
pub const TAKE_LEN: usize = TAKE_MAX * 8;
/// The longest answer to a hello.
pub const ANSWER_MAX: usize = 256;
/// Begins an answer that lets the process go on; other answers are the reason in words.
pub const WELCOME: u8 = 0;

/// What a library and a command of different builds tell the user.
pub const OTHER_BUILD: &str = "libcuttlefs_swapped.so and the command are of different builds; put the library of the command's build beside the command";

/// "cuttlsw", and a version of all that stands in this module. It begins the plan and each hello.
const VERSION: &str = "cuttlsw3";
const MAGIC: u64 = match VERSION.as_bytes().first_chunk() {
    Some(bytes) => u64::from_le_bytes(*bytes),
    None => panic!("eight bytes"),
};

/// What the library is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Bytes to get for malloc(3) at the beginning.
    pub heap_bytes: u64,
    /// Bytes of addresses for anonymous mmap(2).
    pub arena_bytes: u64,
    /// The swapper's socket.
    pub socket: PathBuf,
}

impl Plan {
    /// The variable's value.
    pub fn encode(&self) -> std::ffi::OsString {
        let mut text =
            std::ffi::OsString::from(format!("{VERSION} {} {} ", self.heap_bytes, self.arena_bytes));
        text.push(&self.socket);
        text
    }

    /// Parses a value. `None`: a command of another build has made it.
    pub fn parse(text: &OsStr) -> Option<Self> {
        let mut parts = text.as_bytes().splitn(4, |byte| *byte == b' ');
        parts.next().filter(|version| *version == VERSION.as_bytes())?;
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        let (heap_bytes, arena_bytes) = (number()?, number()?);
        let socket = PathBuf::from(OsStr::from_bytes(parts.next()?));
        Some(Self { heap_bytes, arena_bytes, socket })
    }
}

/// How a process comes to be one of the swapper's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hello {
    /// A program has begun. Its userfaultfd comes with the message.
    Begun {
        /// First byte and length of the memory that malloc(3) gives from.
        heap: (u64, u64),
        /// The same of anonymous mmap(2).
        arena: (u64, u64),
        /// A page that is new in each child that is forked. What comes there is the child's number.
        badge: u64,
        /// The staging area: `TAKE_MAX` pages.
        staging: u64,
    },
    /// The process was forked from one of the swapper's, whose kernel has told so. Its userfaultfd comes with the answer.
    Forked {
        /// What it has read from the badge.
        number: u64,
        /// The staging area.
        staging: u64,
    },
}

impl Hello {
    /// Its bytes.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let words = match *self {
            Self::Begun { heap, arena, badge, staging } => {
                [MAGIC, 1, heap.0, heap.1, arena.0, arena.1, badge, staging]
            }
            Self::Forked { number, staging } => [MAGIC, 2, number, 0, 0, 0, 0, staging],
        };
        let mut bytes = [0; HELLO_LEN];
        for (room, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *room = word.to_le_bytes();
        }
        bytes
    }

    /// Parses a message.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO_LEN] = bytes.try_into().ok()?;
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut word = || words.next();
        let (magic, kind) = (word()?, word()?);
        let (a, b, c, d, badge, staging) = (word()?, word()?, word()?, word()?, word()?, word()?);
        match (magic, kind) {
            (MAGIC, 1) => Some(Self::Begun { heap: (a, b), arena: (c, d), badge, staging }),
            (MAGIC, 2) => Some(Self::Forked { number: a, staging }),
            _ => None,
        }
    }
}

/// What came of one page of a `Take`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Taken {
    /// It lies in the staging area, and no longer where it was.
    Staged = 0,
    /// There was none.
    Absent = 1,
    /// The kernel does not let it go: a device reads or writes it, it is locked, or its protection is another one.
    Held = 2,
}

impl Taken {
    /// From its byte.
    pub fn parse(byte: u8) -> Option<Self> {
        [Self::Staged, Self::Absent, Self::Held].into_iter().find(|taken| *taken as u8 == byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back() {
        let plan = Plan { heap_bytes: 5, arena_bytes: 6, socket: "/run/a b/x.sock".into() };
        assert_eq!(plan.encode(), "cuttlsw3 5 6 /run/a b/x.sock");
        assert_eq!(Plan::parse(&plan.encode()), Some(plan));
        for other in ["cuttlsw3 5 x /a", "cuttlsw2 5 6 /a", "5 6 /a", ""] {
            assert_eq!(Plan::parse(OsStr::new(other)), None, "{other}");
        }
        for hello in [
            Hello::Begun { heap: (1, 2), arena: (3, 4), badge: 5, staging: 6 },
            Hello::Forked { number: 7, staging: 8 },
        ] {
            assert_eq!(Hello::parse(&hello.encode()), Some(hello));
        }
        assert_eq!(Hello::parse(&[0; HELLO_LEN]), None);
        assert_eq!(Hello::parse(&[1]), None);
        assert!(OTHER_BUILD.len() < ANSWER_MAX);
        assert_eq!(Taken::parse(2), Some(Taken::Held));
        assert_eq!(Taken::parse(3), None);
    }
}
