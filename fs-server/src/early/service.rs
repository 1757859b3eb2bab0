//! What the receiver of durable requests asks of the file server.

use super::RING_PAGES;
use super::execute::{fail, owe};
use super::ring::{Job, Ring};
use crate::server::Server;
use cuttlefs_common::ids::ClientId;
use cuttlefs_common::rdma::PeerIdentity;
use cuttlefs_common::rpc::durable::{Executed, Request, SenderIdentity, Service, ServiceFuture, Work};
use cuttlefs_common::rpc::{EarlyWrite, RINGS_PER_CLIENT, ring_client};
use cuttlefs_common::status::Status;
use std::future::ready;
use std::sync::Arc;

/// Ways to the workers: a ring that is sent is executed there until it has nothing more.
pub(crate) type RingDoors = Vec<async_channel::Sender<Arc<Ring>>>;

pub(super) struct EarlyService {
    server: Arc<Server>,
    doors: RingDoors,
}

impl EarlyService {
    pub(super) fn new(server: Arc<Server>, doors: RingDoors) -> Self {
        assert!(!doors.is_empty(), "a server has a worker");
        Self { server, doors }
    }

    fn ring(&self, id: ClientId) -> Option<Arc<Ring>> {
        self.server.early.rings.lock().get(&id).cloned()
    }

    /// Puts a write behind the others of its ring.
    fn queue(&self, ring: &Arc<Ring>, job: Job) {
        if !ring.push(job) {
            return;
        }
        // A ring is in one worker's hands at a time, and while its client has a session always in the same one's.
        let number = ring.id.0 as usize;
        let session = self.server.sessions.of(ring.client);
        let worker = session.map_or(number, |session| session.peer().home().worker_of(number));
        let door = &self.doors[worker % self.doors.len()];
        if door.try_send(ring.clone()).is_err() {
            // None of them can be done later, once there is a worker again: what is behind it may have been done then.
            fail(ring, Status::Io);
            while let Some(job) = ring.next() {
                let request = job.request(ring.id);
                let executed = match write_of(ring.id, request.body) {
                    Ok(write) => owe(&self.server, &write, Status::Io),
                    Err(_) => Executed::Kept(Status::Io.code()),
                };
                job.finish(executed, Vec::new());
            }
        }
    }
}

/// The body, if it is a write of this ring's.
fn write_of(id: ClientId, body: &[u8]) -> Result<EarlyWrite<'_>, String> {
    let write = EarlyWrite::parse(body).map_err(|error| error.to_string())?;
    if ring_client(write.client, write.ring) == id {
        Ok(write)
    } else {
        Err("a write of another client".to_owned())
    }
}

impl Service for EarlyService {
    fn lane(&self, body: &[u8]) -> u64 {
        EarlyWrite::parse(body).map_or(0, |write| ring_client(write.client, write.ring).0 as u64)
    }

    fn admit(&self, sender: &SenderIdentity, peer: &PeerIdentity) -> Result<(), String> {
        let server = &self.server;
        if server.drain.is_stopping() {
            return Err("the server is stopping".to_owned());
        }
        let client = sender.secret.client();
        let session = server.sessions.of(client).ok_or("a ring of no client that has a session")?;
        if !session.is_of(peer) {
            return Err("a ring of another user's session".to_owned());
        }
        let number = (0..RINGS_PER_CLIENT).find(|number| ring_client(client, *number) == sender.client);
        let number = number.ok_or("a ring of another client")?;
        // What a ring holds is executed by number, without a look at rights.
        if !server.exports.grant(peer, &server.meta).is_ok_and(|grant| grant.is_unrestricted()) {
            return Err("a ring of a client whose rights are checked".to_owned());
        }
        let ring = server.early.known_ring(server, client, number).map_err(|status| status.to_string())?;
        if server.regions.redo().is_none_or(|log| log.figures().failed) {
            return Err("the redo log failed".to_owned());
        }
        // Under the lock: whoever lets the rings of an ended session go looks whether there is a new one.
        let _rings = server.early.rings.lock();
        if server.sessions.of(client).is_none() {
            return Err("its client's session has ended".to_owned());
        }
        ring.keep_space(server.regions.space(), RING_PAGES);
        Ok(())
    }

    fn check(&self, id: ClientId, body: &[u8]) -> Result<(), String> {
        let write = write_of(id, body)?;
        // Ids that are neighbours could name the same ring.
        match self.ring(id).filter(|ring| ring.client != write.client) {
            None => Ok(()),
            Some(_) => Err("a write of another client".to_owned()),
        }
    }

    fn take_over(&self, work: Work) -> Option<Work> {
        match self.ring(work.request().client) {
            Some(ring) => self.queue(&ring, Job::Taken(work)),
            // It is known from its hello on, and for as long as its connection.
            None => work.finish(Executed::Kept(Status::Io.code()), &[]),
        }
        None
    }

    /// Everything is taken over.
    fn execute(&self, _request: &Request<'_>, _answer: &mut Vec<u8>) -> Executed {
        Executed::Kept(Status::Io.code())
    }

    fn execute_found<'a>(&'a self, request: Request<'a>) -> ServiceFuture<'a, Executed> {
        let Request { client: id, log, lsn, seq, body } = request;
        let write = match write_of(id, body) {
            Ok(write) => write,
            Err(reason) => {
                tracing::warn!(ring = %id, "what is no early write is left out: {reason}");
                return Box::pin(ready(Executed::Done(Status::Malformed.code())));
            }
        };
        let ring = match self.server.early.known_ring(&self.server, write.client, write.ring) {
            Ok(ring) => ring,
            Err(status) => return Box::pin(ready(Executed::Kept(status.code()))),
        };
        let (give, take) = async_channel::bounded(1);
        self.queue(&ring, Job::Found { log, lsn, seq, body: body.to_vec(), give });
        // The worker may end with it.
        Box::pin(async move { take.recv().await.unwrap_or(Executed::Kept(Status::Io.code())) })
    }

    fn last_done(&self, id: ClientId) -> u64 {
        self.ring(id).map_or(0, |ring| ring.progress.lock().done)
    }

    fn holds_back(&self, client: ClientId) -> bool {
        self.ring(client).is_some_and(|ring| !self.server.regions.space().top_up(&mut ring.reserve.lock()))
    }

    fn settle(&self) -> ServiceFuture<'_, Result<(), String>> {
        let Some(log) = self.server.regions.redo() else { return Box::pin(ready(Ok(()))) };
        let committed = log.committed();
        Box::pin(async move { committed.await.map_err(|_| "the redo log failed".to_owned()) })
    }
}
