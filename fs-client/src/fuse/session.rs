//! Mounting: the FUSE session, its threads, and the agreement with the kernel.
//!
//! [`mount`] returns when the kernel has accepted the mount. [`Mounted::wait`] returns when any process has unmounted it, and the volume is shut
//! down. There is no method to unmount here, because that is done through the kernel (`cli/unmount.rs`): a mount may be busy, and may end without us.

use super::file_system::{CuttleFuse, LOCKS};
use super::kernel::{Agreement, InitFlags, MountOptions, Serving, Session, unmount};
use super::mount_table::{MountTable, SUBTYPE};
use super::root::look_at_root;
use super::settings::FuseSettings;
use crate::file::volume::Volume;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a mount could not be made, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or `fusermount3` refused.
    #[error("cannot mount at {}: {source}{advice}", mountpoint.display())]
    Mount {
        /// The mount point.
        mountpoint: PathBuf,
        /// What to do about FUSE's device, if that is the cause.
        advice: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// No thread could be started, or no descriptor opened.
    #[error(
        "cannot start a thread or open a descriptor for the mount; raise the limit of processes (ulimit -u, pids.max, TasksMax=) or of open files"
    )]
    Thread(#[source] io::Error),
    /// The session's threads have ended while the kernel still holds the mount; the log says why.
    #[error("the FUSE session at {} has failed; mount it again to recover it", .0.display())]
    Session(PathBuf),
}

/// How long requests may go on after the mount has gone. Nobody waits for them any more, but a file that an application closed just before should be
/// closed completely.
const LAST_REQUESTS_LIMIT: Duration = Duration::from_secs(5);
/// The most pages of a request. One write(2) of `MAX_TRANSFER_BYTES` must be one request, wherever its bytes are in memory: 256 pages, one more
/// because it may begin within a page, and two for each part of a writev(2) (of which there are at most IOV_MAX), which may begin and end within a
/// page.
const REQUEST_PAGES: u16 = 256 + 1 + 2 * 1024;
/// The kernel's limit for the pages of a request.
const PAGE_LIMIT: &str = "/proc/sys/fs/fuse/max_pages_limit";
/// How often the mount checks whether its session has ended by itself, and whether requests wait that the server does not answer.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The same for a while after the mount table has changed: an unmounted mount leaves the table a little before its connection ends.
const LOOK_SOON: Duration = Duration::from_millis(10);
/// That while.
const SOON: Duration = Duration::from_secs(1);

/// A mount that is being served.
pub struct Mounted {
    mountpoint: PathBuf,
    serving: Arc<Serving>,
    /// poll(2) reports an error on it once the kernel has ended the connection.
    device: OwnedFd,
    /// Answers requests that the server does not answer in time; called each second.
    answer_late: Box<dyn Fn() + Send + Sync>,
    shut_down: Box<dyn Fn() + Send + Sync>,
}

