//! Sessions: the clients, how long they may be silent, and the requests that they have already made.
//!
//! As in NFSv4.1 (RFC 8881 section 2.10), a client draws a secret, whose hash is its id (`SessionSecret`), and attaches. Each of its connections uses
//! a slot of its own. A slot has one request in flight. A retransmission has the same sequence number and gets the first answer.
//!
//! # Invariants
//! * A mutation runs once for each (session, slot, seq).
//! * Each connection of a session comes from the user who made the session, and has presented the client's secret.
//! * A session's number is never 0 and never reused within the life of a server; it owns the session's filekeys.
//!
//! A request's effect and its answer are one batch of metadata (`SlotRecord`), so that the next server knows a slot's last mutation, too. The record
//! outlives the session, because a client may be cut off for longer than its lease and send its request once more. `MAX_ABSENT` clients without a
//! session are remembered.
//!
//! # The grace period
//! A new server does not know which files the clients of the server before have open. Until all of them have said that they have reclaimed their
//! files (`Request::Recovered`), or one lease has passed since it began to listen, no unlinked file is freed, and no lock is granted (`locks`). When the
//! files that no client reclaimed have been freed, all is *settled*. `rpc/handlers/grace.rs` says which requests wait until then.
//!
//! # Changes that clients restore
//! After a kill, clients may have the only copies of answered changes, and restore these before they say `Recovered`. Until all have, the server is
//! *gathering*: no other client is told the contents of files. From when it begins to listen the server waits `GATHER` for clients that have not
//! connected, and `GATHER_HERE` for those that have connected and not said `Recovered`.
//!
//! # Retransmitted requests
//! With `Recovered` each client names the requests to which it has no answer. If such a request was done, the answer in its slot's record is put into
//! the slot (`rpc/handlers/recall.rs`), as if this server had given it. If the answer opens a file, the file is open from then on, and no longer an
//! orphan that the end of the grace period frees.
//!
//! # Failure
//! The session of a client that is silent for the lease ends: the reaper gets its number and revokes its filekeys.

mod absent;
mod closed_keys;
mod slot;

pub(crate) use slot::{Admission, Slot};

use crate::meta::ClientRecord;
use crate::shares::{Peer, Resource, Taken};
use absent::Absent;
use closed_keys::ClosedKeys;
use cuttlefs_common::ids::{ClientId, FileKey, InodeNo, SlotIndex};
use cuttlefs_common::rdma::{PeerKey, RegionOwner};
use cuttlefs_common::rpc::SLOTS_PER_SESSION;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Clock, Random};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How long a server waits, after a kill of the one before, for clients to connect that may have answered changes. Clients try every second; the rest
/// is for a handshake on a busy machine.
pub const GATHER: Duration = Duration::from_secs(3);

/// How long it waits for clients that have connected and not restored all. Each has at most 32 MiB to restore, which takes part of a second, and a
/// client that never finishes must not hold up others for a lease.
const GATHER_HERE: Duration = Duration::from_secs(10);

/// An end that does not come before [`Sessions::begin`].
const UNTIL_BEGUN: u64 = u64::MAX;

/// Longest label in bytes: a host name (64) and the end of a path. `status` lists many labels in one message.
const LABEL_MAX: usize = 128;

/// A label as it is logged and shown: without characters that people cannot read, for it is printed on terminals, and cut to `LABEL_MAX`.
fn clean_label(label: &str) -> String {
    let mut clean = String::new();
    for character in label.chars() {
        let shown = if is_shown(character) { character } else { '?' };
        if clean.len() + shown.len_utf8() > LABEL_MAX {
            break;
        }
        clean.push(shown);
    }
    clean
}

/// Whether a character is shown as itself: it is no control character, and none that hides others or changes their direction.
fn is_shown(character: char) -> bool {
    let is_format = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    !character.is_control() && !is_format
}

/// A session of a client.
pub struct Session {
    number: RegionOwner,
    client: ClientId,
    label: String,
    root: InodeNo,
    slots: Vec<Mutex<Slot>>,
    /// Monotonic milliseconds at the last request. Written by workers, read by the reaper. Relaxed: one request more or less does not matter for a
    /// lease of seconds.
    last_seen_ms: AtomicU64,
    ended: AtomicBool,
    /// The number of attached connections.
    connections: AtomicU64,
    reclaimed: Mutex<Reclaimed>,
    closed_keys: ClosedKeys,
    /// Whose share it counts against.
    place: Taken,
}

