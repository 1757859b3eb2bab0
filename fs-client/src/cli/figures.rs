//! The figures of a mount, from the process that serves it to `cuttlefs status`.
//!
//! The figures are served over a Unix socket in the runtime directory, which is named after the mount point. A client writes one line with its
//! request ([`Ask`]), and reads one JSON object up to the end of the file. A thread serves one connection at a time, does nothing else, and waits for
//! no server. Only the owner of the directory may connect.
//!
//! # Failure
//! A mount whose socket cannot be made goes on without it, with a warning. A socket that a killed process has left, or whose process is about to end,
//! is replaced by the next mount at the place; until then nobody answers on it.

use super::last_sync::LastSync;
use super::run_state;
use crate::file::volume::{Condition, UnsyncedChanges, Volume};
use crate::threads::NO_THREAD;
use anyhow::{Context, bail};
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::{panic_ends, socket_file};
use rustix::fs::fstat;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs::Metadata;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long either side waits for the other: both are on this machine and have nothing to wait for.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The longest answer: some dozens of figures. A longer one is not from a mount.
const MAX_ANSWER_BYTES: u64 = 64 * 1024;
/// The longest request.
const MAX_ASK_BYTES: u64 = 16;
/// Pause after a failed accept, so that a lasting failure (no descriptors) does not spin.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A request to a mount's process, which answers each with its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Only the figures.
    Figures,
    /// The mount is about to be unmounted: begins to sync unsynced changes in the background.
    Sync,
    /// The mount is about to be forced off: gives the unsynced changes up.
    GiveUp,
}

impl Ask {
    const ALL: [Self; 3] = [Self::Figures, Self::Sync, Self::GiveUp];

    fn line(self) -> &'static str {
        match self {
            Self::Figures => "figures\n",
            Self::Sync => "sync\n",
            Self::GiveUp => "give-up\n",
        }
    }
}

/// The condition of a mount, as a part of its figures.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MountCondition {
    server_is_away: bool,
    server_away_seconds: u64,
    /// The error of the last attempt to connect.
    #[serde(skip_serializing_if = "Option::is_none")]
    server_away_because: Option<String>,
    unheard_seconds: u64,
    /// Why the connection for heartbeats cannot be made, though the server is not away.
    #[serde(skip_serializing_if = "Option::is_none")]
    unheard_because: Option<String>,
    /// The server's, as it last told.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_seconds: Option<u64>,
    unsynced_files: u64,
    unsynced_bytes: u64,
    /// Whether a requested sync is under way.
    pub(super) syncing: bool,
    /// Whether the last requested sync failed.
    sync_failed: bool,
    /// The UUID of the pool whose files are shown, once it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool_uuid: Option<String>,
}

impl MountCondition {
    fn of(last_sync: &LastSync) -> Self {
        // Read before the changes: if the sync does not run any more, the changes that it has made durable are not among them.
        let syncing = last_sync.runs();
        let sync_failed = last_sync.has_failed();
        let Condition { away, unheard, lease, unsynced, pool } = last_sync.condition();
        Self {
            server_is_away: away.is_some(),
            server_away_seconds: away.as_ref().map_or(0, |away| away.time.as_secs()),
            server_away_because: away.map(|away| away.because),
            unheard_seconds: unheard.as_ref().map_or(0, |unheard| unheard.time.as_secs()),
            unheard_because: unheard.map(|unheard| unheard.because),
            lease_seconds: lease.map(|lease| lease.as_secs()),
            unsynced_files: unsynced.files,
            unsynced_bytes: unsynced.bytes,
            syncing,
            sync_failed,
            pool_uuid: pool.map(|pool| pool.to_string()),
        }
    }

    /// The unsynced changes.
    pub(super) fn unsynced(&self) -> UnsyncedChanges {
        UnsyncedChanges { files: self.unsynced_files, bytes: self.unsynced_bytes }
    }

    /// Whether the requested sync ended, and left changes that the server refused.
    pub(super) fn is_refused(&self) -> bool {
        !self.syncing && self.sync_failed && self.unsynced().files > 0
    }

    /// The pool whose files are shown, once it is known.
    pub(super) fn pool(&self) -> Option<PoolUuid> {
        self.pool_uuid.as_ref()?.parse().ok()
    }

