//! A program's session with a server.

use super::{Calls, ConnectOptions, File, NativeError, OpenOptions, walk};
use crate::file::volume::{Caller, Handle, OpenHow, Volume};
use crate::file::{HandleState, RemoteVolume};
use crate::reach::{Reaching, reach};
use crate::session;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name.
    pub name: &'a [u8],
    /// The inode's number.
    pub ino: InodeNo,
    /// The inode's type.
    pub kind: FileKind,
}

/// What all handles of a session share.
pub(super) struct Shared {
    volume: Arc<RemoteVolume>,
    calls: Calls,
    is_closed: AtomicBool,
}

impl Shared {
    /// Ends the session once.
    fn close(&self) {
        if !self.is_closed.swap(true, Ordering::AcqRel) {
            self.calls.end();
            self.volume.shut_down();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.close();
    }
}

/// A session. A clone is a handle of the same session, with a deadline of its own. It ends when the last handle, file and queue is gone, or by
/// [`Session::close`].
#[derive(Clone)]
pub struct Session {
    shared: Arc<Shared>,
    deadline: Option<Duration>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let endpoint = self.volume().session().endpoint().to_string();
        f.debug_struct("Session").field("server", &endpoint).finish_non_exhaustive()
    }
}

impl Session {
    /// Connects to the server at this URL. Does not wait for a server that is not there, and 5 s at most for one that does not answer, whatever the deadline.
    ///
    /// # Errors
    /// `Url`, `Connect`: the text says what to do; `Resources`.
    pub fn connect(url: &str, options: ConnectOptions) -> Result<Self, NativeError> {
        let server: Endpoint = url.parse().map_err(|error| NativeError::Url(format!("{error}")))?;
        let ConnectOptions { trust, label, pool, subtree, threads, deadline } = options;
        let label = if label.is_empty() { own_label() } else { label };
        let lanes = threads.clamp(1, session::MAX_CALLER_LANES);
        let asked = Reaching { label, pool, subtree, lanes, trust };
        let session = reach(&server, &asked, true, session::Session::connect)?;
        Self::over(Arc::new(RemoteVolume::new(session)?), lanes, deadline)
    }

    /// A session over a volume that is connected.
    ///
    /// # Errors
    /// `Resources`.
    pub fn over(
        volume: Arc<RemoteVolume>,
        threads: usize,
        deadline: Option<Duration>,
    ) -> Result<Self, NativeError> {
        let calls = Calls::start(threads).inspect_err(|_| volume.shut_down())?;
        let shared = Shared { volume, calls, is_closed: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared), deadline })
    }

    /// The same session, with this deadline for requests of this handle and of the files that it opens; `None`: they wait.
    #[must_use]
    pub fn with_deadline(&self, deadline: Option<Duration>) -> Self {
        Self { shared: self.shared.clone(), deadline }
    }

    pub(super) fn volume(&self) -> &Arc<RemoteVolume> {
        &self.shared.volume
    }

    pub(super) fn calls(&self) -> &Calls {
        &self.shared.calls
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// Does `work` here, or, if there is a deadline, in a thread that may stay with it.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Arc<RemoteVolume>, &Caller) -> Result<T, NativeError> + Send + 'static,
    ) -> Result<T, NativeError> {
        if self.shared.is_closed.load(Ordering::Acquire) {
            return Err(NativeError::Closed);
        }
        let caller = self.caller();
        match self.deadline {
            None => work(self.volume(), &caller),
            Some(limit) => {
                let volume = self.volume().clone();
                self.calls().within(limit, move || work(&volume, &caller))
            }
        }
    }

    /// This process's user, as it is now.
    pub(super) fn caller(&self) -> Caller {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let trace = self.volume().session().own_caller().trace;
        // A write takes set-id bits from a file, as it does in a mount.
        let drops_privileges = !uid.is_root();
        Caller { drops_privileges, ..Caller::new(uid.as_raw(), gid.as_raw(), trace) }
    }

    /// Opens a file.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn open(&self, path: impl AsRef<[u8]>, options: OpenOptions) -> Result<File, NativeError> {
        let path = path.as_ref().to_vec();
        let how = OpenHow {
            read: options.read,
            write: options.write,
            append: false,
            truncate: options.truncate,
            sync: options.sync,
            told: None,
        };
        if options.truncate && !options.write {
            return Err(NativeError::NotOpenFor("writing, and would be cut"));
        }
        let opened = self.run(move |volume, caller| open(volume, caller, &path, options, how))?;
        File::new(self.clone(), opened, options)
    }

    /// Opens a file by its inode number, whatever its names are. The number is the one that [`Self::stat`] tells in a session of this user.
    ///
    /// # Errors
    /// `FileLost` if there is no such inode; the server's; `Deadline`.
    pub fn open_inode(&self, ino: InodeNo, options: OpenOptions) -> Result<File, NativeError> {
        let how =
            OpenHow { read: options.read, write: options.write, sync: options.sync, ..OpenHow::default() };
        let opened =
            self.run(move |volume, caller| Opened::take(volume, volume.open(caller, ino, how)?.handle))?;
        File::new(self.clone(), opened, options)
    }

    /// The attributes of what a path names; symlinks are followed.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn stat(&self, path: impl AsRef<[u8]>) -> Result<Attr, NativeError> {
        let path = path.as_ref().to_vec();
        self.run(move |volume, caller| walk::existing(volume, caller, &path))
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn mkdir(&self, path: impl AsRef<[u8]>, mode: u16) -> Result<Attr, NativeError> {
        let path = path.as_ref().to_vec();
        self.run(move |volume, caller| {
            let place =
                named(walk::place(volume, caller, trimmed(&path))?, NativeError::Server(Status::Exists))?;
            Ok(volume.make(caller, place.parent, &place.name, NewNode::Directory, mode)?)
        })
    }

    /// Removes a name of a file.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn unlink(&self, path: impl AsRef<[u8]>) -> Result<(), NativeError> {
        let path = path.as_ref().to_vec();
        self.run(move |volume, caller| {
            let place = named(walk::place(volume, caller, &path)?, NativeError::Server(Status::IsDirectory))?;
            Ok(volume.unlink(caller, place.parent, &place.name)?)
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn rmdir(&self, path: impl AsRef<[u8]>) -> Result<(), NativeError> {
        let path = path.as_ref().to_vec();
        self.run(move |volume, caller| {
            let place = named(walk::place(volume, caller, trimmed(&path))?, NativeError::IsRoot)?;
            Ok(volume.rmdir(caller, place.parent, &place.name)?)
        })
    }

    /// Moves a name. What had the new name is replaced.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn rename(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Result<(), NativeError> {
        let (from, to) = (from.as_ref().to_vec(), to.as_ref().to_vec());
        self.run(move |volume, caller| {
            let from = named(walk::place(volume, caller, trimmed(&from))?, NativeError::IsRoot)?;
            let to = named(walk::place(volume, caller, trimmed(&to))?, NativeError::IsRoot)?;
            volume.rename(caller, from.parent, &from.name, to.parent, &to.name, RenameMode::Replace)?;
            Ok(())
        })
    }

    /// Hands the names of a directory to `take` until it returns `false`. Without `.` and `..`.
    ///
    /// # Errors
    /// The server's. It waits for a server that is away whatever the deadline is, because `take` runs in this thread.
    pub fn read_dir(
        &self,
        path: impl AsRef<[u8]>,
        mut take: impl FnMut(Entry<'_>) -> bool,
    ) -> Result<(), NativeError> {
        let path = path.as_ref().to_vec();
        let found = self.run(move |volume, caller| walk::existing(volume, caller, &path))?;
        let each = &mut |entry: &cuttlefs_common::rpc::DirEntry<'_>| {
            take(Entry { name: entry.name, ino: entry.ino, kind: entry.kind })
        };
        Ok(self.volume().read_dir(&self.caller(), found.ino, 0, false, each)?)
    }

    /// Sets the length of what a path names.
    ///
    /// # Errors
    /// The server's; `Deadline`.
    pub fn truncate(&self, path: impl AsRef<[u8]>, len: u64) -> Result<(), NativeError> {
        let path = path.as_ref().to_vec();
        self.run(move |volume, caller| {
            let found = walk::existing(volume, caller, &path)?;
            set_len(volume, caller, found.ino, len)
        })
    }

    /// The counts of this session, by name, as `cuttlefs status` shows them of a mount.
    pub fn figures(&self) -> Vec<(&'static str, u64)> {
        self.volume().figures()
    }

    /// Ends the session for all of its handles: requests that wait fail with `Closed`. What was written and not synced is not lost by that: the server
    /// has it.
    pub fn close(&self) {
        self.shared.close();
    }
}

