//! Queues: their bounds, messages that wait, their ends, and the wake-ups of threads that sleep on them.

use super::*;

pub(super) fn message_too_long(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| {
        [vec![], vec![server.receive(1, 0, 4), server.receive(2, 64, 4)]]
    });
    pair.c().post_send(&[send(1, SendOp::Send, pair.client.put(0, b"12345"))]).expect("post");
    bad(pair.server.next(), 1, WcStatus::LocalLength);
    bad(pair.server.next(), 2, WcStatus::Flushed);
    assert_eq!(pair.s().state(), QpState::Error);
    assert_eq!(pair.server.bytes(0, 8), [0; 8]);
}

/// Whoever polls gets at most as many completions as there is room for, in order, and the rest with the next polls.
pub(super) fn a_poll_has_its_room(link: LinkKind) {
    const REQUESTS: u64 = 40;
    let pair = Pair::with(link, 64, Access::ALL, |_, _| [vec![], vec![]]);
    let (client, server) = (&pair.client, &pair.server);
    let write = SendOp::Write(server.place(0));
    for room in [1, 2, 15, 16, 17, 64] {
        // Every third one is not to complete.
        let requests: Vec<_> = (0..REQUESTS)
            .map(|number| SendWr { signaled: number % 3 != 1, ..send(number, write, client.put(0, b"byte")) })
            .collect();
        pair.c().post_send(&requests).expect("post");
        let expected: Vec<_> = requests.iter().filter(|one| one.signaled).map(|one| one.wr_id).collect();
        let (mut found, deadline) = (Vec::new(), Instant::now() + PATIENCE);
        while found.len() < expected.len() {
            let before = found.len();
            let count = client.cq.poll(&mut found, room);
            assert_eq!(found.len(), before + count);
            assert!(count <= room, "{count} came where there was room for {room}");
            if count == 0 {
                assert!(Instant::now() < deadline, "{} of {} came", found.len(), expected.len());
                client.cq.wait(Duration::from_secs(1));
            }
        }
        let numbers: Vec<_> = found.iter().map(|completion| completion.wr_id).collect();
        assert_eq!(numbers, expected, "with room for {room}");
        client.nothing();
    }
}

/// Where a link has a socket, short requests of one doorbell go out together, and so do short answers to what came together. Beside long ones they keep
/// their order, and so do their completions.
pub(super) fn short_and_long_requests_of_one_doorbell_keep_their_order(link: LinkKind) {
    const REQUESTS: u64 = 140;
    const ROOM: u64 = 8192;
    const WORD: u64 = REQUESTS * ROOM;
    const MESSAGES: u64 = WORD + ROOM;
    let pair = Pair::with(link, 256, Access::ALL, |_, server| {
        let receive = |number| server.receive(number, MESSAGES + number * 8, 8);
        [vec![], (0..REQUESTS / 7).map(receive).collect()]
    });
    let (client, server) = (&pair.client, &pair.server);
    let bytes = |index: u64, len: u32| vec![index as u8 | 1; len as usize];
    let mut requests = Vec::new();
    for index in 0..REQUESTS {
        let (at, is_long) = (index * ROOM, index % 5 == 0);
        let write = SendOp::Write(server.place(at));
        let (op, len) = match index % 7 {
            0 => (write, 8),
            1 => (SendOp::Read(server.place(at)), 16),
            2 => (SendOp::FetchAdd { remote: server.place(WORD), add: 3 }, 8),
            3 => (SendOp::Send, 8),
            4 => (write, 300),
            5 => (SendOp::Read(server.place(at)), if is_long { ROOM as u32 } else { 64 }),
            _ => (write, if is_long { ROOM as u32 } else { 600 }),
        };
        let reads = matches!(op, SendOp::Read(_));
        let from = if reads { server } else { client };
        from.put(at, &bytes(index, len));
        requests.push(SendWr { signaled: index % 7 != 4, ..send(index, op, client.mr.sge(at, len)) });
    }
    pair.c().post_send(&requests).expect("post");
    for request in requests.iter().filter(|request| request.signaled) {
        ok(client.next(), request.wr_id.0, request.op.kind(), request.local.len() as u32);
    }
    for (index, request) in (0..).zip(&requests) {
        let (at, len) = ((index * ROOM) as usize, request.local.len() as u32);
        match request.op {
            SendOp::Read(_) => assert!(client.bytes(at, len as usize) == bytes(index, len), "{index}"),
            SendOp::Write(_) => assert!(server.bytes(at, len as usize) == bytes(index, len), "{index}"),
            SendOp::FetchAdd { .. } => assert_eq!(client.bytes(at, 8), (index / 7 * 3).to_le_bytes()),
            _ => {
                ok(server.next(), index / 7, CompletionKind::Recv, 8);
                assert_eq!(server.bytes((MESSAGES + index / 7 * 8) as usize, 8), bytes(index, 8));
            }
        }
    }
}

