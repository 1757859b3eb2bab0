//! Peers that send any request over a raw connection.

use super::cuttle::Site;
use super::is_root;
use super::people::{self, Credentials, Person};
use super::serving;
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr};
use cuttlefs_common::ids::{InodeNo, SlotIndex, TraceId};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion, QpConfig,
    QueuePair, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::rpc::{
    HEADER_LEN, MAX_MESSAGE_BYTES, NewNode, OpenBy, Payload, ReclaimLock, Reply, ReplyHeader, Request,
    RequestHeader, Rights, SessionSecret,
};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SystemRandom;
use cuttlefs_server::rights::{Account, ExportRule, PeerPattern};
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection on which any request can be sent.
pub struct RawPeer {
    _device: Arc<SoftDevice>,
    cq: Arc<dyn CompletionQueue>,
    qp: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
    /// The number of the last request.
    pub seq: u64,
    /// The inode that it sees as the root directory.
    pub root: InodeNo,
    /// The user and group that its requests claim to come from.
    pub said: (u32, u32),
}

fn receive(region: &dyn MemoryRegion) -> RecvWr {
    RecvWr { wr_id: WrId(1), local: region.sge(MESSAGE as u64, MAX_MESSAGE_BYTES).into() }
}

impl RawPeer {
    /// Connects and attaches with this secret.
    pub fn attach(endpoint: &Endpoint, secret: SessionSecret) -> Result<Self, Status> {
        Self::attach_below(endpoint, secret, b"")
    }

    /// Connects and attaches with this secret to a subtree of the export.
    pub fn attach_below(endpoint: &Endpoint, secret: SessionSecret, subtree: &[u8]) -> Result<Self, Status> {
        let mut peer = Self::connect(endpoint);
        let attach = Request::Attach { secret, label: "hostile", subtree };
        peer.root = peer.call(&attach, |reply| match reply {
            Reply::Attached(attached) => attached.root,
            other => panic!("{other:?}"),
        })?;
        Ok(peer)
    }

    /// Connects, without a session.
    pub fn connect(endpoint: &Endpoint) -> Self {
        let device = SoftDevice::new(SoftOptions::default());
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(16).expect("a queue");
        let memory = SharedMemory::new("peer", 2 * MESSAGE).expect("memory");
        let region = pd.register(Arc::new(memory), Access::LOCAL).expect("registered");
        let qp = QpConfig::new(&cq, 4, 4);
        let options = ConnectOptions { qp, receives: vec![receive(&*region)], timeout: PATIENCE };
        let qp = pd.connect(endpoint, options).expect("connected").qp;
        Self { _device: device, cq, qp, region, seq: 0, root: InodeNo(0), said: (0, 0) }
    }

    pub fn call<T>(&mut self, request: &Request<'_>, take: impl FnOnce(Reply<'_>) -> T) -> Result<T, Status> {
        self.seq += u64::from(!request.needs_no_slot());
        let (uid, gid) = self.said;
        let header = RequestHeader {
            slot: SlotIndex(0),
            seq: self.seq,
            trace: TraceId(1),
            uid,
            gid,
            umask: 0,
            drops_privileges: false,
        };
        let mut body = vec![0; MESSAGE - HEADER_LEN];
        let len = request.encode(&mut body).expect("it fits");
        let mut message = header.encode(len as u32).to_vec();
        message.extend_from_slice(&body[..len]);
        self.region.memory().write(0, &message);
        let local = self.region.sge(0, message.len() as u32);
        let send = SendWr { wr_id: WrId(0), op: SendOp::Send, local: local.into(), signaled: false };
        self.qp.post_send(&[send]).expect("posted");
        let mut reply = vec![0; self.received() as usize];
        self.region.memory().read(MESSAGE, &mut reply);
        self.qp.post_recv(&[receive(&*self.region)]).expect("posted");
        let (header, body) = ReplyHeader::parse(&reply).expect("a reply");
        header.result.map(|()| take(Reply::parse(body).expect("a reply")))
    }

    fn received(&self) -> u32 {
        let deadline = Instant::now() + PATIENCE;
        let mut completions = Vec::new();
        loop {
            self.cq.poll(&mut completions, 1);
            if let Some(completion) = completions.pop() {
                assert_eq!((completion.kind, completion.status), (CompletionKind::Recv, WcStatus::Success));
                return completion.byte_len;
            }
            assert!(Instant::now() < deadline, "no answer");
            self.cq.wait(Duration::from_millis(20));
        }
    }

    /// Sends a request that is answered with attributes, and returns them.
    pub fn attr(&mut self, request: &Request<'_>) -> Result<Attr, Status> {
        self.call(request, |reply| match reply {
            Reply::Attr(attr) => attr,
            Reply::Opened(opened) => opened.attr,
            other => panic!("{other:?}"),
        })
    }
}