/// Sets a file's length.
pub(super) fn set_len(
    volume: &RemoteVolume,
    caller: &Caller,
    ino: InodeNo,
    len: u64,
) -> Result<(), NativeError> {
    volume.set_attr(caller, ino, SetAttr { size: Some(len), ..SetAttr::default() })?;
    Ok(())
}

/// An open file that is closed if nobody takes it: a caller whose time is over does not.
pub(super) struct Opened {
    volume: Arc<RemoteVolume>,
    pub(super) state: Arc<HandleState>,
    pub(super) handle: Handle,
}

impl Opened {
    pub(super) fn take(volume: &Arc<RemoteVolume>, handle: Handle) -> Result<Self, NativeError> {
        let state = volume.state_of(handle)?;
        Ok(Self { volume: volume.clone(), state, handle })
    }
}

impl Opened {
    pub(super) fn volume(&self) -> &RemoteVolume {
        &self.volume
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.volume.release(self.handle);
    }
}

fn open(
    volume: &Arc<RemoteVolume>,
    caller: &Caller,
    path: &[u8],
    options: OpenOptions,
    how: OpenHow,
) -> Result<Opened, NativeError> {
    let place = match walk::find(volume, caller, path)? {
        Ok(_) if options.create && options.exclusive => return Err(NativeError::Server(Status::Exists)),
        Ok(found) => match found.kind {
            FileKind::File => return Opened::take(volume, volume.open(caller, found.ino, how)?.handle),
            FileKind::Directory => return Err(NativeError::Server(Status::IsDirectory)),
            // Devices, fifos and sockets are the kernel's.
            _ => return Err(NativeError::Server(Status::Unsupported)),
        },
        Err(_) if !options.create => return Err(NativeError::Server(Status::NotFound)),
        Err(place) => place,
    };
    if path.ends_with(b"/") {
        return Err(NativeError::Server(Status::IsDirectory));
    }
    let (_, made) = volume.create(caller, place.parent, &place.name, options.mode, options.exclusive, how)?;
    // Somebody may have made it meanwhile.
    let opened = Opened::take(volume, made.handle)?;
    if options.truncate {
        set_len(volume, caller, opened.state.file().ino(), 0)?;
    }
    Ok(opened)
}

/// The place, if the path ends in a name.
fn named(place: walk::Place, otherwise: NativeError) -> Result<walk::Place, NativeError> {
    if place.name.is_empty() { Err(otherwise) } else { Ok(place) }
}

/// The path without slashes at its end, for names of directories.
fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    &path[..end]
}

/// Host and program.
fn own_label() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let program = std::env::current_exe().ok();
    let name = program.as_deref().and_then(|program| program.file_name()).map(|name| name.to_string_lossy());
    format!("{host}: {}", name.as_deref().unwrap_or("a program"))
}
