//! Early acknowledgement: a small write is safe once its record is in its client's ring; it is executed afterwards
//! (docs/durable-rpc.md, "The file server uses it"; Durable RPC, SC '21, section 4).
//!
//! # The parts
//! `choice` what people may ask for; `ring` one ring: whose it is, which of its writes were executed, the space kept for
//! it, its queue; `service` what the receiver of `rpc::durable` asks; `execute` the writes, on workers; `rot_watch` what
//! tells a page that failed from a device that did; `recovery` what the rings of the server before this one hold.
//!
//! # Invariants
//! * A ring's writes are executed one after the other in its order, each as an ordinary write: into the redo log with
//!   (client, slot of the ring, number), then into the pool. So the last number done says of every record of the ring
//!   whether it was.
//! * A ring's head moves only past what the redo log holds durably.
//! * For as many writes as a sender may have unanswered the pool keeps pages that nobody else can take.
//!
//! # Failure
//! A write that cannot be executed for a failing device stays in its ring with everything behind it; the ring takes
//! nothing more, and the files of these writes are closed to everybody, until the server is restarted, which executes them
//! before it serves anybody. Ring, numbers and space of what is owed so are kept, whatever its client does.

mod choice;
mod execute;
mod recovery;
mod ring;
mod rot_watch;
mod service;

pub use choice::{EarlyChoice, RingDevice, RingOptions};
pub(crate) use execute::run;
pub(crate) use recovery::recover;
pub(crate) use ring::Ring;
pub(crate) use service::RingDoors;

use crate::server::Server;
use cuttlefs_common::ids::{ClientId, InodeNo};
use cuttlefs_common::persist::{LogDevice, LogDeviceError, LogDeviceKind};
use cuttlefs_common::rdma::{Device, Endpoint, HELLO_WAIT, LinkKind, RdmaError};
use cuttlefs_common::rpc::durable::{
    Beside, Kind, Receiver, ReceiverFigures, ReceiverOptions, RingStore, RingStoreError, Stepper,
};
use cuttlefs_common::rpc::{
    EARLY_UNANSWERED_MAX, EARLY_WRITE_PAGES_MAX, EarlyDoor, EarlyOffer, RINGS_PER_CLIENT, early_settings,
    ring_client, ring_slot,
};
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages kept for one ring: what its unanswered writes take at most.
pub const RING_PAGES: u64 = EARLY_UNANSWERED_MAX as u64 * EARLY_WRITE_PAGES_MAX;

