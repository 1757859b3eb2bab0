//! Which memory a peer can access, and how refused requests complete.

use super::*;

/// A refused request completes with `status`, the requests behind it are flushed, and the target's memory is unchanged.
pub(super) fn refused(
    link: LinkKind,
    access: Access,
    op: impl Fn(&Half) -> SendOp,
    local_len: u32,
    status: WcStatus,
) {
    let pair = Pair::with(link, 16, access, |client, _| [vec![client.receive(77, 0, 8)], vec![]]);
    let (client, server) = (&pair.client, &pair.server);
    server.put(0, &[0xaa; 64]);
    let good = SendOp::Write(server.place(0));
    let local = client.put(0, &[0xbb; 64]);
    pair.c()
        .post_send(&[
            send(1, op(server), Sge { len: local_len, ..local }),
            send(2, good, local),
            send(3, SendOp::Send, local),
        ])
        .expect("post");
    bad(client.next(), 1, status);
    let mut flushed: Vec<_> = (0..3).map(|_| client.next()).collect();
    flushed.sort_by_key(|completion| completion.wr_id.0);
    for (completion, id) in flushed.into_iter().zip([2, 3, 77]) {
        bad(completion, id, WcStatus::Flushed);
    }
    assert_eq!(pair.c().state(), QpState::Error);
    assert!(matches!(
        pair.c().post_send(&[send(4, good, local)]),
        Err(PostError::BadState { state: QpState::Error })
    ));
    assert!(matches!(pair.c().post_recv(&[client.receive(1, 0, 8)]), Err(PostError::BadState { .. })));
    pair.settle_server();
    assert_eq!(server.bytes(0, 64), [0xaa; 64]);
}

pub(super) fn access_errors(link: LinkKind) {
    let read_only = Access { remote_write: false, remote_atomic: false, ..Access::ALL };
    let write_only = Access { remote_read: false, ..Access::ALL };
    let wrong_key = Remote::Memory { rkey: Rkey(1), offset: 0 };
    let past = |server: &Half| Remote::Memory { rkey: server.mr.rkey(), offset: MEMORY_LEN as u64 - 8 };
    let wraps = |server: &Half| Remote::Memory { rkey: server.mr.rkey(), offset: u64::MAX - 8 };
    refused(link, Access::ALL, |_| SendOp::Read(wrong_key), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |_| SendOp::Write(wrong_key), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |server| SendOp::Read(past(server)), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |server| SendOp::Write(past(server)), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |server| SendOp::Write(wraps(server)), 64, WcStatus::RemoteAccess);
    refused(link, read_only, |server| SendOp::Write(server.place(0)), 64, WcStatus::RemoteAccess);
    refused(
        link,
        read_only,
        |server| SendOp::FetchAdd { remote: server.place(0), add: 1 },
        8,
        WcStatus::RemoteAccess,
    );
    refused(link, write_only, |server| SendOp::Read(server.place(0)), 64, WcStatus::RemoteAccess);
    refused(link, Access::LOCAL, |server| SendOp::Read(server.place(0)), 64, WcStatus::RemoteAccess);
    let file = Remote::File { filekey: FileKey(1), offset: 0 };
    refused(link, Access::ALL, |_| SendOp::Write(file), 64, WcStatus::RemoteInvalid);
    refused(link, Access::ALL, |_| SendOp::Read(file), 64, WcStatus::RemoteInvalid);
    // The request is too long for both regions. Which of the two errors an RNIC reports is up to it.
    if link != LinkKind::Rdma {
        let write = |server: &Half| SendOp::Write(server.place(0));
        refused(link, Access::ALL, write, 1 << 22, WcStatus::LocalProtection);
    }
    let capabilities = Half::new(link, Access::ALL).device.capabilities();
    let transfer = capabilities.max_transfer_bytes + 1;
    // The longest transfer of an RNIC is longer than the test's memory.
    if u64::from(transfer) <= MEMORY_LEN as u64 {
        refused(link, Access::ALL, |server| SendOp::Read(server.place(0)), transfer, WcStatus::LocalLength);
    }
    refused(link, Access::ALL, |_| SendOp::Send, capabilities.max_message_bytes + 1, WcStatus::LocalLength);
    refused(
        link,
        Access::ALL,
        |server| SendOp::FetchAdd { remote: server.place(0), add: 1 },
        4,
        WcStatus::LocalLength,
    );
}

