//! Peers and owners that break the protocol, or vanish: errors at themselves, and nothing at others.

use super::*;
use cuttlefs_common::ids::Rkey;
use cuttlefs_common::np::{Message, Reply, Request, RequestOp, Status, Welcome};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, ProtectionDomain, QpConfig,
    QueuePair, RecvWr, Remote, RemoteRange, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::region::MagicPattern;
use std::time::Instant;

const DEPTH: u32 = 256;
const PATIENCE: Duration = Duration::from_secs(60);

/// A peer that posts what it likes.
struct Raw {
    qp: Arc<dyn QueuePair>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    _domain: Arc<dyn ProtectionDomain>,
    _device: Arc<dyn Device>,
    early: Vec<Completion>,
}

/// Bytes of one message.
const MESSAGE: u64 = 2048;

impl Raw {
    fn connect(served: &Served) -> Self {
        let device = device();
        let domain = device.alloc_pd().expect("domain");
        let cq = device.create_cq(2 * DEPTH).expect("cq");
        let memory = Arc::new(SharedMemory::new("raw", 4 << 20).expect("memory"));
        let mr = domain.register(memory, Access::ALL).expect("mr");
        let receives =
            (0..64).map(|id| RecvWr { wr_id: WrId(id), local: mr.sge((64 + id) * MESSAGE, 2048).into() });
        let options = ConnectOptions {
            qp: QpConfig::new(&cq, DEPTH, 64),
            receives: receives.collect(),
            timeout: PATIENCE,
        };
        let qp = domain.connect(&served.server.endpoint(), options).expect("connect").qp;
        Self { qp, cq, mr, _domain: domain, _device: device, early: Vec::new() }
    }

    fn greeted(served: &Served) -> (Self, Welcome) {
        let mut raw = Self::connect(served);
        raw.send(0, &Message::Hello.encode());
        match raw.message() {
            Some(Message::Welcome(welcome)) => (raw, welcome),
            other => panic!("{other:?}"),
        }
    }

    fn send(&self, slot: u64, bytes: &[u8]) {
        self.mr.memory().write((slot * MESSAGE) as usize, bytes);
        self.post(SendOp::Send, slot * MESSAGE, bytes.len() as u32);
    }

    fn post(&self, op: SendOp, at: u64, len: u32) {
        let local = self.mr.sge(at, len);
        // A queue pair that is over takes nothing.
        let _ = self.qp.post_send(&[SendWr { wr_id: WrId(1000), op, local: local.into(), signaled: true }]);
    }

    fn next(&mut self) -> Completion {
        let deadline = Instant::now() + PATIENCE;
        while self.early.is_empty() {
            assert!(Instant::now() < deadline, "no completion");
            if self.cq.poll(&mut self.early, 16) == 0 {
                self.cq.wait(Duration::from_millis(100));
            }
        }
        self.early.remove(0)
    }

    /// The next message; `None`: the connection is over.
    fn message(&mut self) -> Option<Message> {
        loop {
            let completion = self.next();
            if completion.status != WcStatus::Success {
                return None;
            }
            if completion.kind == CompletionKind::Recv {
                let mut bytes = vec![0; completion.byte_len as usize];
                self.mr.memory().read(((64 + completion.wr_id.0) * MESSAGE) as usize, &mut bytes);
                return Some(Message::parse(&bytes).expect("the owner's messages are right"));
            }
        }
    }

    fn ask(&mut self, offset: u64, op: RequestOp) -> Option<Reply> {
        self.send(0, &Message::Request(Request { tag: 5, offset, op }).encode());
        match self.message()? {
            Message::Reply(reply) => Some(reply),
            other => panic!("{other:?}"),
        }
    }

    /// The status of the next completion that is not a success of a SEND.
    fn failure(&mut self) -> WcStatus {
        loop {
            let completion = self.next();
            if completion.status != WcStatus::Success {
                return completion.status;
            }
        }
    }
}

fn settle(served: &Served, connections: u64) {
    let deadline = Instant::now() + PATIENCE;
    while served.server.figures().connections != connections {
        assert!(Instant::now() < deadline, "{:?}", served.server.figures());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn messages_that_are_none_end_their_connection_alone() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut good = served.peer();
        good.write(0, &[7; 5000]);
        let request = Message::Request(Request { tag: 1, offset: 0, op: RequestOp::ReadInline(8) }).encode();
        let reply = Reply { tag: 1, status: Status::Done, old: 0, bytes: vec![] };
        let mut of_another_version = Message::Hello.encode();
        of_another_version[4] = 9;
        let mut too_long = request.clone();
        too_long[12..16].copy_from_slice(&5000u32.to_le_bytes());
        let hello = Message::Hello.encode();
        let breaches: [(bool, &[u8]); 7] = [
            (false, &[]),
            (false, b"GET / HTTP/1.1"),
            (false, &request),
            (false, &of_another_version),
            (true, &hello),
            (true, &too_long),
            (true, &Message::Reply(reply).encode()),
        ];
        for (number, (greeted, bytes)) in breaches.into_iter().enumerate() {
            let mut raw = if greeted { Raw::greeted(&served).0 } else { Raw::connect(&served) };
            raw.send(0, bytes);
            assert_eq!(raw.message(), None, "{link:?} {number}");
            settle(&served, 1);
            assert_eq!(served.server.figures().breaches, number as u64 + 1, "{link:?}");
        }
        assert_eq!(good.read(0, 5000), [7; 5000]);
    }
}

