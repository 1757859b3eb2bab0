//! One system, running: scratch directory, object store, receiver; and its senders.

use super::comparator::{Areas, ComparatorCaller};
use super::comparator_server::ComparatorServer;
use super::durable::DurableCaller;
use super::load::Caller;
use super::store::{ObjectStore, SCAN_MAX};
use super::system::System;
use crate::bench::link::Link;
use anyhow::Context as _;
use clap::ValueEnum;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rpc::durable::{Receiver, ReceiverOptions, RingStore};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What durable RPCs are logged on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LogOn {
    /// A DAX file
    Pmem,
    /// A file taken for persistent memory
    PmemEmulated,
    /// A file that is synced
    File,
}

impl LogOn {
    pub(super) fn kind(self) -> LogDeviceKind {
        match self {
            Self::Pmem => LogDeviceKind::Pmem,
            Self::PmemEmulated => LogDeviceKind::PmemEmulated,
            Self::File => LogDeviceKind::File,
        }
    }
}

/// What a system is run with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) link: Link,
    pub(super) log: LogOn,
    pub(super) objects: u32,
    pub(super) object_len: usize,
    pub(super) processing: Duration,
    /// Threads that execute requests; the receiver of a light load does so itself.
    pub(super) threads: usize,
    pub(super) batch: usize,
    pub(super) scans: bool,
    pub(super) slow_beyond: usize,
}

impl Setup {
    fn areas(&self) -> Areas {
        Areas::new(self.object_len, self.batch, if self.scans { SCAN_MAX as usize } else { 1 })
    }
}

enum Serving {
    Durable { receiver: Receiver, _device: Arc<SoftDevice> },
    Comparator(ComparatorServer),
}

/// A receiver and what it works on.
pub(super) struct RpcSite {
    pub(super) system: System,
    setup: Setup,
    directory: PathBuf,
    store: Arc<ObjectStore>,
    serving: Option<Serving>,
}

impl RpcSite {
    /// Starts a receiver in a directory of its own.
    pub(super) fn start(system: System, setup: &Setup, directory: PathBuf) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        let store =
            ObjectStore::new(&directory.join("objects"), setup.objects, setup.object_len, setup.processing)?;
        let mut site = Self { system, setup: *setup, directory, store: Arc::new(store), serving: None };
        site.restart()?;
        Ok(site)
    }

    /// Starts the receiver, after a stop or the first time.
    pub(super) fn restart(&mut self) -> anyhow::Result<()> {
        let endpoint = match self.setup.link {
            Link::Tcp => Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 0 },
            Link::Unix => Endpoint::Unix(self.directory.join("unix.sock")),
            Link::Shm => Endpoint::Shm(self.directory.join("shm.sock")),
        };
        let threads = self.setup.threads;
        self.serving = Some(match self.system.kind() {
            Some(_) => {
                let device = SoftDevice::new(SoftOptions::default());
                let rings = RingStore::new(&self.directory.join("rings"), Some(self.setup.log.kind()))?;
                let executors = if threads > 1 { threads } else { 0 };
                let slow_beyond = self.setup.slow_beyond;
                let options = ReceiverOptions { executors, slow_beyond, ..ReceiverOptions::default() };
                let receiver = Receiver::start(&*device, &endpoint, rings, self.store.clone(), options)?;
                Serving::Durable { receiver, _device: device }
            }
            None => {
                let (areas, store) = (self.setup.areas(), self.store.clone());
                Serving::Comparator(ComparatorServer::start(&endpoint, self.system, areas, store, threads)?)
            }
        });
        Ok(())
    }

    /// Ends the receiver as a crash would: its rings and objects stay.
    pub(super) fn stop(&mut self) {
        self.serving = None;
    }

    pub(super) fn endpoint(&self) -> anyhow::Result<Endpoint> {
        match &self.serving {
            Some(Serving::Durable { receiver, .. }) => Ok(receiver.endpoint()),
            Some(Serving::Comparator(server)) => Ok(server.endpoint()),
            None => anyhow::bail!("the receiver does not run"),
        }
    }

    /// A sender.
    pub(super) fn caller(&self, index: usize) -> anyhow::Result<Box<dyn Caller>> {
        Ok(match self.system.kind() {
            Some(_) => Box::new(self.durable(index)?),
            None => Box::new(self.comparator()?),
        })
    }

    pub(super) fn durable(&self, index: usize) -> anyhow::Result<DurableCaller> {
        let kind = self.system.kind().context("not a durable RPC")?;
        let Setup { object_len, batch, scans, .. } = self.setup;
        DurableCaller::connect(&self.endpoint()?, index as u128 + 1, kind, object_len, batch, scans)
    }

    pub(super) fn comparator(&self) -> anyhow::Result<ComparatorCaller> {
        ComparatorCaller::connect(&self.endpoint()?, self.system, self.setup.areas(), self.setup.object_len)
    }
}
