//! A session: the agreement with the kernel, and the threads that serve it.

use super::abi::{InitFlags, MAJOR, MESSAGE_HEAD_LEN, MINOR, MINOR_OLDEST, opcode};
use super::attendant;
use super::dispatch::{self, Header};
use super::filesystem::Filesystem;
use super::mounting::{self, MountOptions};
use super::notifier::Notifier;
use super::reply::InitOut;
use super::requests::{Answer, Connection, Figures};
use rustix::fd::{AsFd, BorrowedFd};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How often `wait` checks whether the session has ended, although it is notified of most changes.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The file system's side of the agreement with the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Features that are used if the kernel has them.
    pub wanted: InitFlags,
    /// The largest WRITE in bytes.
    pub max_write: u32,
    /// The most pages of a request. That is more than its bytes fill, if a program's memory begins within a page or is in many parts. The kernel has
    /// a limit of its own.
    pub max_pages: u16,
    /// The largest readahead in bytes; the kernel begins with less.
    pub max_readahead: u32,
    /// The most background requests at once.
    pub max_background: u16,
}

/// A mounted file system that is not served yet.
pub struct Session {
    connection: Arc<Connection>,
    agreed: InitFlags,
    buffer_len: usize,
}

/// A session that is served.
pub struct Serving {
    connection: Arc<Connection>,
    threads: Arc<AtomicUsize>,
}

/// Counts one living thread of a session.
struct Alive {
    connection: Arc<Connection>,
    threads: Arc<AtomicUsize>,
}

impl Drop for Alive {
    fn drop(&mut self) {
        if self.threads.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.connection.end();
        }
    }
}

impl Session {
    /// Mounts, and agrees with the kernel.
    ///
    /// # Errors
    /// The mount point or FUSE cannot be used; then nothing stays mounted.
    pub fn new(mountpoint: &Path, options: &MountOptions, agreement: &Agreement) -> io::Result<Self> {
        let connection = Connection::new(mounting::mount(mountpoint, options)?);
        Self::begin(connection, agreement).inspect_err(|_| mounting::unmount(mountpoint))
    }

    fn begin(connection: Arc<Connection>, agreement: &Agreement) -> io::Result<Self> {
        let buffer_len = agreement.max_write as usize + MESSAGE_HEAD_LEN;
        let mut buffer = vec![0; buffer_len];
        let len = connection.receive(&mut buffer).ok_or(io::ErrorKind::NotConnected)?;
        let agreed = agree(&connection, &buffer[..len], agreement)?;
        Ok(Self { connection, agreed, buffer_len })
    }

    /// The features of `wanted` that the kernel has.
    pub fn agreed(&self) -> InitFlags {
        self.agreed
    }

    /// A notifier for this session's connection.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(self.connection.clone())
    }

    /// The session's device. poll(2) reports an error on it when the kernel has ended the connection.
    pub fn device(&self) -> BorrowedFd<'_> {
        self.connection.device.as_fd()
    }

    /// Starts threads that serve the file system until the kernel ends the connection.
    ///
    /// # Errors
    /// A thread could not be started.
    pub fn serve<F: Filesystem>(self, file_system: Arc<F>, threads: usize) -> io::Result<Serving> {
        let serving = Serving { connection: self.connection.clone(), threads: Arc::default() };
        attendant::start(&self.connection, &file_system, self.buffer_len)?;
        for number in 0..threads.max(1) {
            serving.threads.fetch_add(1, Ordering::AcqRel);
            let alive = Alive { connection: self.connection.clone(), threads: serving.threads.clone() };
            let (file_system, buffer_len) = (file_system.clone(), self.buffer_len);
            let serve = move || {
                let mut buffer = vec![0; buffer_len];
                while let Some(len) = alive.connection.receive_idle(&mut buffer) {
                    if !dispatch::handle(&alive.connection, &*file_system, &buffer[..len]) {
                        break;
                    }
                }
            };
            std::thread::Builder::new().name(format!("fuse-{number}")).spawn(serve)?;
        }
        Ok(serving)
    }
}

impl Serving {
    /// Whether all threads of the session have ended, and so all requests.
    pub fn is_finished(&self) -> bool {
        self.threads.load(Ordering::Acquire) == 0 && self.connection.attention.lock().spare_threads == 0
    }

    /// Waits until all threads have ended.
    pub fn wait(&self) {
        let mut attention = self.connection.attention.lock();
        while self.threads.load(Ordering::Acquire) > 0 || attention.spare_threads > 0 {
            self.connection.spare.wait_for(&mut attention, LOOK_AGAIN);
        }
    }

    /// The counts so far.
    pub fn figures(&self) -> Figures {
        self.connection.figures()
    }
}

/// Answers INIT; returns the features that were agreed on.
fn agree(connection: &Arc<Connection>, message: &[u8], agreement: &Agreement) -> io::Result<InitFlags> {
    let malformed = |_| io::Error::new(io::ErrorKind::InvalidData, "the kernel's first message is malformed");
    let (header, mut fields) = Header::parse(message).map_err(malformed)?;
    if header.opcode != opcode::INIT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel does not begin with INIT"));
    }
    let answer = Answer::new(connection.clone(), connection.note(header.unique, header.opcode, 0));
    let mut read = || -> Result<_, super::fields::Malformed> {
        let (major, minor, max_readahead) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let mut offered = u64::from(fields.u32()?);
        if offered & InitFlags::FUSE_INIT_EXT.bits() != 0 {
            offered |= u64::from(fields.u32()?) << 32;
        }
        Ok((major, minor, max_readahead, InitFlags::from_bits_retain(offered)))
    };
    let (major, minor, max_readahead, offered) = read().map_err(malformed)?;
    if major != MAJOR || minor < MINOR_OLDEST {
        answer.error(libc::EPROTO);
        let version =
            format!("this kernel's FUSE is version {major}.{minor}; {MAJOR}.{MINOR_OLDEST} is needed");
        return Err(io::Error::new(io::ErrorKind::Unsupported, version));
    }
    let always = InitFlags::FUSE_BIG_WRITES | InitFlags::FUSE_MAX_PAGES | InitFlags::FUSE_INIT_EXT;
    let agreed = (agreement.wanted | always) & offered;
    let missing = agreement.wanted - offered;
    if !missing.is_empty() {
        tracing::info!(?missing, "this kernel's FUSE does without");
    }
    let max_background = agreement.max_background.max(1);
    let out = InitOut {
        major: MAJOR,
        minor: MINOR,
        max_readahead: agreement.max_readahead.min(max_readahead),
        flags: agreed.bits(),
        max_background,
        congestion_threshold: (u32::from(max_background) * 3 / 4) as u16,
        max_write: agreement.max_write,
        time_gran: 1,
        max_pages: agreement.max_pages,
    };
    if answer.ok(&[&out.encode()]) {
        Ok(agreed)
    } else {
        Err(io::Error::new(io::ErrorKind::NotConnected, "the kernel does not want the session any more"))
    }
}