#[test]
fn accesses_that_may_not_be_fail_at_who_asks() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut good = served.peer();
        good.write(0, &[7; 5000]);
        let end = 64 * PAGE;
        let (mut raw, _) = Raw::greeted(&served);
        let piece = RequestOp::Read { len: 65_536, rkey: raw.mr.rkey().0, address: 0 };
        for (offset, op) in [
            (end, RequestOp::ReadInline(1)),
            (u64::MAX, RequestOp::WriteInline(vec![1; 8])),
            (end - 65_535, piece),
            (4, RequestOp::FetchAdd(1)),
            (end - 4, RequestOp::CompareSwap { expect: 0, swap: 1 }),
        ] {
            let reply = raw.ask(offset, op).expect("an answer");
            assert_eq!(
                (reply.status, reply.tag, reply.bytes),
                (Status::Range, 5, vec![]),
                "{link:?} {offset}"
            );
        }
        assert_eq!(raw.ask(4999, RequestOp::ReadInline(2)).expect("an answer").bytes, [7, 0], "it goes on");
        // One-sided: past the end, the table, an atomic on memory whose pages move, and frames past the region.
        let at = |rkey: u32, offset| Remote::Memory { rkey: Rkey(rkey), offset };
        type Access = fn(&Welcome) -> (u32, u64);
        let region: Access = |welcome| (welcome.region.rkey.0, welcome.region.len);
        let table: Access = |welcome| (welcome.table_rkey, welcome.table_address);
        let start: Access = |welcome| (welcome.region.rkey.0, 0);
        for (place, make) in [
            (region, SendOp::Read as fn(Remote) -> SendOp),
            (region, SendOp::Write),
            (table, SendOp::Write),
            (start, |remote| SendOp::FetchAdd { remote, add: 1 }),
            (start, |remote| SendOp::CompareSwap { remote, expect: 0, swap: 1 }),
        ] {
            let (mut raw, welcome) = Raw::greeted(&served);
            let (rkey, offset) = place(&welcome);
            raw.post(make(at(rkey, offset)), 0, 8);
            let status = raw.failure();
            assert!(
                matches!(status, WcStatus::RemoteAccess | WcStatus::RemoteInvalid),
                "{link:?} {status:?}"
            );
        }
        assert_eq!(good.read(0, 5000), [7; 5000]);
    }
}

#[test]
fn a_peer_that_names_a_buffer_that_is_none_is_cut_off() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut good = served.peer();
        for op in [
            RequestOp::Read { len: 5000, rkey: 0x7777_7777, address: 0 },
            RequestOp::Write { len: 5000, rkey: 0x7777_7777, address: 0 },
        ] {
            let (mut raw, _) = Raw::greeted(&served);
            assert_eq!(raw.ask(0, op), None, "{link:?}");
            settle(&served, 1);
        }
        // More of them than there are bounce buffers: all came back.
        for _ in 0..40 {
            let (raw, _) = Raw::greeted(&served);
            let op = RequestOp::Read { len: 5000, rkey: 0x7777_7777, address: 0 };
            for slot in 0..8 {
                raw.send(slot, &Message::Request(Request { tag: 1, offset: 0, op: op.clone() }).encode());
            }
        }
        settle(&served, 1);
        good.write(0, &[3; 300_000][..200_000]);
        (0..64).for_each(|page| assert!(served.region.evict_page(page).is_ok()));
        assert_eq!(good.read(0, 200_000), vec![3; 200_000], "{link:?}");
    }
}

#[test]
fn a_flood_is_the_floods_problem() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut good = served.peer();
        good.write(0, &[7; 5000]);
        let (raw, _) = Raw::greeted(&served);
        let request =
            Message::Request(Request { tag: 1, offset: 0, op: RequestOp::ReadInline(1024) }).encode();
        // It takes no answers, and posts until it cannot.
        for slot in 0..200 {
            raw.send(slot % 64, &request);
        }
        for _ in 0..20 {
            assert_eq!(good.read(0, 5000), [7; 5000], "{link:?}");
            served.region.evict_page(0).expect("evicted");
        }
        drop(raw);
    }
}