/// Filekeys of a client's last attempt to reclaim its files, all over one connection. As many as the client may have open.
#[derive(Default)]
struct Reclaimed {
    /// The connection's number.
    connection: u64,
    filekeys: Vec<FileKey>,
    /// The number of filekeys beyond which those that were closed since are removed.
    prune_beyond: usize,
}

/// The number of reclaimed filekeys up to which closed ones are not looked for.
const RECLAIMED_UNLOOKED: usize = 4096;

impl Session {
    /// The session's number, which owns its filekeys.
    pub fn number(&self) -> RegionOwner {
        self.number
    }

    /// The client's id.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// The client's host and mount point, for people.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The peer in whose share the session counts.
    pub fn peer(&self) -> &Arc<Peer> {
        self.place.peer()
    }

    /// The directory that the client sees as the root.
    pub fn root(&self) -> InodeNo {
        self.root
    }

    /// Whether the session has ended.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The number of attached connections.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Notes that a connection was attached (`came`) or has ended.
    pub fn note_connection(&self, came: bool) {
        if came {
            self.connections.fetch_add(1, Ordering::Relaxed);
        } else {
            self.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Filekeys that its client has closed and may have counted reads of.
    pub(crate) fn closed_keys(&self) -> &ClosedKeys {
        &self.closed_keys
    }

    /// The slot of a request.
    pub fn slot(&self, index: SlotIndex) -> Result<&Mutex<Slot>, Status> {
        self.slots.get(usize::from(index.0)).ok_or(Status::BadSequence)
    }

    /// Notes filekeys that were reclaimed over a connection. Returns those of an earlier attempt, over another connection: the client may not have
    /// got their numbers, so the caller closes them.
    pub fn note_reclaimed(&self, connection: u64, filekeys: impl Iterator<Item = FileKey>) -> Vec<FileKey> {
        let mut reclaimed = self.reclaimed.lock();
        let unknown = if reclaimed.connection == connection {
            Vec::new()
        } else {
            std::mem::take(&mut reclaimed.filekeys)
        };
        reclaimed.connection = connection;
        reclaimed.filekeys.extend(filekeys);
        unknown
    }

    /// Forgets reclaimed filekeys that were closed since, because a client may reclaim and close as often as it likes. Looks for them when there are
    /// twice as many as were open at the last look.
    pub fn prune_reclaimed(&self, is_open: impl Fn(FileKey) -> bool) {
        let mut reclaimed = self.reclaimed.lock();
        if reclaimed.filekeys.len() > reclaimed.prune_beyond.max(RECLAIMED_UNLOOKED) {
            reclaimed.filekeys.retain(|filekey| is_open(*filekey));
            reclaimed.prune_beyond = 2 * reclaimed.filekeys.len();
        }
    }

    fn touch(&self, now: Duration) {
        self.last_seen_ms.store(now.as_millis() as u64, Ordering::Relaxed);
    }
}

/// All sessions of a server.
pub struct Sessions {
    by_client: Mutex<BTreeMap<ClientId, Arc<Session>>>,
    /// Locked after `by_client`.
    absent: Mutex<Absent>,
    /// Clients of the server before this one that may still reclaim files.
    recovering: Mutex<BTreeSet<ClientId>>,
    /// Monotonic milliseconds at which the grace period ends; [`UNTIL_BEGUN`] at first. Relaxed, like the next fields: it does not matter if a reader
    /// sees a change late.
    grace_until_ms: AtomicU64,
    /// Monotonic milliseconds of the last `tick`.
    ticked_ms: AtomicU64,
    /// Whether clients may still restore answered changes. Cleared once. Relaxed: a reader of an old `true` reads again.
    gathering: Arc<AtomicBool>,
    /// Monotonic milliseconds from which on only connected clients are waited for; [`UNTIL_BEGUN`] at first.
    gather_until_ms: AtomicU64,
    /// Whether the grace period is over and the files that it kept have been freed. Set once, after that (release); read before each request
    /// (acquire).
    settled: AtomicBool,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    lease: Duration,
}

impl Sessions {
    /// No sessions yet. `before`: the remembered clients. Also returns those that must be forgotten now.
    pub fn new(
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
        lease: Duration,
        before: Vec<(ClientId, ClientRecord)>,
    ) -> (Self, Vec<ClientId>) {
        let had_session = |(client, record): &(ClientId, ClientRecord)| record.has_session.then_some(*client);
        let recovering = before.iter().filter_map(had_session).collect();
        let mut absent = Absent::default();
        let forgotten = absent.extend(before.into_iter().map(|(client, record)| (client, record.owner)));
        let sessions = Self {
            by_client: Mutex::default(),
            absent: Mutex::new(absent),
            recovering: Mutex::new(recovering),
            grace_until_ms: AtomicU64::new(UNTIL_BEGUN),
            ticked_ms: AtomicU64::new(clock.monotonic().as_millis() as u64),
            gathering: Arc::default(),
            gather_until_ms: AtomicU64::new(UNTIL_BEGUN),
            settled: AtomicBool::new(false),
            clock,
            random,
            lease,
        };
        (sessions, forgotten)
    }

    /// Whether clients may still reclaim files, so that no unlinked file may be freed.
    pub fn is_grace_period(&self) -> bool {
        if self.recovering.lock().is_empty() {
            return false;
        }
        let now = self.now_ms();
        // A server that stood still cannot know that no client came meanwhile.
        now < self.grace_until_ms.load(Ordering::Relaxed) || self.stood_still(now)
    }

    /// How many clients may still reclaim files.
    pub fn awaited(&self) -> usize {
        if self.is_grace_period() { self.recovering.lock().len() } else { 0 }
    }

    /// Begins to gather: the server before was killed, and some of its answers are not durable. Called before the first request.
    pub fn gather(&self) {
        self.gathering.store(true, Ordering::Relaxed);
    }

    /// Clients can come from now on, so the times for which they are waited for begin, and could not end before: the start itself may take longer, on
    /// a slow disk.
    pub fn begin(&self) {
        let now = self.now_ms();
        self.ticked_ms.store(now, Ordering::Relaxed);
        self.wait_from(now);
    }

    /// Clients are waited for from now on, as long as ever.
    fn wait_from(&self, now_ms: u64) {
        self.grace_until_ms.store(now_ms + self.lease.as_millis() as u64, Ordering::Relaxed);
        self.gather_until_ms.store(now_ms + GATHER.as_millis() as u64, Ordering::Relaxed);
    }

    /// Set while clients may still restore answered changes, and perhaps a little longer: until somebody asks.
    pub fn gathering(&self) -> Arc<AtomicBool> {
        self.gathering.clone()
    }

    /// Ends the gathering: the caller knows that no client of the server before is left.
    pub fn gathered(&self) {
        self.gathering.store(false, Ordering::Relaxed);
    }

    /// Whether clients may still restore answered changes.
    pub fn is_gathering(&self) -> bool {
        if !self.gathering.load(Ordering::Relaxed) {
            return false;
        }
        let (now, until) = (self.now_ms(), self.gather_until_ms.load(Ordering::Relaxed));
        let here_until = until.saturating_add((GATHER_HERE - GATHER).as_millis() as u64);
        let goes_on =
            self.is_grace_period() && (now < until || now < here_until && self.some_are_recovering());
        if !goes_on {
            self.gathering.store(false, Ordering::Relaxed);
        }
        goes_on
    }

    /// Whether a client of the server before has connected and not said `Recovered`.
    fn some_are_recovering(&self) -> bool {
        let by_client = self.by_client.lock();
        let recovering = self.recovering.lock();
        recovering.iter().filter_map(|client| by_client.get(client)).any(|session| session.connections() > 0)
    }

    fn now_ms(&self) -> u64 {
        self.clock.monotonic().as_millis() as u64
    }

    /// Whether this server did nothing for so long that the silence of clients means nothing.
    fn stood_still(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.ticked_ms.load(Ordering::Relaxed)) > self.lease.as_millis() as u64 / 2
    }

    /// Called several times during a lease. If this machine or process stood still since the last call (stopped or suspended), all clients get their
    /// time again, because they could not be heard.
    pub fn tick(&self) {
        let now = self.now_ms();
        if self.stood_still(now) && self.grace_until_ms.load(Ordering::Relaxed) != UNTIL_BEGUN {
            tracing::warn!("this server stood still; its clients' leases begin anew");
            self.wait_from(now);
            self.list().iter().for_each(|session| session.touch(self.clock.monotonic()));
        }
        self.ticked_ms.store(now, Ordering::Relaxed);
    }

    /// Whether the grace period is over, and the files that it kept have been freed.
    pub fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }

    /// Notes that this is so.
    pub fn settled(&self) {
        self.settled.store(true, Ordering::Release);
    }

    /// Whether a client has reclaimed all of its files.
    pub fn has_recovered(&self, client: ClientId) -> bool {
        !self.recovering.lock().contains(&client)
    }

    /// The clients that did not come back in the grace period.
    pub fn take_lost(&self) -> Vec<ClientId> {
        let by_client = self.by_client.lock();
        let recovering = std::mem::take(&mut *self.recovering.lock());
        recovering.into_iter().filter(|client| !by_client.contains_key(client)).collect()
    }

    /// Notes that a client has reclaimed its files, or will not.
    pub fn recovered(&self, client: ClientId) {
        self.recovering.lock().remove(&client);
    }

    /// Whether a client had a session when the server before ended, and may still reclaim files and locks.
    pub fn may_reclaim(&self, client: ClientId) -> bool {
        self.is_grace_period() && self.recovering.lock().contains(&client)
    }

    /// How long a client may be silent.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// The client's session, and whether it is new; a new one takes a place of the peer's share. The client has proven its id by the secret of which
    /// the id is made. The peer must be the one to which the client belonged before, with a session or without. A client keeps the root of its first
    /// attach.
    ///
    /// # Errors
    /// `Denied` to another peer, `Busy` if the share is used up.
    pub fn attach(
        &self,
        client: ClientId,
        peer: &Arc<Peer>,
        label: &str,
        root: InodeNo,
    ) -> Result<(Arc<Session>, bool), Status> {
        let mut by_client = self.by_client.lock();
        let mut absent = self.absent.lock();
        let session = by_client.get(&client);
        let owner = session.map(|session| session.peer().key()).or_else(|| absent.owner(client));
        if let Some(owner) = owner.filter(|owner| !owner.is_same_user(peer.key())) {
            tracing::warn!(peer = ?peer.key(), ?owner, "refusing a connection: its session is another user's");
            return Err(Status::Denied);
        }
        if let Some(session) = session {
            session.touch(self.clock.monotonic());
            return Ok((session.clone(), false));
        }
        let label = clean_label(label);
        let place = peer.take(Resource::Sessions).map_err(|full| {
            tracing::warn!(%label, peer = ?peer.key(), %full, "refusing a client");
            Status::Busy
        })?;
        let session = Arc::new(Session {
            number: RegionOwner(self.random.next_u64() | 1),
            client,
            label,
            root,
            slots: (0..SLOTS_PER_SESSION).map(|_| Mutex::new(Slot::default())).collect(),
            last_seen_ms: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            reclaimed: Mutex::default(),
            closed_keys: ClosedKeys::default(),
            place,
        });
        session.touch(self.clock.monotonic());
        by_client.insert(client, session.clone());
        absent.remove(client);
        tracing::info!(label = %session.label, "client attached");
        Ok((session, true))
    }

