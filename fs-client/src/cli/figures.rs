//! The figures of a mount, from the process that serves it to `cuttlefs status`.
//!
//! A Unix socket in the runtime directory, named after the mount point: a client of it writes one line with its wish ([`Ask`]),
//! and gets one JSON object and the end of the file. One connection at a time, served by a thread that does nothing else and
//! waits for no server. Its directory's owner alone may connect.
//!
//! # Failure
//! A mount whose socket cannot be made goes on without, with a warning. A socket left by a killed process, or by one that is
//! about to end, is taken over by the next mount at the place; there is no answer on it until then.

use super::last_sync::LastSync;
use super::run_state;
use crate::file::volume::{Condition, UnsyncedChanges, Volume};
use anyhow::{Context, bail};
use cuttlefs_common::panic_ends;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long either side waits for the other: both are on this machine and have nothing to wait for.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Longest answer: some dozens of figures. A longer one is not ours.
const MAX_ANSWER_BYTES: u64 = 64 * 1024;
/// Longest question.
const MAX_ASK_BYTES: u64 = 16;
/// Pause after a failed accept, so that a lasting failure (no descriptors) does not spin.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What is asked of a mount's process; it answers with its figures in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Nothing else.
    Figures,
    /// It is about to be unmounted: what is not durable is to be synced, in the background.
    Sync,
    /// It is about to be forced off: what is not durable is given up.
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

/// How a mount stands, out of its figures.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MountCondition {
    server_is_away: bool,
    server_away_seconds: u64,
    /// What the last attempt to connect came to.
    #[serde(skip_serializing_if = "Option::is_none")]
    server_away_because: Option<String>,
    unheard_seconds: u64,
    /// Why the connection for heartbeats cannot be made, though the server is not away.
    #[serde(skip_serializing_if = "Option::is_none")]
    unheard_because: Option<String>,
    unsynced_files: u64,
    unsynced_bytes: u64,
    /// A sync that was asked for is under way.
    pub(super) syncing: bool,
}

impl MountCondition {
    fn of(last_sync: &LastSync) -> Self {
        // Before the changes are looked at: when it does not run any more, what it has synced is not among them.
        let syncing = last_sync.runs();
        let Condition { away, unheard, unsynced } = last_sync.condition();
        Self {
            server_is_away: away.is_some(),
            server_away_seconds: away.as_ref().map_or(0, |away| away.time.as_secs()),
            server_away_because: away.map(|away| away.because),
            unheard_seconds: unheard.as_ref().map_or(0, |unheard| unheard.time.as_secs()),
            unheard_because: unheard.map(|unheard| unheard.because),
            unsynced_files: unsynced.files,
            unsynced_bytes: unsynced.bytes,
            syncing,
        }
    }

    /// What no sync has covered.
    pub(super) fn unsynced(&self) -> UnsyncedChanges {
        UnsyncedChanges { files: self.unsynced_files, bytes: self.unsynced_bytes }
    }

    /// Why the server is away, if it is.
    pub(super) fn away(&self) -> Option<String> {
        self.server_is_away.then(|| self.server_away_because.clone().unwrap_or_default())
    }
}

/// What the FUSE session has done, by name.
pub(super) type Figures = Box<dyn Fn() -> Vec<(&'static str, u64)> + Send + Sync>;

/// What answers are made of.
struct Answering {
    mountpoint: PathBuf,
    volume: Arc<dyn Volume>,
    last_sync: Arc<LastSync>,
    edge: Figures,
}

/// Answers for a mount until it is dropped.
pub(super) struct FiguresSocket {
    path: PathBuf,
    /// Device and inode of the socket at `path`: another mount may have put its own there since.
    made: (u64, u64),
    listener: Arc<UnixListener>,
    /// Written when dropped, read by the thread after each accept.
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FiguresSocket {
    /// Starts answering; `None`, and a line in the log, if that is not possible.
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
            // Of a process that was killed or is ending: the mount point was free, or we would not be here.
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
            let listener =
                UnixListener::bind(&path).with_context(|| format!("cannot listen at {}", path.display()))?;
            // Whatever the umask is: nobody listens yet, so who connected in between is heard, and his user is looked at.
            std::fs::set_permissions(&path, Permissions::from_mode(0o600))
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
            .context("cannot start a thread")?;
        Ok(Self { path, made, listener, ending, thread: Some(thread) })
    }
}

impl Drop for FiguresSocket {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        // Wakes the thread out of `accept`. Should that not work, it is left behind and ends with the process.
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

/// Device and inode of what is at a path.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

impl Answering {
    fn answer(&self, mut connection: UnixStream) {
        // As root, or as this process: who else has come is told nothing, and does nothing.
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
        // There is one where the mount runs in the background.
        if let Some(log) = run_state::file(&self.mountpoint, "log").ok().filter(|log| log.exists()) {
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

/// How a mount stands, once it has been asked for something.
///
/// # Errors
/// As `ask`.
pub(super) fn ask_condition(mountpoint: &Path, what: Ask) -> anyhow::Result<MountCondition> {
    serde_json::from_value(ask(mountpoint, what)?).context("the mount is of another version of cuttlefs")
}

/// Asks a mount's process for something; its figures.
///
/// # Errors
/// Nobody answers for it, or not with figures.
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
