//! The figures of a mount, from the process that serves it to `cuttlefs status`.
//!
//! A Unix socket in the runtime directory, named after the mount point: whoever connects gets one JSON object and
//! the end of the file. One connection at a time, served by a thread that does nothing else. The socket is as
//! private as the runtime directory's owner makes it; figures are all that can be had from it.
//!
//! # Failure
//! A mount whose socket cannot be made goes on without, with a warning. A socket left by a killed process, or by one that
//! is about to end, is taken over by the next mount at the place; nobody answers on it until then.

use super::run_state;
use crate::file::volume::Volume;
use anyhow::{Context, bail};
use cuttlefs_common::panic_ends;
use serde_json::{Map, Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
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
/// Pause after a failed accept, so that a lasting failure (no descriptors) does not spin.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What the FUSE session has done, by name.
pub(super) type Figures = Box<dyn Fn() -> Vec<(&'static str, u64)> + Send + Sync>;

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
    pub(super) fn start(mountpoint: &Path, volume: Arc<dyn Volume>, edge: Figures) -> Option<Self> {
        Self::try_start(mountpoint, volume, edge)
            .inspect_err(|error| {
                tracing::warn!("`cuttlefs status` will not show this mount's figures: {error:#}")
            })
            .ok()
    }

    fn try_start(mountpoint: &Path, volume: Arc<dyn Volume>, edge: Figures) -> anyhow::Result<Self> {
        let path = socket_of(mountpoint)?;
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
            let made = identity(&path).with_context(|| format!("cannot read {}", path.display()))?;
            Ok((Arc::new(listener), made))
        })?;
        let ending = Arc::new(AtomicBool::new(false));
        let mountpoint = mountpoint.to_owned();
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
                            answer(connection, &mountpoint, volume.as_ref(), &edge);
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

fn answer(mut connection: UnixStream, mountpoint: &Path, volume: &dyn Volume, edge: &Figures) {
    let figures: Map<String, Value> = volume
        .figures()
        .into_iter()
        .chain(edge())
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    let mut all = json!({ "mountpoint": mountpoint.to_string_lossy(), "pid": std::process::id() });
    if let Value::Object(all) = &mut all {
        all.extend(figures);
    }
    let sent = connection
        .set_write_timeout(Some(ANSWER_LIMIT))
        .and_then(|()| connection.write_all(all.to_string().as_bytes()));
    if let Err(error) = sent {
        tracing::debug!(%error, "nobody took the figures");
    }
}

/// The figures of a mount.
///
/// # Errors
/// Nobody answers for it, or not with figures.
pub(super) fn ask(mountpoint: &Path) -> anyhow::Result<Value> {
    let path = socket_of(mountpoint)?;
    let mut connection = match UnixStream::connect(&path) {
        Ok(connection) => connection,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => bail!(
            "no process of yours answers for {}; whoever mounted it can see its figures",
            mountpoint.display()
        ),
        Err(error) => return Err(error).with_context(|| format!("cannot ask at {}", path.display())),
    };
    connection.set_read_timeout(Some(ANSWER_LIMIT)).context("cannot set a time limit")?;
    let mut text = Vec::new();
    let mut limited = Read::by_ref(&mut connection).take(MAX_ANSWER_BYTES);
    limited.read_to_end(&mut text).with_context(|| format!("no answer at {}", path.display()))?;
    serde_json::from_slice(&text).context("the mount's figures are not JSON")
}

fn socket_of(mountpoint: &Path) -> anyhow::Result<PathBuf> {
    run_state::file(mountpoint, "figures")
}
