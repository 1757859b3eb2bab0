//! Volumes of the server under test: several sessions where one has too few lanes, and a path to an open file.

use super::interrupt;
use crate::cli::{Backend as _, Network, VolumeOptions};
use crate::file::volume::{Caller, Handle, OpenHow, Volume};
use crate::session::MAX_CALLER_LANES;
use anyhow::Context as _;
use cuttlefs_common::ids::TraceId;
use cuttlefs_common::rdma::Endpoint;
use std::sync::Arc;

/// Who the benchmark is to the server: whoever formatted the pool may do everything in it.
pub(super) fn caller() -> Caller {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Caller::new(uid, gid, TraceId(0))
}

/// An open file as one thread sees it.
#[derive(Clone)]
pub(super) struct OpenFile {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) handle: Handle,
}

/// One session for at most `MAX_CALLER_LANES` threads.
///
/// # Errors
/// If the server does not answer.
pub(super) fn connect(endpoint: &Endpoint, threads: usize) -> anyhow::Result<Arc<dyn Volume>> {
    let options = VolumeOptions { label: "bench".to_owned(), threads, ..VolumeOptions::default() };
    let volume = Network.connect_volume(endpoint, &options)?;
    interrupt::ends(&volume);
    Ok(volume)
}

/// As many sessions as give each of `threads` a lane of its own.
///
/// # Errors
/// If the server does not answer.
pub(super) fn connect_all(endpoint: &Endpoint, threads: usize) -> anyhow::Result<Vec<Arc<dyn Volume>>> {
    let sessions = threads.div_ceil(MAX_CALLER_LANES).max(1);
    (0..sessions).map(|_| connect(endpoint, threads.div_ceil(sessions))).collect()
}

/// Opens a file of the root directory in a volume.
///
/// # Errors
/// As the server says.
pub(super) fn open(volume: &Arc<dyn Volume>, name: &str) -> anyhow::Result<OpenFile> {
    let caller = caller();
    let attr = volume
        .lookup(&caller, volume.root(), name.as_bytes())
        .with_context(|| format!("cannot find {name}"))?;
    let how = OpenHow { read: true, write: true, ..OpenHow::default() };
    let opened = volume.open(&caller, attr.ino, how).with_context(|| format!("cannot open {name}"))?;
    Ok(OpenFile { volume: volume.clone(), handle: opened.handle })
}