/// A request that this end refuses does not hold back those before it in its doorbell.
pub(super) fn what_is_before_a_refused_request_is_done(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| {
        [vec![], (0..2).map(|number| server.receive(number, 64 * number, 64)).collect()]
    });
    let hello = pair.client.put(0, b"hello");
    let nowhere = Sge { offset: MEMORY_LEN as u64, ..hello };
    let requests =
        [send(1, SendOp::Send, hello), send(2, SendOp::Send, hello), send(3, SendOp::Send, nowhere)];
    pair.c().post_send(&requests).expect("post");
    ok(pair.client.next(), 1, CompletionKind::Send, 5);
    ok(pair.client.next(), 2, CompletionKind::Send, 5);
    bad(pair.client.next(), 3, WcStatus::LocalProtection);
    for number in 0..2 {
        ok(pair.server.next(), number, CompletionKind::Recv, 5);
    }
}

pub(super) fn messages_wait_for_receives(link: LinkKind) {
    let pair = Pair::new(link);
    for index in 0..10u64 {
        pair.c()
            .post_send(&[send(index, SendOp::Send, pair.client.put(index * 8, &index.to_le_bytes()))])
            .expect("post");
        // The SEND of an RNIC completes when the peer has received the message.
        if link != LinkKind::Rdma {
            assert_eq!(pair.client.next().status, WcStatus::Success);
        }
    }
    pair.server.nothing();
    for index in 0..10u64 {
        pair.s().post_recv(&[pair.server.receive(index, index * 64, 64)]).expect("receive");
        ok(pair.server.next(), index, CompletionKind::Recv, 8);
        assert_eq!(pair.server.bytes(index as usize * 64, 8), index.to_le_bytes());
        if link == LinkKind::Rdma {
            ok(pair.client.next(), index, CompletionKind::Send, 8);
        }
    }
}

pub(super) fn queues_are_bounded(link: LinkKind) {
    let pair = Pair::with(link, 4, Access::ALL, |_, _| [vec![], vec![]]);
    let read = |id| send(id, SendOp::Read(pair.server.place(0)), pair.client.mr.sge(0, 8));
    let six: Vec<_> = (0..6).map(read).collect();
    assert_eq!(pair.c().post_send(&six), Err(PostError::QueueFull { posted: 4 }));
    assert_eq!(pair.c().post_send(&six[4..]), Err(PostError::QueueFull { posted: 0 }));
    for id in 0..4 {
        ok(pair.client.next(), id, CompletionKind::Read, 8);
    }
    pair.c().post_send(&six[4..]).expect("room again");
    for id in 4..6 {
        ok(pair.client.next(), id, CompletionKind::Read, 8);
    }
    let five: Vec<_> = (0..5).map(|id| pair.client.receive(id, 0, 8)).collect();
    assert_eq!(pair.c().post_recv(&five), Err(PostError::QueueFull { posted: 4 }));
}

/// The provider of an RNIC sends requests of its own to see whether the peer is there, over all queue pairs at once. They take no place of the
/// user's.
pub(super) fn a_queue_takes_its_depth_whatever_the_provider_does_beside(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let pairs: Vec<_> = (0..50).map(|_| join(&client, &server, &listener, 1, [vec![], vec![]])).collect();
    let rounds = || {
        for (client_qp, _, _) in &pairs {
            let read = send(7, SendOp::Read(server.place(0)), client.mr.sge(0, 8));
            client_qp.post_send(&[read]).expect("a queue of depth 1 in which nothing is under way");
            ok(client.next(), 7, CompletionKind::Read, 8);
        }
    };
    // Several times the interval at which the provider of an RNIC checks its peers.
    let until = Instant::now() + Duration::from_secs(if link == LinkKind::Rdma { 7 } else { 0 });
    rounds();
    while Instant::now() < until {
        rounds();
    }
}