    /// The client's session, if it has one.
    pub fn of(&self, client: ClientId) -> Option<Arc<Session>> {
        self.by_client.lock().get(&client).cloned()
    }

    /// Notes a request of the session.
    ///
    /// # Errors
    /// `SessionExpired` if the session has ended.
    pub fn note_request(&self, session: &Session) -> Result<(), Status> {
        if session.is_ended() {
            return Err(Status::SessionExpired);
        }
        session.touch(self.clock.monotonic());
        Ok(())
    }

    /// Ends a session. The caller revokes its filekeys.
    pub fn end(&self, session: &Session) {
        if !session.ended.swap(true, Ordering::AcqRel) {
            self.by_client.lock().remove(&session.client);
            self.recovered(session.client);
            tracing::info!(label = %session.label, "client detached");
        }
    }

    /// Ends every session that was silent for the lease, and returns them.
    pub fn expire(&self) -> Vec<Arc<Session>> {
        self.tick();
        let now = self.clock.monotonic().as_millis() as u64;
        let lease_ms = self.lease.as_millis() as u64;
        let mut by_client = self.by_client.lock();
        let gone: Vec<_> = by_client
            .values()
            .filter(|s| now.saturating_sub(s.last_seen_ms.load(Ordering::Relaxed)) > lease_ms)
            .cloned()
            .collect();
        for session in &gone {
            session.ended.store(true, Ordering::Release);
            by_client.remove(&session.client);
            tracing::warn!(label = %session.label, lease_ms, "client is gone: its lease ran out");
        }
        gone
    }

