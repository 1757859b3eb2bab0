//! The connection of the command to a server.

use crate::file::RemoteVolume;
use crate::file::volume::Volume;
pub use crate::reach::{NotThere, Trust, device};
use crate::reach::{ReachError, Reaching, reach};
use crate::session::Session;
use crate::threads::NO_THREAD;
use anyhow::Context;
use cuttlefs_common::rdma::Endpoint;
use std::sync::Arc;

/// The options of a mount that concern its volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// The directory of the export to mount; empty: the export's root.
    pub subtree: Vec<u8>,
    /// A label for people, in the server's status: host name and mount point.
    pub label: String,
    /// Whether nothing will be changed.
    pub read_only: bool,
    /// Whether nothing may be cached (`cache=none`).
    pub uncached: bool,
    /// The number of requests that can be in flight at once: the threads of the mount.
    pub threads: usize,
    /// How the right server is recognized.
    pub trust: Trust,
}

/// Reaches servers. A trait, so that the command can be tested without a server.
pub trait Backend: Sync {
    /// Opens a session and returns its volume. Waits for the answer of a server that is there, and not for a server that is not.
    ///
    /// # Errors
    /// A text for people that says what failed and what to do; [`NotThere`] if the server may come later.
    fn connect_volume(&self, server: &Endpoint, options: &VolumeOptions) -> anyhow::Result<Arc<dyn Volume>>;

    /// The server's status as JSON.
    ///
    /// # Errors
    /// As `connect_volume`.
    fn server_status(&self, server: &Endpoint, trust: &Trust) -> anyhow::Result<String>;
}

/// Reaches servers over the software RNIC.
pub struct Network;

impl Backend for Network {
    fn connect_volume(&self, server: &Endpoint, options: &VolumeOptions) -> anyhow::Result<Arc<dyn Volume>> {
        self.remote_volume(server, options).map(|volume| -> Arc<dyn Volume> { volume })
    }

    fn server_status(&self, server: &Endpoint, trust: &Trust) -> anyhow::Result<String> {
        Ok(crate::reach::server_status(server, trust).map_err(told)??)
    }
}

impl Network {
    /// As `connect_volume`, but returns the type of a volume on a server, with all its methods.
    ///
    /// # Errors
    /// As `connect_volume`.
    pub fn remote_volume(
        &self,
        server: &Endpoint,
        options: &VolumeOptions,
    ) -> anyhow::Result<Arc<RemoteVolume>> {
        let asked = Reaching {
            label: options.label.clone(),
            pool: None,
            subtree: options.subtree.clone(),
            lanes: options.threads,
            trust: options.trust.clone(),
        };
        let session = reach(server, &asked, true, Session::connect).map_err(told)?;
        Ok(Arc::new(RemoteVolume::new(session).context(NO_THREAD)?))
    }
}

/// The error as the command's callers look at it: [`NotThere`] by its type.
fn told(error: ReachError) -> anyhow::Error {
    match error {
        ReachError::NotThere(error) => error.into(),
        error => error.into(),
    }
}