impl Mounted {
    /// The mount point.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// The counts of the session so far, by name, for `cuttlefs status`.
    pub fn figures(&self) -> impl Fn() -> Vec<(&'static str, u64)> + Send + Sync + 'static {
        let serving = self.serving.clone();
        move || {
            let figures = serving.figures();
            vec![("fuse_interrupted", figures.interrupted), ("fuse_spare_requests", figures.spare)]
        }
    }

    /// Waits until the file system is unmounted, then shuts the volume down.
    ///
    /// When a mount is forced off, requests may still wait for a server that is away. So after `LAST_REQUESTS_LIMIT` the volume is shut down even if
    /// requests are under way, which ends them.
    ///
    /// # Errors
    /// The session has ended otherwise than by an unmount. The volume is shut down nevertheless.
    pub fn wait(self) -> Result<(), MountError> {
        self.wait_and(|| ())
    }

    /// As `wait`. `last` is called before the volume is shut down, and may still wait for its server. At that time the requests of programs have been
    /// done, or wait for the server themselves.
    ///
    /// # Errors
    /// As `wait`.
    pub fn wait_and(self, last: impl FnOnce()) -> Result<(), MountError> {
        self.wait_for_disconnect();
        let disconnected = Instant::now();
        while !self.serving.is_finished() && disconnected.elapsed() < LAST_REQUESTS_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        last();
        (self.shut_down)();
        // The volume refuses the requests that still wait, so the session's threads end.
        while !self.serving.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.is_connected() { Err(MountError::Session(self.mountpoint)) } else { Ok(()) }
    }

    /// Whether the kernel still holds the connection, without waiting.
    fn is_connected(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.device, PollFlags::empty())], Some(&now)) == Ok(0)
    }

    /// Checks the connection whenever the mount table changes, and at intervals: a lazily unmounted connection ends when its last file is closed,
    /// which does not change the table. Waiting on the FUSE device itself would cost a context switch per operation, because every request wakes its
    /// waiters.
    fn wait_for_disconnect(&self) {
        let mut changed_at: Option<Instant> = None;
        let table = std::fs::File::open("/proc/self/mountinfo");
        while !self.serving.is_finished() && self.is_connected() {
            let is_soon = changed_at.is_some_and(|at| at.elapsed() < SOON);
            let limit = Timespec::try_from(if is_soon { LOOK_SOON } else { LOOK_AGAIN }).ok();
            let changed = match &table {
                // The kernel reports a change of the table as priority data.
                Ok(table) => poll(&mut [PollFd::new(table, PollFlags::PRI)], limit.as_ref()),
                Err(_) => Err(rustix::io::Errno::NOENT),
            };
            match changed {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => changed_at = Some(Instant::now()),
                Err(_) => std::thread::sleep(LOOK_AGAIN),
            }
            (self.answer_late)();
        }
    }
}

/// Mounts a volume. `source` is shown by `/proc/mounts`; it is the server's endpoint. `before_serving` is called when the mount is in the mount table, and no
/// request of a program has been read yet.
///
/// # Errors
/// The mount point or FUSE cannot be used. Then nothing stays mounted, and the volume is not shut down.
pub fn mount<V: Volume + ?Sized>(
    volume: Arc<V>,
    source: &str,
    mountpoint: &Path,
    settings: &FuseSettings,
    before_serving: impl FnOnce(),
) -> Result<Mounted, MountError> {
    let asks_for_locks = settings.cluster_locks && volume.has_locks();
    raise_page_limit();
    // Before the mount exists, which could then only be unmounted by force.
    let known = look_at_root(&*volume);
    let options = mount_options(source, SUBTYPE, settings);
    let session =
        Session::new(mountpoint, &options, &agreement(settings, asks_for_locks)).map_err(|source| {
            MountError::Mount {
                mountpoint: mountpoint.to_owned(),
                advice: device_advice(Path::new("/dev/fuse")),
                source,
            }
        })?;
    if asks_for_locks && !session.agreed().contains(LOCKS) {
        tracing::warn!("this kernel's FUSE keeps locks itself: they are those of this mount only");
    }
    before_serving();
    let (agreed, notifier) = (session.agreed(), session.notifier());
    let edge = Arc::new(CuttleFuse::new(Arc::clone(&volume), known, settings.clone(), agreed, notifier));
    let late = Arc::clone(&edge);
    super::watch::start(&edge);
    let device = session.device().try_clone_to_owned();
    let served = device.and_then(|device| Ok((device, Arc::new(session.serve(edge, settings.threads)?))));
    let (device, serving) = served.map_err(|error| {
        unmount(mountpoint);
        MountError::Thread(error)
    })?;
    raise_readahead(mountpoint, settings.readahead_bytes);
    Ok(Mounted {
        mountpoint: mountpoint.to_owned(),
        serving,
        device,
        answer_late: Box::new(move || late.answer_late()),
        shut_down: Box::new(move || volume.shut_down()),
    })
}

/// The mount options of a session. `/proc/mounts` will show `source`, and the type `fuse.SUBTYPE`.
pub fn mount_options(source: &str, subtype: &str, settings: &FuseSettings) -> MountOptions {
    MountOptions {
        source: source.to_owned(),
        subtype: subtype.to_owned(),
        read_only: settings.read_only,
        suid: settings.suid,
        dev: settings.dev,
        exec: settings.exec,
        no_atime: settings.no_atime,
        allow_other: settings.allow_other,
        max_read: MAX_TRANSFER_BYTES,
    }
}

