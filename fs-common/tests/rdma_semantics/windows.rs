//! Memory windows: which memory they open, to which queue pair, and for how long. Where there are none, `abilities` has the test of that.

use super::*;
use cuttlefs_common::rdma::{Binding, MemoryWindow};

/// A pair whose server has memory that peers reach by windows only, and a window of the server's queue pair.
struct Windowed {
    pair: Pair,
    closed: Arc<dyn MemoryRegion>,
    window: Arc<dyn MemoryWindow>,
}

const READ: Access = Access { remote_read: true, ..Access::NONE };

impl Windowed {
    /// `None`: there are no windows over this link.
    fn new(link: LinkKind) -> Option<Self> {
        let pair = Pair::new(link);
        if !has(link, Ability::MemoryWindows, pair.server.device.capabilities().memory_windows) {
            return None;
        }
        let window = pair.s().create_window().expect("a window");
        let memory = Arc::new(SharedMemory::new("closed", 64 << 10).expect("memory"));
        memory.fill(0, 64 << 10, 0xaa);
        memory.write(8192, b"in the window");
        let closed = pair.server.pd.register(memory, Access::LOCAL).expect("register");
        Some(Self { pair, closed, window })
    }

    fn bind(&self, offset: u64, len: u64, access: Access) -> Rkey {
        let binding = Binding { region: self.closed.clone(), offset, len, access };
        let rkey = self.window.bind(WrId(70), binding).expect("bind");
        ok(self.pair.server.next(), 70, CompletionKind::Bind, 0);
        rkey
    }

    fn invalidate(&self) {
        self.window.invalidate(WrId(71)).expect("invalidate");
        ok(self.pair.server.next(), 71, CompletionKind::Invalidate, 0);
    }

    fn ask(&self, op: impl FnOnce(Remote) -> SendOp, rkey: Rkey, offset: u64, len: u32) -> Completion {
        let remote = Remote::Memory { rkey, offset };
        self.pair.c().post_send(&[send(1, op(remote), self.pair.client.mr.sge(0, len))]).expect("post");
        self.pair.client.next()
    }
}

pub(super) fn a_window_opens_its_range(link: LinkKind) {
    let Some(windowed) = Windowed::new(link) else { return };
    let rkey = windowed.bind(8192, 4096, READ);
    ok(windowed.ask(SendOp::Read, rkey, 8192, 13), 1, CompletionKind::Read, 13);
    assert_eq!(windowed.pair.client.bytes(0, 13), b"in the window");
    ok(windowed.ask(SendOp::Read, rkey, 8192 + 4096 - 8, 8), 1, CompletionKind::Read, 8);
    // The window is bound again, to another range, with another key.
    windowed.invalidate();
    let again = windowed.bind(0, 64, Access { remote_write: true, ..READ });
    assert_ne!(again, rkey);
    windowed.pair.client.put(0, b"there");
    ok(windowed.ask(SendOp::Write, again, 8, 5), 1, CompletionKind::Write, 5);
    let mut there = [0; 5];
    windowed.closed.memory().read(8, &mut there);
    assert_eq!(&there, b"there");
}

pub(super) fn a_window_opens_nothing_else(link: LinkKind) {
    if Windowed::new(link).is_none() {
        return;
    }
    let refused = |of: &dyn Fn(&Windowed) -> Completion| {
        let windowed = Windowed::new(link).expect("there are windows");
        bad(of(&windowed), 1, WcStatus::RemoteAccess);
        assert_eq!(windowed.pair.c().state(), QpState::Error);
        let mut there = [0; 16];
        windowed.closed.memory().read(0, &mut there);
        assert_eq!(there, [0xaa; 16]);
    };
    // rdma_rxe compares with the range of the region, and not of the window (6.12, and the main line: `check_rkey` in `rxe_resp.c`).
    let checks_ranges = !Half::new(link, Access::ALL).device.name().starts_with("rxe");
    for offset in [8192 + 4096 - 8, 8184].into_iter().filter(|_| checks_ranges) {
        refused(&|windowed| {
            let rkey = windowed.bind(8192, 4096, READ);
            windowed.ask(SendOp::Read, rkey, offset, 16)
        });
    }
    refused(&|windowed| {
        let rkey = windowed.bind(8192, 4096, READ);
        windowed.ask(SendOp::Read, rkey, (64 << 10) - 8, 16)
    });
    refused(&|windowed| {
        let rkey = windowed.bind(0, 4096, READ);
        windowed.ask(SendOp::Write, rkey, 0, 16)
    });
    // The key of the region itself opens nothing to peers.
    refused(&|windowed| windowed.ask(SendOp::Read, windowed.closed.rkey(), 0, 16));
}