pub(super) fn silent_failure_is_heard(link: LinkKind) {
    let pair = Pair::new(link);
    let mut request =
        send(5, SendOp::Write(Remote::Memory { rkey: Rkey(3), offset: 0 }), pair.client.mr.sge(0, 8));
    request.signaled = false;
    pair.c().post_send(&[request]).expect("post");
    bad(pair.client.next(), 5, WcStatus::RemoteAccess);
    assert_eq!(pair.c().state(), QpState::Error);
}

/// A memfd is no dma-buf. A device that has no use for dma-bufs says that, as soft-RoCE does.
pub(super) fn what_is_no_dma_buf_is_refused(link: LinkKind) {
    let half = Half::new(link, Access::ALL);
    let refused = half.pd.register_dma_buf(half.mr.memory().fd(), 4096).err().expect("refused").to_string();
    let has_none = link != LinkKind::Rdma || half.device.name().starts_with("rxe");
    assert_eq!(refused.contains("registers no"), has_none, "{refused}");
}

pub(super) fn deregistered_memory_is_gone(link: LinkKind) {
    let pair = Pair::new(link);
    let memory = Arc::new(SharedMemory::new("late", 4096).expect("memory"));
    memory.write(0, b"late");
    // Registered after the connection was made.
    let late = pair.server.pd.register(memory, Access::ALL).expect("register");
    let read =
        send(1, SendOp::Read(Remote::Memory { rkey: late.rkey(), offset: 0 }), pair.client.mr.sge(0, 4));
    pair.c().post_send(&[read]).expect("post");
    ok(pair.client.next(), 1, CompletionKind::Read, 4);
    assert_eq!(pair.client.bytes(0, 4), b"late");
    drop(late);
    pair.c().post_send(&[read]).expect("post");
    bad(pair.client.next(), 1, WcStatus::RemoteAccess);
}

/// A lane discards the pages of its buffer while it is idle. The region stays registered, and works.
pub(super) fn discarded_memory_is_still_the_regions(link: LinkKind) {
    let pair = Pair::new(link);
    let memory = Arc::new(SharedMemory::new("idle", 4 * 4096).expect("memory"));
    memory.fill(0, 4 * 4096, 1);
    let region = pair.server.pd.register(memory.clone(), Access::ALL).expect("register");
    memory.discard(0, 4 * 4096).expect("discard");
    memory.write(5000, b"new");
    let place = Remote::Memory { rkey: region.rkey(), offset: 5000 };
    pair.c().post_send(&[send(1, SendOp::Read(place), pair.client.mr.sge(0, 3))]).expect("post");
    ok(pair.client.next(), 1, CompletionKind::Read, 3);
    assert_eq!(pair.client.bytes(0, 3), b"new");
    pair.c().post_send(&[send(2, SendOp::Write(place), pair.client.put(64, b"far"))]).expect("post");
    ok(pair.client.next(), 2, CompletionKind::Write, 3);
    let mut out = [0; 3];
    memory.read(5000, &mut out);
    assert_eq!(&out, b"far");
}

pub(super) fn many_registrations_stay_reachable(link: LinkKind) {
    let pair = Pair::new(link);
    // More registrations than the socket's buffer has room to announce, at a server that polls only now and then.
    let regions: Vec<_> = (0..600u64)
        .map(|index| {
            let memory = Arc::new(SharedMemory::new("many", 4096).expect("memory"));
            memory.write(0, &index.to_le_bytes());
            pair.server.pd.register(memory, Access::ALL).expect("register")
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pair.server.cq.wait(Duration::from_millis(1));
                pair.server.cq.poll(&mut Vec::new(), 1);
            }
        });
        for (index, region) in regions.iter().enumerate().rev() {
            let remote = Remote::Memory { rkey: region.rkey(), offset: 0 };
            pair.c().post_send(&[send(1, SendOp::Read(remote), pair.client.mr.sge(0, 8))]).expect("post");
            let completion = pair.client.next();
            if completion.status != WcStatus::Success {
                stop.store(true, Ordering::Relaxed);
            }
            ok(completion, 1, CompletionKind::Read, 8);
            assert_eq!(pair.client.bytes(0, 8), (index as u64).to_le_bytes());
        }
        stop.store(true, Ordering::Relaxed);
    });
}