/// Why early writes cannot be offered as asked.
#[derive(Debug, thiserror::Error)]
pub enum EarlyStartError {
    /// The directory or its device.
    #[error(
        "rings cannot be kept in {path}: {source}; name another by --ring-dir, or start with --early off"
    )]
    Device {
        /// Where.
        path: std::path::PathBuf,
        /// Why.
        source: LogDeviceError,
    },
    /// The rings.
    #[error(transparent)]
    Rings(#[from] RingStoreError),
    /// The RNIC.
    #[error("--early {}: {device} cannot flush behind a SEND; take wflush", .kind.label().to_lowercase())]
    Impossible {
        /// What was asked for.
        kind: Kind,
        /// Of which RNIC.
        device: String,
    },
    /// A link.
    #[error(transparent)]
    Link(#[from] RdmaError),
}

/// Rings of a server that is stepped.
#[derive(Clone)]
pub struct SteppedRings {
    /// Where they are.
    pub store: RingStore,
    /// How requests become persistent.
    pub kind: Kind,
}

/// Workers execute, and heads move behind the redo log.
const RECEIVER: ReceiverOptions = ReceiverOptions {
    executors: 0,
    slow_beyond: EARLY_UNANSWERED_MAX,
    settles: true,
    hello_wait: HELLO_WAIT,
};

struct Running {
    receiver: Receiver,
    device: LogDeviceKind,
    kinds: Vec<Kind>,
}

/// A server's early writes.
#[derive(Default)]
pub struct Early {
    /// By the id that names a ring. Those of every client that is not forgotten.
    rings: Mutex<HashMap<ClientId, Arc<Ring>>>,
    running: Mutex<Option<Running>>,
    /// Writes of the rings that the server before this one left; by this start. Written once.
    recovered: AtomicU64,
    /// Writes of pages that have rotted: they failed for good. Written by workers, and by this start; relaxed.
    lost: AtomicU64,
}

/// For `status`.
#[derive(Clone, Debug)]
pub struct EarlyFigures {
    /// What rings lie on.
    pub device: LogDeviceKind,
    /// How requests become persistent, by listener.
    pub kinds: Vec<Kind>,
    /// The receiver's.
    pub receiver: ReceiverFigures,
    /// Writes of left rings, at the start.
    pub recovered: u64,
    /// Writes that failed for good: their pages have rotted.
    pub lost: u64,
    /// Bytes of the rings of clients that are connected.
    pub ring_bytes: u64,
}

impl Early {
    /// Begins to take early writes, if that was asked for and pays. Gives what each of `listen` may offer. The server
    /// has a redo log.
    ///
    /// # Errors
    /// [`EarlyStartError`].
    pub(crate) fn start(
        server: &Arc<Server>,
        device: &dyn Device,
        options: &RingOptions,
        listen: &[Endpoint],
        doors: RingDoors,
    ) -> Result<Vec<Option<EarlyOffer>>, EarlyStartError> {
        let none = vec![None; listen.len()];
        let explicit = match options.early {
            EarlyChoice::Off => return Ok(none),
            EarlyChoice::Auto => None,
            EarlyChoice::Kind(kind) => Some(kind),
        };
        let lies_on = match probe(options) {
            Ok(lies_on) => lies_on,
            // Nobody asked for it, and the server is no worse without.
            Err(EarlyStartError::Device { path, source }) if explicit.is_none() => {
                tracing::info!(
                    "writes are not acknowledged early: {} cannot hold rings: {source}",
                    path.display()
                );
                return Ok(none);
            }
            Err(error) => return Err(error),
        };
        if explicit.is_none() && lies_on == LogDeviceKind::File {
            tracing::info!(
                "writes are not acknowledged early: {} is no persistent memory; --early wflush does it all the same",
                options.directory.display()
            );
            return Ok(none);
        }
        if let Some(kind) = explicit.filter(|kind| !kind.is_possible(&device.capabilities())) {
            return Err(EarlyStartError::Impossible { kind, device: device.name().to_owned() });
        }
        let beside: Vec<Endpoint> = listen.iter().map(beside).collect();
        let store = RingStore::new(&options.directory, Some(lies_on))?;
        let service = Arc::new(service::EarlyService::new(server.clone(), doors));
        let receiving = ReceiverOptions { hello_wait: options.hello_wait, ..RECEIVER };
        let receiver = Receiver::serve(device, &beside, store, service, receiving)?;
        let kind_of = |endpoint: &Endpoint| explicit.unwrap_or_else(|| Kind::choose(link(endpoint), lies_on));
        let kinds: Vec<Kind> = listen.iter().map(kind_of).collect();
        let doors = receiver.endpoints().into_iter().map(|endpoint| match endpoint {
            Endpoint::Tcp { port, .. } => EarlyDoor::Port(port),
            Endpoint::Unix(_) | Endpoint::Shm(_) => EarlyDoor::Beside,
        });
        let offers = kinds.iter().zip(doors).map(|(kind, door)| Some(EarlyOffer { kind: *kind, door }));
        let offers = offers.collect();
        tracing::info!(
            device = lies_on.label(),
            directory = %options.directory.display(),
            kinds = ?kinds.iter().map(|kind| kind.label()).collect::<Vec<_>>(),
            "small writes are acknowledged before they are executed"
        );
        *server.early.running.lock() = Some(Running { receiver, device: lies_on, kinds });
        Ok(offers)
    }

    /// As `start`, in one thread, on rings that lie on persistent memory: whoever steps the receiver gives its tasks to
    /// `spawn`.
    ///
    /// # Errors
    /// [`EarlyStartError`].
    pub(crate) fn start_stepped(
        server: &Arc<Server>,
        device: &dyn Device,
        rings: &SteppedRings,
        listen: &Endpoint,
        doors: RingDoors,
        spawn: Box<dyn Fn(Beside)>,
    ) -> Result<(Stepper, EarlyOffer), EarlyStartError> {
        let service = Arc::new(service::EarlyService::new(server.clone(), doors));
        let (store, endpoints) = (rings.store.clone(), [beside(listen)]);
        let clock = server.clock.clone();
        let (receiver, stepper) =
            Receiver::stepped(device, &endpoints, store, service, RECEIVER, clock, spawn)?;
        let running = Running { receiver, device: LogDeviceKind::Pmem, kinds: vec![rings.kind] };
        *server.early.running.lock() = Some(running);
        Ok((stepper, EarlyOffer { kind: rings.kind, door: EarlyDoor::Beside }))
    }

    /// The end of a server that was stepped, as if it was killed: what rings hold stays there.
    pub(crate) fn abandon(&self) {
        let running = self.running.lock().take();
        drop(running);
        // What waits in their queues holds its connection, and with it the server.
        let rings = std::mem::take(&mut *self.rings.lock());
        for ring in rings.values() {
            while ring.next().is_some() {}
        }
    }

    /// Whether rings are to be had. One that finds no space to be kept for it is welcomed all the same and told to slow
    /// down, until there is some.
    pub(crate) fn is_running(&self) -> bool {
        self.running.lock().is_some()
    }

    /// An acknowledged write cannot be done, ever.
    fn note_lost(&self, client: ClientId, ino: InodeNo) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            %client,
            %ino,
            "an acknowledged write is lost: it changes part of a page that does not match its checksum, and whose reads fail"
        );
    }

    /// A client's ring, known from now on.
    fn known_ring(&self, server: &Server, client: ClientId, number: u16) -> Result<Arc<Ring>, Status> {
        let id = ring_client(client, number);
        if let Some(ring) = self.rings.lock().get(&id) {
            return Ok(ring.clone());
        }
        let last = server.meta.last_request(client, ring_slot(number))?;
        let done = last.map_or(0, |record| record.seq);
        let ring = Arc::new(Ring::new(id, client, number, done));
        Ok(self.rings.lock().entry(id).or_insert(ring).clone())
    }

    /// Lets one ring go whose client lost its way to it, and has a session: the connection ends, what the ring holds is
    /// executed, durably, and the ring is removed. Gives the number of the last of its writes that was executed. The client
    /// says no hello for it before it has heard.
    ///
    /// # Errors
    /// `Io`: it is owed something, which stays in it for the next start, or the server stops.
    pub(crate) async fn let_ring_go(
        &self,
        server: &Server,
        client: ClientId,
        number: u16,
    ) -> Result<u64, Status> {
        if number >= RINGS_PER_CLIENT {
            return Err(Status::Invalid);
        }
        let wait = {
            let running = self.running.lock();
            running.as_ref().map(|running| retire(&running.receiver, ring_client(client, number)))
        };
        let gone = match wait {
            Some(wait) => wait.recv().await == Ok(true),
            // A start executes what there is; a server that stops is at it.
            None => !server.drain.is_stopping(),
        };
        if !gone {
            return Err(Status::Io);
        }
        let ring = self.known_ring(server, client, number)?;
        ring.release_space(server.regions.space());
        let done = ring.progress.lock().done;
        Ok(done)
    }

    /// Lets a client's rings go: connections end, what the rings hold is executed, the rings are removed. `true`: nothing
    /// is owed to it, and its numbers are needed no more but by itself.
    pub(crate) async fn let_go(&self, server: &Server, client: ClientId) -> bool {
        let mut waits = Vec::new();
        if let Some(Running { receiver, .. }) = &*self.running.lock() {
            waits.extend(rings_of(client).map(|id| (id, retire(receiver, id))));
        }
        let mut gone = Vec::new();
        for (id, wait) in waits {
            if wait.recv().await == Ok(true) {
                gone.push(id);
            }
        }
        let rings = self.rings.lock();
        if server.sessions.of(client).is_some() {
            // It is back already, and its rings are in use.
            return false;
        }
        for ring in gone.iter().filter_map(|id| rings.get(id)) {
            ring.release_space(server.regions.space());
        }
        // A ring this server never heard of it has not removed, either: the start did.
        rings_of(client).all(|id| gone.contains(&id) || !rings.contains_key(&id))
    }

    /// Nothing is known of the numbers of a client's rings any more. They hold nothing.
    pub(crate) fn forget(&self, client: ClientId) {
        let mut rings = self.rings.lock();
        rings_of(client).for_each(|id| drop(rings.remove(&id)));
    }

    /// Whether rings hold writes of this client that only the next start can execute: its numbers must be known then.
    pub(crate) fn is_owed(&self, client: ClientId) -> bool {
        let rings = self.rings.lock();
        rings_of(client).any(|id| rings.get(&id).is_some_and(|ring| ring.is_owed()))
    }

    /// Where rings are reached, in the order of the server's own endpoints; none if there are none.
    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        self.running.lock().as_ref().map_or_else(Vec::new, |running| running.receiver.endpoints())
    }

    /// A clean end: what the rings hold is executed and their heads moved.
    pub(crate) fn finish(&self) {
        // Not under the lock: workers look at it while they execute what the rings hold.
        let running = self.running.lock().take();
        if let Some(Running { receiver, .. }) = running {
            receiver.finish();
        }
    }

    /// Figures of about this moment; `None`: nothing is acknowledged early.
    pub fn figures(&self) -> Option<EarlyFigures> {
        let running = self.running.lock();
        let Running { receiver, device, kinds } = running.as_ref()?;
        let figures = receiver.figures();
        let ring_len = |kind: &Kind| early_settings(*kind).geometry().map_or(0, |ring| ring.memory_len());
        let longest = kinds.iter().map(ring_len).max().unwrap_or(0) as u64;
        Some(EarlyFigures {
            device: *device,
            kinds: kinds.clone(),
            receiver: figures,
            recovered: self.recovered.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            ring_bytes: longest * figures.senders as u64,
        })
    }
}

