//! An open file.

use super::session::{self, Opened};
use super::{InodeNo, NativeError, OpenOptions, Session};
use crate::file::HandleState;
use crate::file::volume::{Caller, FsError, Volume, WriteHow};
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
        self.opened.check_range(offset, out.len())?;
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
            return self.opened.read_into(&caller, offset, out);
        }
        // The thread that reads may outlive this call, so the bytes come in memory of its own.
        let (file, len) = (self.opened.clone(), out.len());
        let bytes = self.session.run(move |_, caller| {
            let mut bytes = vec![0; len];
            let got = file.read_into(caller, offset, &mut bytes)?;
            bytes.truncate(got);
            Ok(bytes)
        })?;
        out[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    /// Writes all of `bytes`; under a write grant one-sidedly. Not durable before [`Self::sync`], unless the file was opened for that.
    ///
    /// # Errors
    /// As `read_at`; `NoSpace` among the server's. A part of the bytes may have been written.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), NativeError> {
        self.check(true)?;
        self.opened.check_range(offset, bytes.len())?;
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
    /// As `write_at`: of a one-sided append (with a write grant), too, `NoSpace` says that it was not done. `MayBeDone` if the connection broke under one.
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

    /// Everything that was written before, by whatever session and in whatever way, is durable when this returns.
    ///
    /// # Errors
    /// `BytesLost` if bytes that were written are lost, told once to each open file; `Server(Io)`, `FileLost`, `Deadline`.
    pub fn sync(&self) -> Result<(), NativeError> {
        let file = self.opened.clone();
        self.session.run(move |_, caller| file.sync(caller))
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
        self.check_whole("changes of its length")?;
        let (ino, file) = (self.ino(), self.opened.clone());
        self.session.run(move |volume, caller| {
            session::set_len(volume, caller, ino, len)?;
            file.state.grants.set_len(len);
            Ok(())
        })
    }

    /// Whether all of the file is open, and not only a part by a region key.
    pub(super) fn check_whole(&self, wanted: &'static str) -> Result<(), NativeError> {
        match self.state().file().region_key() {
            Some(_) => Err(NativeError::NotOpenFor(wanted)),
            None => Ok(()),
        }
    }
}

impl Opened {
    /// Writes what fits one request, one-sidedly if that is granted. Returns where, and how much.
    pub(super) fn write(
        &self,
        caller: &Caller,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<(u64, usize), NativeError> {
        if let Some(offset) = self.write_granted(caller, offset, bytes, how)? {
            return Ok((offset, bytes.len()));
        }
        let key = self.state.file().bound_key();
        let written = self.volume().write_how(caller, self.handle, offset, bytes, how);
        if !how.append && matches!(written, Err(FsError::Server(Status::NoSpace))) {
            let (now, end) = (self.state.file().bound_key(), offset.saturating_add(bytes.len() as u64));
            self.state.grants.lacked_space(key, now, offset, end);
        }
        let written = written.map_err(|error| self.explained(error))?;
        if written.len == 0 && !bytes.is_empty() {
            // Nothing would ever be written.
            return Err(NativeError::Server(Status::Io));
        }
        self.state.grants.note_len(written.offset + u64::from(written.len));
        Ok((written.offset, written.len as usize))
    }

    /// Reads what fits one request.
    pub(super) fn read_into(
        &self,
        caller: &Caller,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, NativeError> {
        let got = self.volume().read_into(caller, &self.state, offset, out);
        got.map_err(|error| self.explained(error))
    }

    /// Makes everything durable.
    pub(super) fn sync(&self, caller: &Caller) -> Result<(), NativeError> {
        match self.volume().sync_told(caller, &self.state) {
            Ok(false) => Ok(()),
            Ok(true) => Err(NativeError::BytesLost),
            Err(error) => Err(self.explained(error)),
        }
    }

    /// An error of a request for this file.
    pub(super) fn explained(&self, error: FsError) -> NativeError {
        match error {
            FsError::Server(Status::Stale) if self.state.file().region_key().is_some() => {
                NativeError::RegionEnded
            }
            error => error.into(),
        }
    }

    /// Whether the range is of the part that is open.
    pub(super) fn check_range(&self, offset: u64, len: usize) -> Result<(), NativeError> {
        let Some(key) = self.state.file().region_key() else { return Ok(()) };
        let (start, end) = (key.offset, key.end());
        let is_inside = start <= offset && offset.checked_add(len as u64).is_some_and(|behind| behind <= end);
        if is_inside { Ok(()) } else { Err(NativeError::OutsideRegion { start, end }) }
    }
}