    /// Why the server is away, if it is.
    pub(super) fn away(&self) -> Option<String> {
        self.server_is_away.then(|| self.server_away_because.clone().unwrap_or_default())
    }
}

/// Returns the counts of the FUSE session, by name.
pub(super) type Figures = Box<dyn Fn() -> Vec<(&'static str, u64)> + Send + Sync>;

/// The sources of the answers.
struct Answering {
    mountpoint: PathBuf,
    volume: Arc<dyn Volume>,
    last_sync: Arc<LastSync>,
    edge: Figures,
}

/// Answers requests for a mount's figures until it is dropped.
pub(super) struct FiguresSocket {
    path: PathBuf,
    /// The device and inode of the socket at `path`: another mount may have put its own socket there since.
    made: (u64, u64),
    listener: Arc<UnixListener>,
    /// Set when this is dropped, read by the thread after each accept.
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FiguresSocket {
    /// Starts to answer; `None`, and a line in the log, if that is not possible.
    pub(super) fn start(
        mountpoint: &Path,
        volume: Arc<dyn Volume>,
        last_sync: Arc<LastSync>,
        edge: Figures,
    ) -> Option<Self> {
        Self::try_start(Answering { mountpoint: mountpoint.to_owned(), volume, last_sync, edge })
            .inspect_err(|error| {
                tracing::warn!("`cuttlefs status` will not show this mount's figures: {error:#}")
            })
            .ok()
    }

    fn try_start(answering: Answering) -> anyhow::Result<Self> {
        let path = socket_of(&answering.mountpoint)?;
        let (listener, made) = run_state::locked(|| {
            // The file is of a process that was killed or is ending: the mount point was free, or this process would not be here.
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
            let listener =
                UnixListener::bind(&path).with_context(|| format!("cannot listen at {}", path.display()))?;
            // Whatever the umask is. Nothing accepts connections yet; a client that has connected in between is served later, after a check of its
            // user.
            socket_file::set_mode(&path, 0o600)
                .with_context(|| format!("cannot close {} to others", path.display()))?;
            let made = identity(&path).with_context(|| format!("cannot read {}", path.display()))?;
            Ok((Arc::new(listener), made))
        })?;
        let ending = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&ending);
        let accepting = Arc::clone(&listener);
        let thread = std::thread::Builder::new()
            .name("figures".to_owned())
            .spawn(move || {
                for connection in accepting.incoming() {
                    if ends.load(Ordering::Acquire) {
                        return;
                    }
                    match connection {
                        Ok(connection) => {
                            panic_ends::plant("figures");
                            answering.answer(connection);
                        }
                        Err(error) => {
                            tracing::warn!(%error, "cannot accept a question for figures");
                            std::thread::sleep(ACCEPT_AGAIN);
                        }
                    }
                }
            })
            .context(NO_THREAD)?;
        Ok(Self { path, made, listener, ending, thread: Some(thread) })
    }
}

impl Drop for FiguresSocket {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        // Wakes the thread out of `accept`. If that fails, the thread is left behind and ends with the process.
        let woken = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).is_ok();
        let _ = run_state::locked(|| {
            if identity(&self.path)? == self.made {
                std::fs::remove_file(&self.path)?;
            }
            Ok(())
        });
        if let Some(thread) = self.thread.take().filter(|_| woken)
            && thread.join().is_err()
        {
            tracing::error!("the figures thread panicked");
        }
    }
}

/// The device and inode of the file at a path.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