/// Has a ring let go; says when that is over, and whether it holds nothing.
fn retire(receiver: &Receiver, id: ClientId) -> async_channel::Receiver<bool> {
    let (done, wait) = async_channel::bounded(1);
    let done = Box::new(move |gone| {
        // Who waits takes one.
        let _ = done.try_send(gone);
    });
    receiver.retire(id, true, done);
    wait
}

/// What names a client's rings.
fn rings_of(client: ClientId) -> impl Iterator<Item = ClientId> {
    (0..RINGS_PER_CLIENT).map(move |number| ring_client(client, number))
}

fn link(endpoint: &Endpoint) -> LinkKind {
    match endpoint {
        Endpoint::Tcp { .. } => LinkKind::Tcp,
        Endpoint::Unix(_) => LinkKind::Unix,
        Endpoint::Shm(_) => LinkKind::Shm,
    }
}

/// Where the rings of those who came through `endpoint` are reached. On TCP any port that is free: clients are told.
fn beside(endpoint: &Endpoint) -> Endpoint {
    match endpoint {
        Endpoint::Tcp { host, .. } => Endpoint::Tcp { host: host.clone(), port: 0 },
        paths => EarlyDoor::Beside.endpoint(paths).expect("a path has a place beside it"),
    }
}

/// What rings would lie on.
fn probe(options: &RingOptions) -> Result<LogDeviceKind, EarlyStartError> {
    let failed = |source| EarlyStartError::Device { path: options.directory.clone(), source };
    RingStore::new(&options.directory, None)?;
    let path: &Path = &options.directory.join("probe");
    let kind = LogDevice::open(path, 4096, options.device.kind()).map(|device| device.kind());
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "a file that was made to look at its device stays");
    }
    kind.map_err(failed)
}