#[test]
fn peers_that_vanish_leave_nothing_behind() {
    for link in LINKS {
        let served = Served::new(link, 128);
        let mut good = served.peer();
        for round in 0..12u64 {
            let mut peer = served.peer();
            peer.memory.fill(0, 1 << 20, round as u8 + 1);
            for number in 0..40 {
                let op = [NpOp::Write, NpOp::Read, NpOp::FetchAdd(1)][number as usize % 3];
                let len = if op.is_atomic() { 8 } else { [100, 4096, 100_000][number as usize / 3 % 3] };
                let wr = peer.wr(op, number * PAGE, number * 100_000 % (1 << 20), len);
                peer.peer.post(wr).expect("posted");
            }
            let mut done = Vec::new();
            (0..round).for_each(|_| {
                peer.peer.poll(&mut done, 4);
            });
            drop(peer);
        }
        settle(&served, 1);
        for page in 0..128 {
            good.write(page * PAGE, &[9; 4096]);
        }
        (0..128).for_each(|page| assert!(good.read(page * PAGE, 4096) == [9; 4096], "{link:?} {page}"));
        let left = (0..128).filter(|page| served.region.evict_page(*page).expect("evicted")).count();
        assert!(left > 0 && served.region.figures().resident == 0, "no page is held for who is gone");
    }
}

#[test]
fn an_owner_that_answers_what_nobody_asked_is_left() {
    let dir = tempfile::tempdir().expect("dir");
    let device = device();
    let domain = device.alloc_pd().expect("domain");
    let listener = domain.listen(&endpoint(LinkKind::Unix, &dir)).expect("listen");
    let cq = device.create_cq(64).expect("cq");
    let memory = Arc::new(SharedMemory::new("owner", 1 << 20).expect("memory"));
    let mr = domain.register(memory, Access::ALL).expect("mr");
    let at = listener.endpoint();
    for broken in [0u32, 1, 2, 3] {
        let mut good = None;
        std::thread::scope(|scope| {
            let joining = scope.spawn(|| {
                let peer = NpPeer::connect(&super::device(), &at, Served::settings()).expect("connected");
                Peer::new(peer)
            });
            let receives = (0..8)
                .map(|id| RecvWr { wr_id: WrId(id), local: mr.sge(id * MESSAGE, 2048).into() })
                .collect();
            let qp =
                listener.accept().expect("accept").accept(QpConfig::new(&cq, 16, 16), receives).expect("qp");
            let send = |message: &Message| {
                let bytes = message.encode();
                mr.memory().write(100_000, &bytes);
                let local = mr.sge(100_000, bytes.len() as u32);
                qp.post_send(&[SendWr {
                    wr_id: WrId(0),
                    op: SendOp::Send,
                    local: local.into(),
                    signaled: true,
                }])
                .expect("sent");
            };
            send(&Message::Welcome(Welcome {
                region: RemoteRange { rkey: mr.rkey(), first_address: 0, len: PAGE },
                table_rkey: mr.rkey().0,
                table_address: PAGE,
                access: PagedAccess::ReadWrite,
                one_sided: true,
                signature: MagicPattern::new([0; 32]),
            }));
            good = Some(joining.join().expect("peer"));
            // All of it is zeros, so the signature is found, and the owner is asked.
            let peer = good.as_mut().expect("peer");
            mr.memory().fill(0, 8192, u8::from(broken == 3));
            let wr = peer.wr(NpOp::Read, 0, 0, 100);
            if broken == 3 {
                // What was read comes behind it, with the same poll: the READ fails once, and is not done then.
                send(&Message::Hello);
                std::thread::sleep(Duration::from_millis(20));
                peer.peer.post(wr).expect("posted");
                std::thread::sleep(Duration::from_millis(100));
                let done = peer.peer.drain();
                assert_eq!((done.len(), done[0].status), (1, NpStatus::Disconnected));
                return;
            }
            peer.peer.post(wr).expect("posted");
            peer.peer.poll(&mut Vec::new(), 1);
            send(&match broken {
                0 => Message::Hello,
                1 => Message::Reply(Reply {
                    tag: 0xffff_ff00,
                    status: Status::Done,
                    old: 0,
                    bytes: vec![0; 100],
                }),
                _ => Message::Reply(Reply {
                    tag: 0x100 | 63,
                    status: Status::Done,
                    old: 0,
                    bytes: vec![0; 99],
                }),
            });
            let done = peer.peer.drain();
            assert_eq!((done.len(), done[0].status), (1, NpStatus::Disconnected), "{broken}");
        });
    }
}