impl Answering {
    fn answer(&self, mut connection: UnixStream) {
        // Only root and this process's own user are served. Others get no answer and change nothing.
        let is_ours = rustix::net::sockopt::socket_peercred(&connection)
            .is_ok_and(|peer| peer.uid.is_root() || peer.uid == rustix::process::geteuid());
        if !is_ours {
            return tracing::warn!("somebody else asked for this mount's figures, or to end it");
        }
        let answered = connection
            .set_read_timeout(Some(ANSWER_LIMIT))
            .and_then(|()| connection.set_write_timeout(Some(ANSWER_LIMIT)))
            .and_then(|()| {
                let mut line = String::new();
                BufReader::new((&connection).take(MAX_ASK_BYTES)).read_line(&mut line)?;
                Ok(Ask::ALL.into_iter().find(|ask| ask.line() == line))
            })
            .and_then(|ask| {
                match ask {
                    Some(Ask::Sync) => {
                        if let Err(error) = self.last_sync.begin() {
                            tracing::warn!("no sync before the unmount: {error:#}");
                        }
                    }
                    Some(Ask::GiveUp) => self.last_sync.give_up(),
                    Some(Ask::Figures) => {}
                    None => return Err(ErrorKind::InvalidInput.into()),
                }
                connection.write_all(self.figures().to_string().as_bytes())
            });
        if let Err(error) = answered {
            tracing::debug!(%error, "nobody took the figures");
        }
    }

    fn figures(&self) -> Value {
        let mut all = Map::new();
        all.insert("mountpoint".to_owned(), json!(self.mountpoint.to_string_lossy()));
        all.insert("pid".to_owned(), json!(std::process::id()));
        // A mount in the foreground writes to no log, though there may be one, of a command that started its server again.
        let is_written = |log: &PathBuf| log.metadata().is_ok_and(|found| is_standard_error(&found));
        if let Some(log) = run_state::file(&self.mountpoint, "log").ok().filter(is_written) {
            all.insert("log".to_owned(), json!(log.to_string_lossy()));
        }
        if let Ok(Value::Object(condition)) = serde_json::to_value(MountCondition::of(&self.last_sync)) {
            all.extend(condition);
        }
        if let Some(hardware) = self.volume.hardware() {
            all.insert("hardware".to_owned(), json!(hardware));
        }
        let counted = self.volume.figures().into_iter().chain((self.edge)());
        all.extend(counted.map(|(name, value)| (name.to_owned(), json!(value))));
        Value::Object(all)
    }
}

/// Sends a request to a mount and returns its condition.
///
/// # Errors
/// As `ask`.
pub(super) fn ask_condition(mountpoint: &Path, what: Ask) -> anyhow::Result<MountCondition> {
    serde_json::from_value(ask(mountpoint, what)?).context("the mount is of another version of cuttlefs")
}

/// The pool whose files a mount shows.
///
/// # Errors
/// As `ask`.
pub(super) fn pool_of(mountpoint: &Path) -> anyhow::Result<PoolUuid> {
    let silent =
        || format!("the process of the mount at {} does not say which pool it shows", mountpoint.display());
    ask_condition(mountpoint, Ask::Figures)?.pool().with_context(silent)
}

/// Sends a request to a mount's process and returns its figures.
///
/// # Errors
/// No process answers for the mount, or the answer is not a set of figures.
pub(super) fn ask(mountpoint: &Path, what: Ask) -> anyhow::Result<Value> {
    let path = socket_of(mountpoint)?;
    let mut connection = match UnixStream::connect(&path) {
        Ok(connection) => connection,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => bail!(
            "no process of yours answers for {}; whoever mounted it can see its figures",
            mountpoint.display()
        ),
        Err(error) => return Err(error).with_context(|| format!("cannot ask at {}", path.display())),
    };
    connection
        .set_read_timeout(Some(ANSWER_LIMIT))
        .and_then(|()| connection.set_write_timeout(Some(ANSWER_LIMIT)))
        .context("cannot set a time limit")?;
    connection
        .write_all(what.line().as_bytes())
        .with_context(|| format!("cannot ask at {}", path.display()))?;
    let mut text = Vec::new();
    let mut limited = Read::by_ref(&mut connection).take(MAX_ANSWER_BYTES);
    limited.read_to_end(&mut text).with_context(|| format!("no answer at {}", path.display()))?;
    serde_json::from_slice(&text).context("the mount's figures are not JSON")
}

fn socket_of(mountpoint: &Path) -> anyhow::Result<PathBuf> {
    run_state::file(mountpoint, "figures")
}

/// Whether this process's standard error is this file.
fn is_standard_error(found: &Metadata) -> bool {
    fstat(std::io::stderr()).is_ok_and(|own| (own.st_dev, own.st_ino) == (found.dev(), found.ino()))
}