pub(super) fn a_burst_larger_than_the_link_arrives(link: LinkKind) {
    // 64 messages of 60 KiB: more than a ring or a socket buffer holds, so sends queue and go on by themselves.
    let pair = Pair::with(link, 64, Access::ALL, |_, _| [vec![], vec![]]);
    let sends: Vec<_> =
        (0..64).map(|id| send(id, SendOp::Send, pair.client.mr.sge(id * 1000, 60_000))).collect();
    let pattern: Vec<u8> = (0..200_000u32).map(|index| (index % 253) as u8).collect();
    pair.client.put(0, &pattern);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            for id in 0..64u64 {
                pair.s().post_recv(&[pair.server.receive(id, 0, 65536)]).expect("receive");
                ok(pair.server.next(), id, CompletionKind::Recv, 60_000);
                let start = id as usize * 1000;
                assert!(pair.server.bytes(0, 60_000) == pattern[start..start + 60_000], "message {id}");
            }
        });
        pair.c().post_send(&sends).expect("post");
        for id in 0..64 {
            ok(pair.client.next(), id, CompletionKind::Send, 60_000);
        }
        receiving.join().expect("receiver");
    });
}

pub(super) fn close_flushes_and_the_peer_notices(link: LinkKind) {
    let mut pair = Pair::with(link, 16, Access::ALL, |client, server| {
        [vec![client.receive(1, 0, 8)], vec![server.receive(2, 0, 8), server.receive(3, 64, 8)]]
    });
    pair.c().post_send(&[send(9, SendOp::Send, pair.client.put(64, b"bye"))]).expect("post");
    ok(pair.client.next(), 9, CompletionKind::Send, 3);
    pair.c().close();
    pair.c().close();
    bad(pair.client.next(), 1, WcStatus::Flushed);
    assert_eq!(pair.c().state(), QpState::Error);
    // A message that was sent before the end is delivered first.
    ok(pair.server.next(), 2, CompletionKind::Recv, 3);
    bad(pair.server.next(), 3, WcStatus::Flushed);
    assert_eq!(pair.s().state(), QpState::Error);
    pair.client.nothing();
    // And again with a new connection on the same listener; this time the server's side is dropped.
    let receives = [vec![pair.client.receive(5, 0, 8)], vec![]];
    let (client_qp, server_qp, _) = join(&pair.client, &pair.server, &pair.listener, 16, receives);
    pair.client_qp = Some(client_qp);
    drop(server_qp);
    bad(pair.client.next(), 5, WcStatus::Flushed);
    assert_eq!(pair.c().state(), QpState::Error);
}

pub(super) fn a_hundred_on_one_queue(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let server = Half::new(link, Access::ALL);
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let client = Half::new(link, Access::ALL);
    let pairs: Vec<_> = (0..100u64)
        .map(|id| {
            join(
                &client,
                &server,
                &listener,
                4,
                [vec![client.receive(id, 65536 + id * 8, 8)], vec![server.receive(id, id * 8, 8)]],
            )
        })
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The server's worker: it sleeps on the event descriptor, as in the product.
            let mut out = Vec::new();
            let mut served = 0;
            while served < 100 {
                if server.cq.poll(&mut out, 16) == 0 {
                    if server.cq.arm() {
                        let fd = server.cq.event_fd();
                        let mut fds = [rustix_poll(&fd)];
                        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
                        assert!(rustix::event::poll(&mut fds, Some(&timeout)).expect("poll") > 0, "no event");
                    }
                    server.cq.take_event();
                    continue;
                }
                for completion in out.drain(..) {
                    if completion.kind != CompletionKind::Recv {
                        continue;
                    }
                    let (_, qp, _) =
                        pairs.iter().find(|(_, qp, _)| qp.number() == completion.qp).expect("known");
                    let mut reply = send(1, SendOp::Send, server.mr.sge(completion.wr_id.0 * 8, 8));
                    reply.signaled = false;
                    qp.post_send(&[reply]).expect("reply");
                    served += 1;
                }
            }
        });
        for (id, (qp, ..)) in pairs.iter().enumerate() {
            let local = client.put(id as u64 * 8, &(id as u64 * 3).to_le_bytes());
            qp.post_send(&[SendWr { signaled: false, ..send(1, SendOp::Send, local) }]).expect("request");
        }
        let mut ids: Vec<_> = (0..100).map(|_| client.next().wr_id.0).collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..100).collect::<Vec<_>>());
    });
    for id in 0..100u64 {
        assert_eq!(client.bytes(65536 + id as usize * 8, 8), (id * 3).to_le_bytes());
    }
}

fn rustix_poll<'fd>(fd: &'fd std::os::fd::BorrowedFd<'fd>) -> rustix::event::PollFd<'fd> {
    rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)
}