fn client() -> SessionSecret {
    SessionSecret::draw(&SystemRandom)
}

/// A site with directories: `open` is everybody's. `listed` may be listed by everybody and searched by root only. `closed` is root's alone, and has a
/// file `secret` that everybody may read.
struct Ground {
    site: Site,
    root: Person,
    by_root: super::cuttle::Cuttle,
}

impl Ground {
    fn new(rules: Vec<ExportRule>) -> Self {
        let site = Site::new(rules);
        let root = Person::new(people::ROOT);
        let by_root = site.volume(&root);
        root.does(|| {
            let (volume, caller) = (&by_root.volume, by_root.caller());
            let top = volume.root();
            let make = |parent, name, node, mode| {
                let attr = volume.make(&caller, parent, name, node, mode).expect("root may");
                let mode = SetAttr { mode: Some(mode), ..SetAttr::default() };
                volume.set_attr(&caller, attr.ino, mode).expect("root may").ino
            };
            make(top, b"open", NewNode::Directory, 0o777);
            make(top, b"listed", NewNode::Directory, 0o744);
            let listed = by_root.walk("listed").expect("it was made").ino;
            make(listed, b"inside", NewNode::File, 0o666);
            let closed = make(top, b"closed", NewNode::Directory, 0o700);
            make(closed, b"secret", NewNode::File, 0o666);
        });
        Self { site, root, by_root }
    }

    fn peer(&self, person: &Person) -> RawPeer {
        let endpoint = self.site.endpoint();
        person.does(|| RawPeer::attach(&endpoint, client())).expect("attached")
    }
}

