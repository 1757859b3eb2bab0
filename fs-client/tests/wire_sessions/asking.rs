//! Messages, and connections whose peer waits for each answer.

use crate::oracle::{Oracle, Way};
use crate::wire::Wire;
use cuttlefs_common::ids::{SlotIndex, TraceId};
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::rpc::{HEADER_LEN, Reply, Request, RequestHeader, SessionSecret};
use cuttlefs_common::status::Status;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest time for an answer, on a machine with much else to do.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A request message with this body. Its header claims the user root.
pub fn message(slot: u16, seq: u64, trace: u64, body: &[u8]) -> Vec<u8> {
    let header = RequestHeader {
        slot: SlotIndex(slot),
        seq,
        trace: TraceId(trace),
        uid: 0,
        gid: 0,
        umask: 0,
        drops_privileges: false,
    };
    [&header.encode(body.len() as u32)[..], body].concat()
}

pub fn body_of(request: &Request<'_>) -> Vec<u8> {
    let mut body = vec![0; 64 << 10];
    let len = request.encode(&mut body).expect("it fits a message");
    body.truncate(len);
    body
}

/// A connection whose peer waits for each answer.
pub struct Asking {
    pub wire: Wire,
    pub way: Way,
    seqs: [u64; 64],
}

impl Asking {
    /// Connects, says hello and takes the welcome.
    pub fn connect(path: &Path, uid: u32, oracle: &mut Oracle) -> Self {
        let mut wire = Wire::connect(path, uid);
        wire.hello();
        let mut asking = Self { wire, way: oracle.way(uid), seqs: [0; 64] };
        let (header, _) = asking.packet();
        assert_eq!(header.kind, PacketKind::Welcome, "a connection is refused");
        asking
    }

    /// Goes on with the same session on another connection; this one ends.
    pub fn reconnect(&mut self, path: &Path, secret: SessionSecret, trace: u64, oracle: &mut Oracle) {
        let seqs = self.seqs;
        *self = Self { seqs, ..Self::connect(path, self.wire.uid, oracle) };
        self.attach(secret, trace, oracle).expect("its own session");
    }

    /// Attaches with this secret. Returns the session's number and its root.
    pub fn attach(
        &mut self,
        secret: SessionSecret,
        trace: u64,
        oracle: &mut Oracle,
    ) -> Result<cuttlefs_common::rpc::Attached, Status> {
        let request = Request::Attach { secret, label: "keeps the rules", subtree: b"" };
        self.ask_at(0, 0, trace, &request, oracle, |reply| match reply {
            Reply::Attached(attached) => attached,
            other => panic!("{other:?}"),
        })
    }

    /// Sends a request in this slot of the connection's own session, with the slot's next number, and returns the answer.
    pub fn ask<T>(
        &mut self,
        slot: u16,
        trace: u64,
        request: &Request<'_>,
        oracle: &mut Oracle,
        take: impl FnOnce(Reply<'_>) -> T,
    ) -> Result<T, Status> {
        self.seqs[usize::from(slot)] += 1;
        self.ask_at(slot, self.seqs[usize::from(slot)], trace, request, oracle, take)
    }

    /// Sends the last request of a slot once more.
    pub fn ask_again<T>(
        &mut self,
        slot: u16,
        trace: u64,
        request: &Request<'_>,
        oracle: &mut Oracle,
        take: impl FnOnce(Reply<'_>) -> T,
    ) -> Result<T, Status> {
        self.ask_at(slot, self.seqs[usize::from(slot)], trace, request, oracle, take)
    }

    pub fn ask_at<T>(
        &mut self,
        slot: u16,
        seq: u64,
        trace: u64,
        request: &Request<'_>,
        oracle: &mut Oracle,
        take: impl FnOnce(Reply<'_>) -> T,
    ) -> Result<T, Status> {
        let message = message(slot, seq, trace, &body_of(request));
        oracle.note_sent(self.way, &message);
        self.wire.put(PacketHeader::new(PacketKind::Send, 0), &message);
        let (header, payload) = self.packet();
        assert_eq!(header.kind, PacketKind::Send);
        let (header, _, reply) = oracle.check_message(self.way, &payload);
        assert_eq!(header.trace, TraceId(trace), "one question, one answer");
        assert!(payload.len() >= HEADER_LEN);
        header.result.map(|()| take(reply.expect("a reply")))
    }

    /// Waits for the next packet.
    pub fn packet(&mut self) -> (PacketHeader, Vec<u8>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut packets = self.wire.pump();
            if let Some(packet) = packets.pop() {
                assert!(packets.is_empty(), "who asks once is answered once: {:?}", packets[0].0);
                return packet;
            }
            assert!(!self.wire.is_over, "the connection of a peer that keeps the rules was closed");
            assert!(Instant::now() < deadline, "no answer in {PATIENCE:?}");
            std::thread::sleep(Duration::from_micros(30));
        }
    }
}