    /// Notes that clients are away and may come back. Returns those that must be forgotten instead.
    pub fn note_absent(&self, clients: impl IntoIterator<Item = (ClientId, PeerKey)>) -> Vec<ClientId> {
        self.absent.lock().extend(clients)
    }

    /// All sessions, for status.
    pub fn list(&self) -> Vec<Arc<Session>> {
        self.by_client.lock().values().cloned().collect()
    }
}

/// A peer for tests.
#[cfg(test)]
pub(crate) fn root_peer() -> Arc<Peer> {
    use cuttlefs_common::rdma::{LocalPeer, PeerIdentity};
    let root = LocalPeer::root();
    crate::shares::Shares::new(1).peer(&PeerIdentity::Local(root))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::Shares;
    use cuttlefs_common::rdma::{LocalPeer, PeerIdentity};
    use cuttlefs_common::world::{ManualClock, SeededRandom};
    use std::num::NonZeroI32;

    fn user(uid: u32) -> Arc<Peer> {
        let pid = NonZeroI32::new(1);
        Shares::new(1).peer(&PeerIdentity::Local(LocalPeer { uid, gid: uid, groups: Arc::default(), pid }))
    }

    fn of_root(client: u128, has_session: bool) -> (ClientId, ClientRecord) {
        (ClientId(client), ClientRecord { has_session, owner: PeerKey::User(0) })
    }

    fn sessions(clock: &Arc<ManualClock>) -> Sessions {
        Sessions::new(clock.clone(), Arc::new(SeededRandom::new(1)), Duration::from_secs(10), Vec::new()).0
    }

    #[test]
    fn labels_can_be_shown() {
        let shown = |label: &str| clean_label(label);
        assert_eq!(shown("box:/mnt/cuttle"), "box:/mnt/cuttle");
        assert_eq!(shown("a\u{1}b\u{1b}[31m\n"), "a?b?[31m?");
        assert_eq!(shown("x\u{202e}y\u{feff}\u{9b}z"), "x?y??z");
        assert_eq!(shown("Dümmer"), "Dümmer");
        assert_eq!(shown(&"\u{1}".repeat(1000)).len(), LABEL_MAX);
        assert_eq!(shown(&"€".repeat(1000)).len(), LABEL_MAX / 3 * 3);
    }

    #[test]
    fn a_client_has_one_session_until_its_lease_runs_out() {
        let clock = Arc::new(ManualClock::default());
        let sessions = sessions(&clock);
        let first = sessions.attach(ClientId(7), &root_peer(), "a", InodeNo::ROOT).expect("attach").0;
        let again = sessions.attach(ClientId(7), &root_peer(), "a", InodeNo::ROOT).expect("attach").0;
        assert_eq!(first.number(), again.number());
        pass(&clock, &sessions, 9);
        sessions.note_request(&first).expect("alive");
        pass(&clock, &sessions, 9);
        assert!(sessions.expire().is_empty());
        clock.advance(Duration::from_secs(2));
        assert_eq!(sessions.expire().len(), 1);
        assert_eq!(sessions.note_request(&first), Err(Status::SessionExpired));
        let new = sessions.attach(ClientId(7), &root_peer(), "a", InodeNo::ROOT).expect("attach").0;
        assert_ne!(first.number(), new.number());
    }

    #[test]
    fn a_session_is_its_users() {
        let sessions = sessions(&Arc::new(ManualClock::default()));
        let join = |peer: &Arc<Peer>| {
            sessions.attach(ClientId(7), peer, "a", InodeNo::ROOT).map(|(session, is_new)| (is_new, session))
        };
        let remote = PeerIdentity::Remote(std::net::SocketAddr::from(([127, 0, 0, 1], 9)));
        let others = [user(8), Shares::new(1).peer(&remote)];
        let is_refused = || others.iter().all(|other| join(other).err() == Some(Status::Denied));
        let session = join(&user(7)).expect("attach").1;
        assert!(!join(&user(7)).expect("another connection").0);
        assert!(is_refused());
        sessions.end(&session);
        assert_eq!(sessions.note_absent([(ClientId(7), PeerKey::User(7))]), []);
        assert!(is_refused(), "it may come back for its answers");
        assert!(join(&user(7)).expect("back").0);
        let random = Arc::new(SeededRandom::new(2));
        let before = vec![of_root(7, true)];
        let (next, _) =
            Sessions::new(Arc::new(ManualClock::default()), random, Duration::from_secs(10), before);
        let join = |peer: &Arc<Peer>| next.attach(ClientId(7), peer, "a", InodeNo::ROOT).err();
        assert_eq!(
            [join(&user(7)), join(&root_peer())],
            [Some(Status::Denied), None],
            "nor behind a restart"
        );
    }

    #[test]
    fn the_grace_period_ends_with_the_last_who_came_back_or_with_the_lease() {
        let clock = Arc::new(ManualClock::default());
        let sessions = || {
            let before = vec![of_root(1, true), of_root(2, true), of_root(4, false)];
            restarted(&clock, Duration::from_secs(10), before)
        };
        let all_back = sessions();
        all_back.recovered(ClientId(1));
        all_back.recovered(ClientId(3));
        assert!(all_back.is_grace_period());
        let (session, is_new) =
            all_back.attach(ClientId(2), &root_peer(), "b", InodeNo::ROOT).expect("attach");
        assert!(is_new && all_back.is_grace_period(), "it may have more to reclaim");
        all_back.end(&session);
        assert!(!all_back.is_grace_period());
        let one_lost = sessions();
        one_lost.recovered(ClientId(1));
        pass(&clock, &one_lost, 9);
        assert!(one_lost.is_grace_period());
        pass(&clock, &one_lost, 1);
        assert!(!one_lost.is_grace_period());
        assert_eq!(one_lost.take_lost(), [ClientId(2)]);
    }

    #[test]
    fn clients_that_come_back_are_waited_for_and_others_a_moment() {
        let clock = Arc::new(ManualClock::default());
        let before = vec![of_root(1, true), of_root(2, true)];
        let sessions = restarted(&clock, Duration::from_secs(10), before);
        assert!(!sessions.is_gathering(), "all that was answered is durable");
        sessions.gather();
        let join = || sessions.attach(ClientId(1), &root_peer(), "a", InodeNo::ROOT);
        let (session, _) = join().expect("attach");
        session.note_connection(true);
        pass(&clock, &sessions, 4);
        assert!(sessions.is_gathering(), "it is here");
        sessions.recovered(ClientId(1));
        assert!(!sessions.is_gathering(), "the other one is not");
        assert!(sessions.is_grace_period());
        assert_eq!(sessions.awaited(), 1);
    }

    #[test]
    fn a_long_start_takes_no_time_from_those_who_come_back() {
        let clock = Arc::new(ManualClock::default());
        let (lease, before) = (Duration::from_secs(10), vec![of_root(1, true)]);
        let sessions = Sessions::new(clock.clone(), Arc::new(SeededRandom::new(1)), lease, before).0;
        sessions.gather();
        // While the server looks at what is there nothing ticks; then its workers do, and it does not listen yet.
        clock.advance(Duration::from_secs(20));
        pass(&clock, &sessions, 20);
        assert!(sessions.is_gathering() && sessions.is_grace_period());
        sessions.begin();
        assert!(sessions.is_gathering() && sessions.is_grace_period());
        pass(&clock, &sessions, 2);
        assert!(sessions.is_gathering());
        pass(&clock, &sessions, 1);
        assert!(!sessions.is_gathering(), "it did not come");
        pass(&clock, &sessions, 6);
        assert!(sessions.is_grace_period());
        pass(&clock, &sessions, 1);
        assert!(!sessions.is_grace_period());
    }

    #[test]
    fn who_is_here_and_is_never_done_holds_nobody_up_for_long() {
        let clock = Arc::new(ManualClock::default());
        let lease = Duration::from_secs(60);
        let before = vec![of_root(1, true)];
        let sessions = restarted(&clock, lease, before);
        sessions.gather();
        let join = || sessions.attach(ClientId(1), &root_peer(), "a", InodeNo::ROOT);
        join().expect("attach").0.note_connection(true);
        pass(&clock, &sessions, 9);
        assert!(sessions.is_gathering());
        pass(&clock, &sessions, 1);
        assert!(!sessions.is_gathering() && sessions.is_grace_period());
    }

    #[test]
    fn a_client_that_is_gone_again_is_not_waited_for() {
        let clock = Arc::new(ManualClock::default());
        let before = vec![of_root(1, true)];
        let sessions = restarted(&clock, Duration::from_secs(10), before);
        sessions.gather();
        let join = || sessions.attach(ClientId(1), &root_peer(), "a", InodeNo::ROOT);
        let (session, _) = join().expect("attach");
        session.note_connection(true);
        session.note_connection(false);
        pass(&clock, &sessions, 2);
        assert!(sessions.is_gathering());
        pass(&clock, &sessions, 1);
        assert!(!sessions.is_gathering());
    }

    /// Those of a server that listens, behind one with these clients.
    fn restarted(
        clock: &Arc<ManualClock>,
        lease: Duration,
        before: Vec<(ClientId, ClientRecord)>,
    ) -> Sessions {
        let sessions = Sessions::new(clock.clone(), Arc::new(SeededRandom::new(1)), lease, before).0;
        sessions.begin();
        sessions
    }

    /// Lets time pass while the server runs.
    fn pass(clock: &ManualClock, sessions: &Sessions, seconds: usize) {
        for _ in 0..seconds {
            clock.advance(Duration::from_secs(1));
            sessions.tick();
        }
    }

    #[test]
    fn a_server_that_stood_still_ends_nobody_and_no_grace_period() {
        let clock = Arc::new(ManualClock::default());
        let before = vec![of_root(1, true)];
        let sessions = restarted(&clock, Duration::from_secs(10), before);
        sessions.attach(ClientId(2), &root_peer(), "a", InodeNo::ROOT).expect("attach");
        pass(&clock, &sessions, 8);
        clock.advance(Duration::from_secs(1000));
        assert!(sessions.is_grace_period(), "before anything else is done");
        assert!(sessions.expire().is_empty());
        pass(&clock, &sessions, 9);
        assert!(sessions.is_grace_period() && sessions.expire().is_empty());
        pass(&clock, &sessions, 2);
        assert!(!sessions.is_grace_period());
        assert_eq!(sessions.expire().len(), 1);
    }

    #[test]
    fn who_reclaims_and_closes_without_end_is_not_remembered_without_end() {
        let sessions = sessions(&Arc::new(ManualClock::default()));
        let session = sessions.attach(ClientId(7), &root_peer(), "a", InodeNo::ROOT).expect("attach").0;
        let stays = FileKey(1);
        for round in 0..100u64 {
            let opened = (0..256).map(|key| FileKey(2 + round * 256 + key));
            session.note_reclaimed(1, std::iter::once(stays).filter(|_| round == 0).chain(opened));
            session.prune_reclaimed(|filekey| filekey == stays);
        }
        assert!(session.reclaimed.lock().filekeys.len() <= RECLAIMED_UNLOOKED + 257);
        assert!(session.note_reclaimed(2, std::iter::empty()).contains(&stays), "what is open is known");
    }

    #[test]
    fn a_peer_has_its_share_of_sessions_and_they_come_back() {
        let clock = Arc::new(ManualClock::default());
        let address = |last| PeerIdentity::Remote(std::net::SocketAddr::from(([10, 0, 0, last], 1)));
        let (sessions, shares) = (sessions(&clock), Shares::new(1));
        let peer = shares.peer(&address(1));
        let share = Resource::Sessions.bound().share;
        for client in 0..share as u128 {
            sessions.attach(ClientId(client), &peer, "x", InodeNo::ROOT).expect("room");
        }
        let one_more =
            |peer: &Arc<Peer>| sessions.attach(ClientId(u128::MAX), peer, "x", InodeNo::ROOT).err();
        assert_eq!(one_more(&peer), Some(Status::Busy));
        let other = shares.peer(&address(2));
        assert_eq!(one_more(&other), None);
        pass(&clock, &sessions, 11);
        drop(sessions.expire());
        assert_eq!((shares.used(Resource::Sessions), peer.used(Resource::Sessions)), (0, 0));
    }
}