fn create(parent: InodeNo, name: &'static [u8], mode: u16) -> Request<'static> {
    Request::Create { parent, name, mode, exclusive: true, rights: Rights { read: true, write: true } }
}

/// An attack: a user claims to be root, and makes a program that runs as root.
#[test]
fn who_says_it_is_root_is_not() {
    if !is_root() {
        return;
    }
    let ground = Ground::new(vec![ExportRule::default()]);
    let stranger = Person::new(people::STRANGER);
    let mut peer = ground.peer(&stranger);
    let top = peer.root;
    for said in [(0, 0), (people::OWNER.uid, people::OWNER.gid), (u32::MAX - 1, u32::MAX - 1)] {
        peer.said = said;
        assert_eq!(peer.attr(&create(top, b"rootme", 0o4755)), Err(Status::Denied));
        let open = peer.attr(&Request::Lookup { parent: top, name: b"open" }).expect("searchable").ino;
        let name = b"rootme";
        let attr = peer.attr(&create(open, name, 0o4755)).expect("everybody may");
        assert_eq!((attr.uid, attr.gid), (people::STRANGER.uid, people::STRANGER.gid));
        let chown = SetAttr { uid: Some(0), gid: Some(0), mode: Some(0o4755), ..SetAttr::default() };
        let own = Request::SetAttr { ino: attr.ino, set: chown };
        assert_eq!(peer.attr(&own), Err(Status::NotPermitted));
        for kind in [FileKind::BlockDevice, FileKind::CharDevice] {
            let disk = NewNode::Special { kind, rdev: 0x801 };
            let request = Request::Make { parent: open, name: b"disk", node: disk, mode: 0o666 };
            assert_eq!(peer.attr(&request), Err(Status::NotPermitted));
        }
        peer.call(&Request::Unlink { parent: open, name }, |_| ()).expect("its own");
    }
    peer.said = (u32::MAX, u32::MAX);
    assert_eq!(peer.attr(&create(top, b"rootme", 0o4755)), Err(Status::Invalid), "no user at all");
}

/// An attack: root of a squashed client claims to be another user.
#[test]
fn a_squashed_client_gets_nowhere_by_other_names() {
    if !is_root() {
        return;
    }
    let squash = ExportRule {
        peers: vec![PeerPattern::User(people::FELLOW.uid)],
        root_squash: Some(Account { uid: 65_534, gid: 65_534 }),
        speaks_for_others: Some(true),
        ..ExportRule::default()
    };
    let ground = Ground::new(vec![squash, ExportRule::default()]);
    let client_root = Person::new(people::FELLOW);
    let mut peer = ground.peer(&client_root);
    let top = peer.root;
    for said in [(0, 0), (1, 1), (1, 0), (65_534, 0)] {
        peer.said = said;
        assert_eq!(peer.attr(&create(top, b"viauid1", 0o4755)), Err(Status::Denied), "{said:?}");
        let open = peer.attr(&Request::Lookup { parent: top, name: b"open" }).expect("searchable").ino;
        let attr = peer.attr(&create(open, b"f", 0o4755)).expect("everybody may");
        let uid = if said.0 == 0 { 65_534 } else { said.0 };
        let gid = if said.1 == 0 { 65_534 } else { said.1 };
        assert_eq!((attr.uid, attr.gid), (uid, gid), "{said:?}: nothing of root's");
        for chown in [(Some(0), None), (None, Some(0))] {
            let set = SetAttr { uid: chown.0, gid: chown.1, mode: Some(0o6755), ..SetAttr::default() };
            assert_eq!(peer.attr(&Request::SetAttr { ino: attr.ino, set }), Err(Status::NotPermitted));
        }
        peer.call(&Request::Unlink { parent: open, name: b"f" }, |_| ()).expect("its own");
    }
}

#[test]
fn numbers_that_nobody_told_lead_nowhere() {
    if !is_root() {
        return;
    }
    let ground = Ground::new(vec![ExportRule::default()]);
    let stranger = Person::new(people::STRANGER);
    let mut peer = ground.peer(&stranger);
    let secret = ground.root.does(|| ground.by_root.walk("closed/secret")).expect("root may").ino;
    let everything = Rights { read: true, write: true };
    for ino in (2..300).map(InodeNo).chain([secret]) {
        for request in [
            Request::GetAttr { ino },
            Request::Open { ino, rights: everything, truncate: true, by: OpenBy::Name { told: 0 } },
            Request::Lookup { parent: ino, name: b"secret" },
            Request::Link { ino, parent: peer.root, name: b"mine" },
        ] {
            assert_eq!(peer.call(&request, |_| ()), Err(Status::Stale), "{request:?}");
        }
    }
    // The peer may list this directory and not search it, so it gets names but no way to the files.
    let listed = peer.attr(&Request::Lookup { parent: peer.root, name: b"listed" }).expect("searchable").ino;
    for plus in [false, true] {
        let list = Request::ReadDir { ino: listed, cookie: 0, max_bytes: 4096, plus };
        let (ino, attr) = peer
            .call(&list, |reply| match reply {
                Reply::Entries { entries, end: true } => {
                    assert_eq!((entries.len(), entries[0].name), (1, &b"inside"[..]));
                    (entries[0].ino, entries[0].attr)
                }
                other => panic!("{other:?}"),
            })
            .expect("readable");
        assert_eq!(attr, None);
        assert_eq!(peer.call(&Request::GetAttr { ino }, |_| ()), Err(Status::Stale));
        let open = Request::Open { ino, rights: everything, truncate: false, by: OpenBy::Name { told: 0 } };
        assert_eq!(peer.call(&open, |_| ()), Err(Status::Stale));
    }
    assert_eq!(peer.call(&Request::Lookup { parent: listed, name: b"inside" }, |_| ()), Err(Status::Denied));
}

#[test]
fn a_session_is_its_users_alone() {
    if !is_root() {
        return;
    }
    let ground = Ground::new(vec![ExportRule::default()]);
    let (owner, stranger) = (Person::new(people::OWNER), Person::new(people::STRANGER));
    let (endpoint, id) = (ground.site.endpoint(), client());
    let attach = |person: &Person| person.does(|| RawPeer::attach(&endpoint, id)).map(|_| ());
    let first = owner.does(|| RawPeer::attach(&endpoint, id)).expect("attached");
    assert_eq!(attach(&stranger), Err(Status::Denied));
    assert_eq!(attach(&ground.root), Err(Status::Denied), "not even root's");
    assert_eq!(attach(&owner), Ok(()), "another connection");
    drop(first);
}

#[test]
fn a_subtree_is_reached_by_who_may_search_its_way() {
    if !is_root() {
        return;
    }
    let ground = Ground::new(vec![ExportRule::default()]);
    let stranger = Person::new(people::STRANGER);
    let endpoint = ground.site.endpoint();
    let attach = |person: &Person, subtree: &'static [u8]| {
        person.does(|| RawPeer::attach_below(&endpoint, client(), subtree)).map(|_| ())
    };
    ground.root.does(|| {
        let (by_root, caller) = (&ground.by_root, ground.by_root.caller());
        let closed = by_root.walk("closed").expect("root may").ino;
        by_root.volume.make(&caller, closed, b"below", NewNode::Directory, 0o777).expect("root may");
    });
    assert_eq!(attach(&stranger, b"open"), Ok(()));
    assert_eq!(attach(&stranger, b"closed/below"), Err(Status::Denied));
    assert_eq!(attach(&stranger, b"closed/none"), Err(Status::Denied), "nor is it told what is there");
    assert_eq!(attach(&ground.root, b"closed/below"), Ok(()));
}

