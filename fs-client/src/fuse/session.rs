//! Mounting: the FUSE session, its threads, and what is agreed with the kernel.
//!
//! [`mount`] returns when the kernel has accepted the mount; [`Mounted::wait`] when it has been unmounted, by
//! whomever, and the volume is shut down. Unmounting is the kernel's business (`cli/unmount.rs`), not a method here:
//! a mount may be busy, and may end without us.

use super::edge::CuttleFuse;
use super::mount_table::{MountTable, SUBTYPE};
use super::settings::FuseSettings;
use crate::file::volume::Volume;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use fuser::{BackgroundSession, Config, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a mount could not be made, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or `fusermount3` refused.
    #[error("cannot mount at {}: {source}", mountpoint.display())]
    Mount {
        /// Where.
        mountpoint: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No thread could be started, or no descriptor opened.
    #[error("cannot start a thread or open a descriptor for the mount")]
    Thread(#[source] io::Error),
    /// The session's threads have ended while the kernel still holds the mount; the log says why.
    #[error("the FUSE session at {} has failed; mount it again to recover it", .0.display())]
    Session(PathBuf),
}

/// How long requests may go on after the mount is gone. Nobody waits for them any more; but what an application
/// closed just before is better finished than broken off.
const LAST_REQUESTS_LIMIT: Duration = Duration::from_secs(5);
/// How often a session is looked at that has ended without the kernel's doing.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A mount that is being served.
pub struct Mounted {
    mountpoint: PathBuf,
    /// Never dropped: fuser 0.18 would unmount once more, by the mount point's path, after the mount has ended, and
    /// so might take away what someone else has mounted there since.
    session: ManuallyDrop<BackgroundSession>,
    /// Polls as an error once the kernel has ended the connection.
    device: OwnedFd,
    shut_down: Box<dyn Fn() + Send + Sync>,
}

impl Mounted {
    /// Where.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Waits until the file system is unmounted, then shuts the volume down.
    ///
    /// Requests may still wait for a server that is away when a mount is forced off. So the volume is shut down
    /// after a while whether they have ended or not, which ends them.
    ///
    /// # Errors
    /// The session ended otherwise than by an unmount; the volume is shut down nevertheless.
    pub fn wait(self) -> Result<(), MountError> {
        self.wait_for_disconnect();
        let disconnected = Instant::now();
        while !self.session.guard.is_finished() && disconnected.elapsed() < LAST_REQUESTS_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        (self.shut_down)();
        // Being shut down, the volume refuses what still waits; the session's threads come back from it.
        while !self.session.guard.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.is_connected() { Err(MountError::Session(self.mountpoint)) } else { Ok(()) }
    }

    /// Whether the kernel still holds the connection, without waiting.
    fn is_connected(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.device, PollFlags::empty())], Some(&now)) == Ok(0)
    }

    /// Looks whenever the mount table changes, and now and then: a lazily unmounted connection ends when its last file
    /// is closed, which the table does not tell. Not by waiting on the FUSE device itself: every request wakes its
    /// waiters, which cost a context switch an operation.
    fn wait_for_disconnect(&self) {
        let limit = Timespec::try_from(LOOK_AGAIN).ok();
        let table = std::fs::File::open("/proc/self/mountinfo");
        while !self.session.guard.is_finished() && self.is_connected() {
            let changed = match &table {
                // The kernel tells a change of the table as priority data.
                Ok(table) => poll(&mut [PollFd::new(table, PollFlags::PRI)], limit.as_ref()).map(|_| ()),
                Err(_) => Err(rustix::io::Errno::NOENT),
            };
            if !matches!(changed, Ok(()) | Err(rustix::io::Errno::INTR)) {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }
}

/// Mounts a volume; `source` is what `/proc/mounts` shows, the server's endpoint.
///
/// # Errors
/// The mount point is not usable, or FUSE is not; nothing is left behind, and the volume is not shut down.
pub fn mount<V: Volume + ?Sized>(
    volume: Arc<V>,
    source: &str,
    mountpoint: &Path,
    settings: &FuseSettings,
) -> Result<Mounted, MountError> {
    let edge = CuttleFuse::new(Arc::clone(&volume), settings.clone());
    let cache = edge.cache();
    let session = Session::new(edge, mountpoint, &session_settings(source, SUBTYPE, settings))
        .map_err(|source| MountError::Mount { mountpoint: mountpoint.to_owned(), source })?;
    let device = session.as_fd().try_clone_to_owned().map_err(MountError::Thread)?;
    let session = ManuallyDrop::new(session.spawn().map_err(MountError::Thread)?);
    cache.begin(session.notifier());
    raise_readahead(mountpoint, settings.readahead_bytes);
    Ok(Mounted {
        mountpoint: mountpoint.to_owned(),
        session,
        device,
        shut_down: Box::new(move || volume.shut_down()),
    })
}

/// The mount options and threads of a session. `/proc/mounts` will show `source`, and the type `fuse.SUBTYPE`.
pub fn session_settings(source: &str, subtype: &str, settings: &FuseSettings) -> Config {
    let either = |on, yes, no| if on { yes } else { no };
    let mut options = vec![
        // mount(2) takes commas for the end of an option.
        MountOption::FSName(source.replace(',', "_")),
        MountOption::Subtype(subtype.to_owned()),
        MountOption::DefaultPermissions,
        either(settings.read_only, MountOption::RO, MountOption::RW),
        either(settings.suid, MountOption::Suid, MountOption::NoSuid),
        either(settings.dev, MountOption::Dev, MountOption::NoDev),
        either(settings.exec, MountOption::Exec, MountOption::NoExec),
    ];
    if rustix::process::geteuid().is_root() {
        // fuser gives fusermount's options only to fusermount; without this the type would be plain `fuse`.
        options.push(MountOption::CUSTOM(format!("subtype={subtype}")));
    }
    if settings.no_atime {
        options.push(MountOption::NoAtime);
    }
    let mut config = Config::default();
    config.mount_options = options;
    config.acl = if settings.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(settings.threads);
    config.clone_fd = settings.clone_fd;
    config
}

/// What is agreed with the kernel when a session starts. Capabilities an old kernel lacks are left out.
pub fn kernel_settings(config: &mut KernelConfig, settings: &FuseSettings) {
    // Nearest possible value instead of an error: `Err` carries it.
    if let Err(nearest) = config.set_max_write(MAX_TRANSFER_BYTES) {
        let _ = config.set_max_write(nearest);
    }
    if let Err(nearest) = config.set_max_readahead(settings.readahead_bytes) {
        let _ = config.set_max_readahead(nearest);
    }
    if let Err(nearest) = config.set_max_background(settings.max_background) {
        let _ = config.set_max_background(nearest);
    }
    if let Err(nearest) = config.set_time_granularity(Duration::from_nanos(1)) {
        let _ = config.set_time_granularity(nearest);
    }
    for wanted in [
        InitFlags::FUSE_ASYNC_READ,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_AUTO_INVAL_DATA,
        // A default ACL takes the umask's place, and the server knows whether there is one.
        InitFlags::FUSE_DONT_MASK,
        // Safe without any lifetime: a symlink's target never changes, and its number is never reused.
        InitFlags::FUSE_CACHE_SYMLINKS,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    ] {
        if let Err(missing) = config.add_capabilities(wanted) {
            tracing::info!(?missing, "this kernel's FUSE does without");
        }
    }
}

/// Has the kernel ask for locks instead of keeping them itself; whether it will.
pub(super) fn ask_for_locks(config: &mut KernelConfig) -> bool {
    let wanted = InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS;
    let added = config.add_capabilities(wanted);
    if let Err(missing) = added {
        tracing::warn!(?missing, "this kernel's FUSE keeps locks itself: they are those of this mount only");
    }
    added.is_ok()
}

/// Raises the kernel's readahead, which FUSE's handshake can only lower from 128 KiB. Needs root; without it
/// sequential readers get smaller requests, and nothing else changes.
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
