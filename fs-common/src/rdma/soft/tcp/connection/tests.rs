//! How many calls of send(2) a doorbell and its answers take: both ends are driven by the test's own thread, so the counts are exact.

use super::*;
use crate::ids::Rkey;
use crate::memory::SharedMemory;
use crate::rdma::PeerIdentity;
use crate::rdma::soft::cq::SoftCq;
use crate::rdma::soft::queue::QpParts;
use crate::rdma::soft::region::Registry;
use crate::rdma::verbs::{
    Access, CompletionQueue, LinkKind, MemoryRegion, Remote, SendOp, WcStatus as Status, WrId,
};
use std::os::unix::net::UnixStream;

/// Requests of a doorbell: what the benchmarks have under way.
const DOORBELL: u64 = 16;
const ROOM: usize = 64 * 1024;

/// One end of a connection, and memory that its peer may read and write.
struct End {
    qp: Arc<TcpQp>,
    queue: Arc<SoftCq>,
    region: Box<dyn MemoryRegion>,
}

impl End {
    fn of(socket: UnixStream) -> Self {
        let queue = Arc::new(SoftCq::new(256).expect("a queue"));
        let registry = Arc::new(Registry::default());
        let memory = SharedMemory::new("cuttlefs-test", DOORBELL as usize * ROOM).expect("memory");
        let region = registry.insert(Arc::new(memory), Access::ALL, None);
        let parts = QpParts {
            number: QpNumber(1),
            registry,
            send_cq: queue.clone(),
            recv_cq: queue.clone(),
            send_depth: 128,
            recv_depth: 1,
            max_sges: 1,
        };
        let nobody = PeerIdentity::Remote(([127, 0, 0, 1], 1).into());
        let core = QpCore::new(parts, LinkKind::Unix, nobody);
        let qp = TcpQp::new(core, Channel::plain(socket.into()), None, FileTargetCell::default());
        qp.start().expect("live");
        Self { qp, queue, region: Box::new(region) }
    }

    fn pair() -> [Self; 2] {
        let (one, other) = UnixStream::pair().expect("sockets");
        [Self::of(one), Self::of(other)]
    }

    fn at(&self, number: u64) -> Remote {
        Remote::Memory { rkey: Rkey(self.region.rkey().0), offset: number * ROOM as u64 }
    }

    /// A request of this end, with local memory of its own.
    fn request(&self, number: u64, op: SendOp, len: u32, signaled: bool) -> SendWr {
        let local = self.region.sge(number * ROOM as u64, len).into();
        SendWr { wr_id: WrId(number), op, local, signaled }
    }

    /// Takes what has come; returns the completions of it.
    fn poll(&self) -> usize {
        let mut done = Vec::new();
        self.queue.poll(&mut done, 256);
        assert!(done.iter().all(|completion| completion.status == Status::Success), "{done:?}");
        done.len()
    }

    fn sends(&self) -> u64 {
        self.qp.sends.load(Ordering::Relaxed)
    }
}

/// Posts these requests with one doorbell, of which so many are signaled; returns the calls of both ends.
fn calls([client, server]: &[End; 2], requests: &[SendWr], signaled: usize) -> [u64; 2] {
    let before = [client.sends(), server.sends()];
    client.qp.core.reserve_sends(requests.len());
    client.qp.submit(requests);
    let mut done = 0;
    // All of it is in the socket, or goes there as soon as the server reads: that takes a few turns of each.
    for _ in 0..16 {
        server.poll();
        done += client.poll();
    }
    assert_eq!(done, signaled);
    [client.sends() - before[0], server.sends() - before[1]]
}

/// What memory that may not be there does for a WRITE that is signaled (`crate::np`).
#[test]
fn writes_and_the_reads_that_check_them_go_together_and_so_do_the_answers() {
    // With 4 KiB a doorbell is three times what is gathered, and as much as three reads of the socket bring.
    for (len, most) in [(64, [1, 1]), (512, [1, 1]), (1024, [1, 1]), (2048, [2, 2]), (4096, [3, 3])] {
        let ends = End::pair();
        let [client, server] = &ends;
        let pairs = (0..DOORBELL).flat_map(|number| {
            let write = client.request(number, SendOp::Write(server.at(number)), len, false);
            let check = SendOp::Read(server.at((number + 1) % DOORBELL));
            [write, client.request(number, check, 8, true)]
        });
        let calls = calls(&ends, &pairs.collect::<Vec<_>>(), DOORBELL as usize);
        assert!(calls[0] <= most[0] && calls[1] <= most[1], "{len} bytes: {calls:?} calls, at most {most:?}");
    }
}

#[test]
fn answers_of_reads_go_together() {
    for (len, most) in [(64, 1), (512, 1), (1024, 1), (2048, 2), (4096, 3)] {
        let ends = End::pair();
        let [client, server] = &ends;
        let reads =
            (0..DOORBELL).map(|number| client.request(number, SendOp::Read(server.at(number)), len, true));
        let calls = calls(&ends, &reads.collect::<Vec<_>>(), DOORBELL as usize);
        assert!(calls[0] == 1 && calls[1] <= most, "{len} bytes: {calls:?} calls, at most [1, {most}]");
    }
}

/// Long packets gain nothing: the peer works on one while the next is built.
#[test]
fn long_packets_go_out_at_once() {
    let ends = End::pair();
    let [client, server] = &ends;
    let write = |number| client.request(number, SendOp::Write(server.at(number)), 16 * 1024, true);
    let calls = calls(&ends, &[write(0), write(1), write(2)], 3);
    assert_eq!(calls[0], 3);
}