#[test]
fn locks_are_for_files_that_are_open_for_them() {
    if !is_root() {
        return;
    }
    let ground = Ground::new(vec![ExportRule::default()]);
    let stranger = Person::new(people::STRANGER);
    let mut peer = ground.peer(&stranger);
    let open = peer.attr(&Request::Lookup { parent: peer.root, name: b"open" }).expect("searchable").ino;
    let ino = peer.attr(&create(open, b"f", 0o444)).expect("everybody may").ino;
    let read_only = Rights { read: true, write: false };
    let filekey = peer
        .call(
            &Request::Open { ino, rights: read_only, truncate: false, by: OpenBy::Name { told: 0 } },
            |reply| match reply {
                Reply::Opened(opened) => opened.filekey,
                other => panic!("{other:?}"),
            },
        )
        .expect("readable");
    let lock = |space, mode| {
        let (owner, range) = (LockOwner(1), LockRange::WHOLE);
        Lock { space, owner, range, mode, pid: 1 }
    };
    let mut ask = |space, mode| {
        let (lock, wait) = (lock(space, mode), WaitId(1));
        peer.call(&Request::SetLock { filekey, lock, wait, blocking: false }, |_| ())
    };
    assert_eq!(ask(LockSpace::Ranges, LockMode::Exclusive), Err(Status::Denied));
    assert_eq!(ask(LockSpace::Ranges, LockMode::Shared), Ok(()));
    assert_eq!(ask(LockSpace::Whole, LockMode::Exclusive), Ok(()));
    let write = Request::Write { filekey, offset: 0, append: false, payload: Payload::Inline(b"x") };
    assert_eq!(peer.call(&write, |_| ()), Err(Status::Denied));
    let held = ReclaimLock { ino: open, lock: lock(LockSpace::Whole, LockMode::Exclusive) };
    let held = peer.call(&Request::ReclaimLocks { locks: vec![held] }, |reply| match reply {
        Reply::LocksReclaimed(held) => held,
        other => panic!("{other:?}"),
    });
    assert_eq!(held, Ok(vec![false]), "what is not open is not locked");
}

#[test]
fn a_file_is_opened_for_neither_by_who_may_do_both() {
    if !is_root() {
        return;
    }
    let ground = Ground::new(vec![ExportRule::default()]);
    let (owner, stranger) = (Person::new(people::OWNER), Person::new(people::STRANGER));
    let (mut owner, mut stranger) = (ground.peer(&owner), ground.peer(&stranger));
    let neither = Rights { read: false, write: false };
    let opens = |peer: &mut RawPeer, ino| {
        let open = Request::Open { ino, rights: neither, truncate: false, by: OpenBy::Name { told: 0 } };
        let create =
            |parent| Request::Create { parent, name: b"f", mode: 0, exclusive: false, rights: neither };
        let opened = |reply: Reply<'_>| assert!(matches!(reply, Reply::Opened(_)));
        let by_number = peer.call(&open, opened);
        let parent =
            peer.attr(&Request::Lookup { parent: peer.root, name: b"open" }).expect("searchable").ino;
        assert_eq!(peer.call(&create(parent), opened), by_number);
        by_number
    };
    let open = owner.attr(&Request::Lookup { parent: owner.root, name: b"open" }).expect("searchable").ino;
    let of_owner = owner.attr(&create(open, b"f", 0o644)).expect("everybody may").ino;
    let open =
        stranger.attr(&Request::Lookup { parent: stranger.root, name: b"open" }).expect("searchable").ino;
    let of_stranger = stranger.attr(&Request::Lookup { parent: open, name: b"f" }).expect("searchable").ino;
    assert_eq!(opens(&mut owner, of_owner), Ok(()));
    assert_eq!(opens(&mut stranger, of_stranger), Err(Status::Denied), "it may read and not write");
}

