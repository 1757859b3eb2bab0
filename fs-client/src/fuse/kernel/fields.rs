//! Reads the kernel's messages: fields one after the other, in this machine's byte order, never past the end.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// A message ends before its fields do, or a name has no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message from the kernel")]
pub(super) struct Malformed;

/// The rest of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*field)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_ne_bytes)
    }

    pub(super) fn i32(&mut self) -> Result<i32, Malformed> {
        self.array().map(i32::from_ne_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_ne_bytes)
    }

    pub(super) fn i64(&mut self) -> Result<i64, Malformed> {
        self.array().map(i64::from_ne_bytes)
    }

    /// Skips bytes.
    pub(super) fn skip(&mut self, len: usize) -> Result<(), Malformed> {
        self.bytes(len).map(|_| ())
    }

    pub(super) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (field, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(field)
    }

    /// A name, which ends with NUL.
    pub(super) fn name(&mut self) -> Result<&'a OsStr, Malformed> {
        let len = self.0.iter().position(|byte| *byte == 0).ok_or(Malformed)?;
        let name = self.bytes(len)?;
        self.skip(1)?;
        Ok(OsStr::from_bytes(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end() {
        let mut fields = Fields::new(&[1, 0, 0, 0, b'a', 0, 9]);
        assert_eq!(fields.u32(), Ok(1u32.to_le()));
        assert_eq!(fields.name(), Ok(OsStr::new("a")));
        assert_eq!(fields.name(), Err(Malformed));
        assert_eq!(fields.u32(), Err(Malformed));
        assert_eq!(fields.bytes(2), Err(Malformed));
        assert_eq!(fields.bytes(1), Ok(&[9][..]));
        assert_eq!(fields.bytes(0), Ok(&[][..]));
    }
}