/// The features and sizes that a session asks of the kernel. Features that an old kernel lacks are left out.
pub fn agreement(settings: &FuseSettings, asks_for_locks: bool) -> Agreement {
    let wanted = [
        InitFlags::FUSE_ASYNC_READ,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        // A default ACL replaces the umask, and only the server knows whether there is one.
        InitFlags::FUSE_DONT_MASK,
        // Safe without any lifetime: a symlink's target never changes, and its number is never reused.
        InitFlags::FUSE_CACHE_SYMLINKS,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        // Access control lists are kept by the server and checked by the kernel.
        InitFlags::FUSE_POSIX_ACL,
        // The server takes set-id bits and capabilities. The kernel's own way leaves some, and asks before every write.
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        // File handles (name_to_handle_at(2)) stay valid when the kernel forgets inodes.
        InitFlags::FUSE_EXPORT_SUPPORT,
    ];
    let mut wanted = wanted.into_iter().fold(InitFlags::empty(), InitFlags::union);
    if asks_for_locks {
        wanted |= LOCKS;
    }
    if settings.attr_cache.is_zero() {
        // The kernel asks for the attributes at each read, and drops the pages if they show a change.
        wanted |= InitFlags::FUSE_AUTO_INVAL_DATA;
    }
    Agreement {
        wanted,
        max_write: MAX_TRANSFER_BYTES,
        max_pages: REQUEST_PAGES,
        max_readahead: settings.readahead_bytes,
        max_background: settings.max_background,
    }
}

/// What to do if FUSE's device cannot be opened; empty if it can.
fn device_advice(device: &Path) -> &'static str {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(device);
    match opened.map_err(|error| error.kind()) {
        Err(io::ErrorKind::NotFound) => {
            "; /dev/fuse is missing: load the kernel's module (modprobe fuse), or start the container with --device /dev/fuse \
             --cap-add SYS_ADMIN"
        }
        Err(io::ErrorKind::PermissionDenied) => {
            "; you may not open /dev/fuse: root gives everybody the right with chmod 0666 /dev/fuse, as most distributions do, or \
             mounts for you with -o allow_other"
        }
        _ => "",
    }
}

/// Raises the kernel's limit to [`REQUEST_PAGES`]. The limit is one for all of FUSE, so it is only raised. This needs root and Linux 6.13; otherwise
/// requests have 256 pages, and a record in more pages is more than one append.
fn raise_page_limit() {
    let limit: Option<u32> =
        std::fs::read_to_string(PAGE_LIMIT).ok().and_then(|limit| limit.trim().parse().ok());
    if limit.is_some_and(|limit| limit < u32::from(REQUEST_PAGES))
        && let Err(error) = std::fs::write(PAGE_LIMIT, format!("{REQUEST_PAGES}\n"))
    {
        tracing::debug!(%error, "requests stay at the kernel's limit of pages");
    }
}

/// Raises the kernel's readahead, which the FUSE handshake can only lower from 128 KiB. This needs root; without it sequential readers have smaller
/// requests, and nothing else changes.
fn raise_readahead(mountpoint: &Path, readahead_bytes: u32) {
    let raise = || -> io::Result<()> {
        let mountpoint = super::resolve_mountpoint(mountpoint)?;
        let table = MountTable::read()?;
        let mounted =
            table.at(&mountpoint).ok_or_else(|| io::Error::other("it is not in the mount table"))?;
        let knob = format!("/sys/class/bdi/{}/read_ahead_kb", mounted.device);
        std::fs::write(knob, format!("{}\n", readahead_bytes / 1024))
    };
    if let Err(error) = raise() {
        tracing::debug!(%error, "readahead stays at the kernel's default");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_told() {
        assert!(device_advice(Path::new("/nowhere/fuse")).contains("modprobe fuse"));
        assert_eq!(device_advice(Path::new("/dev/null")), "", "it can be opened");
    }
}