/// The first rule that fits a user counts.
#[test]
fn rules_say_who_may_what() {
    if !is_root() {
        return;
    }
    let user = |who: Credentials| vec![PeerPattern::User(who.uid)];
    let root_rule = ExportRule { peers: user(people::ROOT), ..ExportRule::default() };
    let mut ground = Ground::new(vec![root_rule.clone()]);
    let stranger = Person::new(people::STRANGER);
    let endpoint = ground.site.endpoint();
    let refused = stranger.does(|| RawPeer::attach(&endpoint, client())).map(|_| ());
    assert_eq!(refused, Err(Status::Denied));
    let said = stranger.does(|| serving::try_connect(&endpoint)).err().expect("refused").to_string();
    assert!(said.contains("[[export]]"), "{said}");

    let path = vec![b"open".to_vec()];
    ground.site.restart(Some(vec![
        root_rule,
        ExportRule { peers: user(people::STRANGER), path, ..ExportRule::default() },
        ExportRule { peers: user(people::OWNER), read_only: true, ..ExportRule::default() },
        ExportRule { peers: user(people::MEMBER), speaks_for_others: Some(true), ..ExportRule::default() },
        ExportRule {
            all_squash: Some(Account { uid: people::OWNER.uid, gid: people::OWNER.gid }),
            ..ExportRule::default()
        },
    ]));
    // The stranger sees only the directory `open`.
    let mut below = ground.peer(&stranger);
    assert_eq!(below.attr(&Request::Lookup { parent: below.root, name: b"open" }), Err(Status::NotFound));
    let theirs = below.attr(&create(below.root, b"f", 0o600)).expect("its root is everybody's");
    assert_eq!(theirs.uid, people::STRANGER.uid);
    // The owner's export is read-only.
    let owner = Person::new(people::OWNER);
    let mut reader = ground.peer(&owner);
    let open = reader.attr(&Request::Lookup { parent: reader.root, name: b"open" }).expect("searchable").ino;
    assert_eq!(reader.attr(&create(open, b"g", 0o600)), Err(Status::ReadOnly));
    // A trusted client acts as the user that it names.
    let member = Person::new(people::MEMBER);
    let mut trusted = ground.peer(&member);
    trusted.said = (people::FELLOW.uid, people::FELLOW.gid);
    assert_eq!(trusted.attr(&create(trusted.root, b"f", 0o600)).expect("trusted").uid, people::FELLOW.uid);
    // All other users are squashed to the owner.
    let fellow = Person::new(people::FELLOW);
    let mut squashed = ground.peer(&fellow);
    let open = squashed.attr(&Request::Lookup { parent: squashed.root, name: b"open" }).expect("searchable");
    assert_eq!(squashed.attr(&create(open.ino, b"h", 0o600)).expect("everybody may").uid, people::OWNER.uid);
    let before = squashed.attr(&Request::Lookup { parent: open.ino, name: b"f" }).expect("searchable");
    let rights = Rights { read: true, write: false };
    let read = Request::Open { ino: before.ino, rights, truncate: false, by: OpenBy::Name { told: 0 } };
    assert_eq!(squashed.call(&read, |_| ()), Err(Status::Denied), "the stranger's");
}

/// What a peer's status says of the rules: how many there are, and their paths.
fn rules_shown(person: &Person, endpoint: &Endpoint) -> (u64, Option<Vec<String>>) {
    let status: Value = person.does(|| {
        let mut peer = RawPeer::connect(endpoint);
        let parsed = |reply: Reply<'_>| match reply {
            Reply::Status(text) => serde_json::from_str(text).expect("JSON"),
            other => panic!("{other:?}"),
        };
        peer.call(&Request::Status, parsed).expect("everybody may ask")
    });
    let path = |rule: &Value| rule["path"].as_str().expect("a path").to_owned();
    let paths = status["exports"]["rules"].as_array().map(|rules| rules.iter().map(path).collect());
    assert_eq!(paths.is_some(), status.to_string().contains("acme"), "{status}");
    (status["exports"]["count"].as_u64().expect("a count"), paths)
}

/// An attack: who has a directory only, or no rule at all, asks for the names of others' directories.
#[test]
fn the_status_tells_the_rules_to_who_may_have_the_whole_pool_as_root() {
    if !is_root() {
        return;
    }
    let user = |who: people::Credentials| vec![PeerPattern::User(who.uid)];
    let secret = vec![b"acme".to_vec()];
    let ground = Ground::new(vec![
        ExportRule { peers: user(people::ROOT), ..ExportRule::default() },
        ExportRule { peers: user(people::STRANGER), path: secret, ..ExportRule::default() },
        ExportRule { peers: user(people::MEMBER), speaks_for_others: Some(true), ..ExportRule::default() },
    ]);
    let endpoint = ground.site.endpoint();
    let shown = |who| rules_shown(&Person::new(who), &endpoint);
    let all = Some(vec!["/".to_owned(), "/acme".to_owned(), "/".to_owned()]);
    assert_eq!(shown(people::ROOT), (3, all.clone()));
    assert_eq!(shown(people::MEMBER), (3, all));
    assert_eq!(shown(people::STRANGER), (3, None));
    assert_eq!(shown(people::FELLOW), (3, None), "no rule is for it");
}
