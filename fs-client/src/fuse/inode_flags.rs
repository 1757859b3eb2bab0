//! chattr(1) and lsattr(1): ioctl(2) requests that read and set an inode's chattr marks.
//!
//! There are two forms, `FS_IOC_GETFLAGS` and `FS_IOC_FSGETXATTR` (`linux/fs.h`), and the kernel uses either. It checks the caller's right to set
//! marks, and turns a change of some marks into a change of all. FUSE does not tell the kernel about marks, so the server enforces them, and not the
//! kernel.

use cuttlefs_common::attr::InodeFlags;

const GET_FLAGS: u32 = 0x8008_6601;
const SET_FLAGS: u32 = 0x4008_6602;
const GET_EXTENDED: u32 = 0x801c_581f;
const SET_EXTENDED: u32 = 0x401c_5820;
/// The length of the argument of `FS_IOC_SETFLAGS`, whatever length its number says.
const FLAGS_LEN: usize = 4;
/// The length of `struct fsxattr`; its first four bytes are the marks.
const EXTENDED_LEN: usize = 28;

/// The form in which marks are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `FS_*_FL`.
    Flags,
    /// `struct fsxattr`, with `FS_XFLAG_*`.
    Extended,
}

/// The meaning of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// A request for the present marks.
    Get(Form),
    /// A request to set these marks, and no others.
    Set(InodeFlags),
    /// A request for marks, or for anything else, that inodes do not have here.
    Unsupported,
}

/// The marks, and their bits in either form.
const BITS: [(InodeFlags, u32, u32); 4] = [
    (InodeFlags::IMMUTABLE, 0x10, 0x08),
    (InodeFlags::APPEND_ONLY, 0x20, 0x10),
    (InodeFlags::NO_DUMP, 0x40, 0x80),
    (InodeFlags::NO_ATIME, 0x80, 0x40),
];

impl Form {
    fn bit(self, (_, flag, extended): (InodeFlags, u32, u32)) -> u32 {
        match self {
            Self::Flags => flag,
            Self::Extended => extended,
        }
    }

    fn parse(self, bits: u32) -> Option<InodeFlags> {
        let known = BITS.iter().fold(0, |all, row| all | self.bit(*row));
        let marks = BITS.iter().filter(|row| bits & self.bit(**row) != 0);
        (bits & !known == 0).then(|| marks.fold(InodeFlags::default(), |all, row| all.with(row.0, true)))
    }

    /// The bytes that the caller reads.
    pub(super) fn encode(self, flags: InodeFlags) -> Vec<u8> {
        let marks = BITS.iter().filter(|row| flags.has(row.0));
        let mut bytes = marks.fold(0, |all, row| all | self.bit(*row)).to_ne_bytes().to_vec();
        if self == Self::Extended {
            // There are no extent sizes and no projects.
            bytes.resize(EXTENDED_LEN, 0);
        }
        bytes
    }
}

/// Parses an ioctl(2); `None`: it is not one of these requests.
pub(super) fn asked(command: u32, argument: &[u8]) -> Option<Asked> {
    let set = |form: Form, len: usize| {
        let marks = argument.get(..len).and_then(|argument| argument.split_first_chunk::<4>());
        let marks = marks.filter(|(_, rest)| rest.iter().all(|byte| *byte == 0));
        let marks = marks.and_then(|(bits, _)| form.parse(u32::from_ne_bytes(*bits)));
        marks.map_or(Asked::Unsupported, Asked::Set)
    };
    Some(match command {
        GET_FLAGS => Asked::Get(Form::Flags),
        GET_EXTENDED => Asked::Get(Form::Extended),
        SET_FLAGS => set(Form::Flags, FLAGS_LEN),
        SET_EXTENDED => set(Form::Extended, EXTENDED_LEN),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let all = InodeFlags::SETTABLE;
        for form in [Form::Flags, Form::Extended] {
            for bits in 0..16 {
                let flags = InodeFlags(bits);
                let bytes = form.encode(flags.with(InodeFlags::ACCESS_ACL, true));
                let command = if form == Form::Flags { SET_FLAGS } else { SET_EXTENDED };
                assert_eq!(asked(command, &bytes), Some(Asked::Set(flags)), "{form:?} {bits}");
            }
        }
        assert_eq!(Form::Flags.encode(all), 0xf0u32.to_ne_bytes());
        assert_eq!(Form::Extended.encode(all)[..4], 0xd8u32.to_ne_bytes());
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert_eq!(asked(0x5401, &[]), None);
        assert_eq!(asked(GET_FLAGS, &[]), Some(Asked::Get(Form::Flags)));
        // FS_NOCOW_FL; a project; too few bytes.
        assert_eq!(asked(SET_FLAGS, &0x0080_0000u32.to_ne_bytes()), Some(Asked::Unsupported));
        let mut project = vec![0; EXTENDED_LEN];
        project[12] = 1;
        assert_eq!(asked(SET_EXTENDED, &project), Some(Asked::Unsupported));
        assert_eq!(asked(SET_EXTENDED, &[0; 27]), Some(Asked::Unsupported));
        assert_eq!(asked(SET_FLAGS, &[0; 3]), Some(Asked::Unsupported));
    }
}
