//! An open file.

use super::session::{self, Opened};
use super::{InodeNo, NativeError, OpenOptions, Session};
use crate::file::HandleState;
use crate::file::volume::{Caller, Volume, WriteHow};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::time::Duration;

/// An open file. A clone is the same open file. It is closed when the last clone, and the last request of a queue for it, is gone. Methods may be called
/// from many threads at once.
#[derive(Clone)]
pub struct File {
    session: Session,
    opened: Arc<Opened>,
    options: OpenOptions,
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File")
            .field("ino", &self.ino())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl File {
    pub(super) fn new(session: Session, opened: Opened, options: OpenOptions) -> Result<Self, NativeError> {
        Ok(Self { session, opened: Arc::new(opened), options })
    }

    /// The same open file with this deadline for its requests.
    #[must_use]
    pub fn with_deadline(&self, deadline: Option<Duration>) -> Self {
        Self { session: self.session.with_deadline(deadline), ..self.clone() }
    }

    /// The inode's number.
    pub fn ino(&self) -> InodeNo {
        self.opened.state.file().ino()
    }

    /// The session that it is open in.
    pub fn session(&self) -> &Session {
        &self.session
    }

    pub(super) fn opened(&self) -> &Arc<Opened> {
        &self.opened
    }

    pub(super) fn state(&self) -> &Arc<HandleState> {
        &self.opened.state
    }

    /// Whether each write is durable when it returns.
    pub(super) fn is_sync(&self) -> bool {
        self.options.sync
    }

    pub(super) fn check(&self, is_write: bool) -> Result<(), NativeError> {
        match is_write {
            true if !self.options.write => Err(NativeError::NotOpenFor("writing")),
            false if !self.options.read => Err(NativeError::NotOpenFor("reading")),
            _ => Ok(()),
        }
    }

    /// Reads until `out` is full or the file ends. Returns the number of bytes.
    ///
    /// # Errors
    /// `NotOpenFor`, `FileLost`, `Deadline`, the server's.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, NativeError> {
        self.check(false)?;
        let mut done = 0;
        while done < out.len() {
            let wanted = &mut out[done..];
            let len = wanted.len().min(super::queue::BYTES_MAX);
            let got = self.read_part(offset.saturating_add(done as u64), &mut wanted[..len])?;
            done += got;
            if got < len {
                break;
            }
        }
        Ok(done)
    }

    /// Reads what fits one request.
    fn read_part(&self, offset: u64, out: &mut [u8]) -> Result<usize, NativeError> {
        if let Some(got) = self.session.volume().read_mapped(self.state(), offset, out) {
            return Ok(got);
        }
        if self.session.deadline().is_none() {
            let caller = self.session.caller();
            return Ok(self.session.volume().read_into(&caller, self.state(), offset, out)?);
        }
        // The thread that reads may outlive this call, so the bytes come in memory of its own.
        let (file, len) = (self.opened.clone(), out.len());
        let bytes = self.session.run(move |volume, caller| {
            let mut bytes = vec![0; len];
            let got = volume.read_into(caller, &file.state, offset, &mut bytes)?;
            bytes.truncate(got);
            Ok(bytes)
        })?;
        out[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    /// Writes all of `bytes`. Not durable before [`Self::sync`], unless the file was opened for that.
    ///
    /// # Errors
    /// As `read_at`; `NoSpace` among the server's. A part of the bytes may have been written.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), NativeError> {
        let mut done = 0;
        while done < bytes.len() {
            let (_, len) = self.write_how(offset.saturating_add(done as u64), &bytes[done..], false)?;
            done += len;
        }
        Ok(())
    }

    /// Writes at the end of the file. Returns the place of the first byte. Up to 1 MiB is one append, whoever else appends.
    ///
    /// # Errors
    /// As `write_at`.
    pub fn append(&self, bytes: &[u8]) -> Result<u64, NativeError> {
        let (first, mut done) = self.write_how(0, bytes, true)?;
        while done < bytes.len() {
            done += self.write_how(0, &bytes[done..], true)?.1;
        }
        Ok(first)
    }

    fn write_how(&self, offset: u64, bytes: &[u8], append: bool) -> Result<(u64, usize), NativeError> {
        self.check(true)?;
        let how = WriteHow { append, sync: self.options.sync };
        let bytes = &bytes[..bytes.len().min(super::queue::BYTES_MAX)];
        if self.session.deadline().is_none() {
            return self.opened.write(&self.session.caller(), offset, bytes, how);
        }
        let (file, bytes) = (self.opened.clone(), bytes.to_vec());
        self.session.run(move |_, caller| file.write(caller, offset, &bytes, how))
    }

    /// Everything that was written before, by whatever session, is durable when this returns.
    ///
    /// # Errors
    /// `Server(Io)` if bytes that were written are lost, told once to each open file; `FileLost`, `Deadline`.
    pub fn sync(&self) -> Result<(), NativeError> {
        let file = self.opened.clone();
        self.session.run(move |volume, caller| Ok(volume.fsync(caller, file.handle, false)?))
    }

    /// The attributes.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn stat(&self) -> Result<Attr, NativeError> {
        let ino = self.ino();
        self.session.run(move |volume, caller| Ok(volume.get_attr(caller, ino)?))
    }

    /// The length, as it is at the server now.
    ///
    /// # Errors
    /// As `stat`.
    pub fn len(&self) -> Result<u64, NativeError> {
        self.stat().map(|attr| attr.size)
    }

    /// Whether it has no bytes now.
    ///
    /// # Errors
    /// As `stat`.
    pub fn is_empty(&self) -> Result<bool, NativeError> {
        self.len().map(|len| len == 0)
    }

    /// Cuts it to this length, or extends it by zeros.
    ///
    /// # Errors
    /// `NotOpenFor`, the server's, `Deadline`.
    pub fn set_len(&self, len: u64) -> Result<(), NativeError> {
        self.check(true)?;
        let ino = self.ino();
        self.session.run(move |volume, caller| session::set_len(volume, caller, ino, len))
    }
}

impl Opened {
    /// Writes what fits one request. Returns where, and how much.
    pub(super) fn write(
        &self,
        caller: &Caller,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<(u64, usize), NativeError> {
        let written = self.volume().write_how(caller, self.handle, offset, bytes, how)?;
        if written.len == 0 && !bytes.is_empty() {
            // Nothing would ever be written.
            return Err(NativeError::Server(Status::Io));
        }
        Ok((written.offset, written.len as usize))
    }
}