pub(super) fn ping_pong_loses_no_wake_up(link: LinkKind) {
    // Short random pauses make both sides fall asleep at every possible moment.
    let pair = Pair::with(link, 8, Access::ALL, |client, server| {
        [vec![client.receive(0, 0, 8)], vec![server.receive(0, 0, 8)]]
    });
    const ROUNDS: u64 = 5_000;
    let pause = |round: u64| {
        let spins = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51;
        for _ in 0..spins {
            std::hint::spin_loop();
        }
    };
    let turn = |half: &Half, qp: &dyn QueuePair, round: u64| {
        qp.post_recv(&[half.receive(round + 1, 0, 8)]).expect("receive");
        let mut message = send(0, SendOp::Send, half.put(64, &round.to_le_bytes()));
        message.signaled = false;
        qp.post_send(&[message]).expect("send");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                ok(pair.server.next(), round, CompletionKind::Recv, 8);
                assert_eq!(pair.server.bytes(0, 8), round.to_le_bytes());
                pause(round);
                turn(&pair.server, pair.s(), round);
            }
        });
        for round in 0..ROUNDS {
            let start = Instant::now();
            turn(&pair.client, pair.c(), round);
            ok(pair.client.next(), round, CompletionKind::Recv, 8);
            assert!(start.elapsed() < Duration::from_millis(900), "round {round} was saved by the timeout");
            pause(round + 7);
        }
    });
}

pub(super) fn two_threads_post_to_one_queue_pair(link: LinkKind) {
    let pair = Pair::with(link, 64, Access::ALL, |_, _| [vec![], vec![]]);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let pair = &pair;
            scope.spawn(move || {
                for _ in 0..500 {
                    let add = SendWr {
                        signaled: false,
                        ..send(
                            thread,
                            SendOp::FetchAdd { remote: pair.server.place(0), add: 1 },
                            pair.client.mr.sge(thread * 8, 8),
                        )
                    };
                    while pair.c().post_send(&[add]).is_err() {
                        pair.client.cq.poll(&mut Vec::new(), 1);
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    pair.c()
        .post_send(&[send(9, SendOp::Read(pair.server.place(0)), pair.client.mr.sge(64, 8))])
        .or_else(|_| {
            pair.client.cq.wait(Duration::from_secs(1));
            pair.c().post_send(&[send(9, SendOp::Read(pair.server.place(0)), pair.client.mr.sge(64, 8))])
        })
        .expect("post");
    ok(pair.client.next(), 9, CompletionKind::Read, 8);
    assert_eq!(pair.client.bytes(64, 8), 1000u64.to_le_bytes());
}

/// The messages find no receive, so they are sent after their memory has changed: inline bytes are those at the time of the post. Memory outside a
/// region is refused even if it would be inline.
pub(super) fn what_is_inline_is_copied_by_the_post(link: LinkKind) {
    const WISHED: u32 = 64;
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let configs = [client.config(16).inline(WISHED), server.config(16)];
    let (client_qp, server_qp, _) = join_as(&client, &listener, configs, [vec![], vec![]]);
    let most = client_qp.max_inline();
    assert_eq!(server_qp.max_inline(), 0, "nobody wished for it");
    if !has(link, Ability::Inline, most > 0) {
        return;
    }
    assert_eq!(most, WISHED);
    let len = most as usize;
    for id in 0..4u8 {
        let local = client.put(0, &vec![id; len]);
        let write = send(10 + u64::from(id), SendOp::Write(server.place(4096 + u64::from(id) * 64)), local);
        client_qp.post_send(&[send(id.into(), SendOp::Send, local), write]).expect("post");
        client.put(0, &vec![0xff; len]);
    }
    for id in 0..4u8 {
        server_qp.post_recv(&[server.receive(id.into(), 0, most)]).expect("receive");
        ok(server.next(), id.into(), CompletionKind::Recv, most);
        assert_eq!(server.bytes(0, len), vec![id; len]);
        ok(client.next(), id.into(), CompletionKind::Send, most);
        ok(client.next(), 10 + u64::from(id), CompletionKind::Write, most);
        assert_eq!(server.bytes(4096 + usize::from(id) * 64, len), vec![id; len]);
    }
    let beyond = client.mr.sge(MEMORY_LEN as u64 - 8, 16);
    client_qp.post_send(&[send(20, SendOp::Send, beyond)]).expect("post");
    let refused = client.next();
    // rdma_rxe reports its own faults as flushed requests (6.12, `rxe_req.c`).
    let told = if link == LinkKind::Rdma { WcStatus::Flushed } else { WcStatus::LocalProtection };
    assert!([WcStatus::LocalProtection, told].contains(&refused.status), "{refused:?}");
    assert_eq!((refused.wr_id, client_qp.state()), (WrId(20), QpState::Error));
}