pub(super) fn an_invalidated_window_opens_nothing(link: LinkKind) {
    let Some(windowed) = Windowed::new(link) else { return };
    let rkey = windowed.bind(8192, 4096, READ);
    ok(windowed.ask(SendOp::Read, rkey, 8192, 13), 1, CompletionKind::Read, 13);
    windowed.invalidate();
    windowed.pair.client.put(0, &[0; 13]);
    bad(windowed.ask(SendOp::Read, rkey, 8192, 13), 1, WcStatus::RemoteAccess);
    assert_eq!(windowed.pair.client.bytes(0, 13), [0; 13]);
}

pub(super) fn a_window_is_of_one_queue_pair(link: LinkKind) {
    let Some(windowed) = Windowed::new(link) else { return };
    let rkey = windowed.bind(8192, 4096, READ);
    let Pair { client, server, listener, .. } = &windowed.pair;
    let (other, _others, _) = join(client, server, listener, 4, [vec![], vec![]]);
    let remote = Remote::Memory { rkey, offset: 8192 };
    other.post_send(&[send(2, SendOp::Read(remote), client.mr.sge(0, 13))]).expect("post");
    bad(client.next(), 2, WcStatus::RemoteAccess);
    ok(windowed.ask(SendOp::Read, rkey, 8192, 13), 1, CompletionKind::Read, 13);
}

/// What cannot be bound: a range past the region, rights that the region's owner has not, memory of another device, and a window that is bound already.
/// The request fails as one of a bad local key, and its queue pair with it.
pub(super) fn what_cannot_be_bound_breaks_its_queue_pair(link: LinkKind) {
    type Bad = fn(&Windowed) -> Binding;
    let cases: [Bad; 5] = [
        |windowed| Binding { region: windowed.closed.clone(), offset: 60 << 10, len: 4097, access: READ },
        |windowed| Binding { region: windowed.closed.clone(), offset: u64::MAX, len: 2, access: READ },
        |windowed| {
            let memory = Arc::new(SharedMemory::new("read only", 4096).expect("memory"));
            let region = windowed.pair.server.pd.register(memory, Access::NONE).expect("register");
            Binding { region, offset: 0, len: 64, access: Access { remote_write: true, ..READ } }
        },
        |windowed| Binding { region: windowed.pair.client.mr.clone(), offset: 0, len: 64, access: READ },
        |windowed| {
            windowed.bind(8192, 64, READ);
            Binding { region: windowed.closed.clone(), offset: 0, len: 64, access: READ }
        },
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let Some(windowed) = Windowed::new(link) else { return };
        // rdma_rxe adds the two without a look whether that overflows (6.12, `rxe_check_bind_mw`).
        if number == 1 && windowed.pair.server.device.name().starts_with("rxe") {
            continue;
        }
        let Pair { client, server, .. } = &windowed.pair;
        let posted = windowed.window.bind(WrId(72), case(&windowed));
        // A provider that sees it when it is posted breaks the queue pair then.
        if posted.is_ok() {
            let told = server.next();
            // rdma_rxe reports its own faults as flushed requests (6.12, `rxe_req.c`).
            let status = if link == LinkKind::Rdma { WcStatus::Flushed } else { WcStatus::LocalProtection };
            assert!([WcStatus::LocalProtection, status].contains(&told.status), "case {number}: {told:?}");
            assert_eq!((told.wr_id, told.kind), (WrId(72), CompletionKind::Bind));
        }
        windowed.pair.settle_server();
        // Nothing is open: not by the key that the binding would have had, either.
        if let Ok(rkey) = posted {
            let remote = Remote::Memory { rkey, offset: 0 };
            let _ = windowed.pair.c().post_send(&[send(1, SendOp::Read(remote), client.mr.sge(0, 8))]);
        }
        let deadline = Instant::now() + PATIENCE;
        while windowed.pair.c().state() != QpState::Error {
            assert!(Instant::now() < deadline, "case {number}");
            client.cq.wait(Duration::from_millis(20));
            client.cq.poll(&mut Vec::new(), 1);
        }
        assert_eq!(client.bytes(0, 8), [0; 8], "case {number}");
        let again = Binding { region: windowed.closed.clone(), offset: 0, len: 64, access: READ };
        assert!(windowed.window.bind(WrId(73), again).is_err(), "case {number}: it is broken");
    }
}

/// A window that is dropped opens nothing any more, and its region can go.
pub(super) fn a_window_that_is_dropped_opens_nothing(link: LinkKind) {
    let Some(windowed) = Windowed::new(link) else { return };
    let rkey = windowed.bind(8192, 4096, READ);
    ok(windowed.ask(SendOp::Read, rkey, 8192, 13), 1, CompletionKind::Read, 13);
    let Windowed { pair, closed, window } = windowed;
    drop((window, closed));
    pair.client.put(0, &[0; 13]);
    let remote = Remote::Memory { rkey, offset: 8192 };
    pair.c().post_send(&[send(1, SendOp::Read(remote), pair.client.mr.sge(0, 13))]).expect("post");
    bad(pair.client.next(), 1, WcStatus::RemoteAccess);
    assert_eq!(pair.client.bytes(0, 13), [0; 13]);
}
