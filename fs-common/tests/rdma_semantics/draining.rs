//! Memory whose region is dropped while work requests name it: nothing touches it any more.

use super::*;

const BEFORE: u8 = 0x11;
const AFTER: u8 = 0x55;

fn filled(len: usize, byte: u8) -> Arc<SharedMemory> {
    let memory = Arc::new(SharedMemory::new("let go of", len).expect("memory"));
    memory.fill(0, len, byte);
    memory
}

fn is_all(memory: &SharedMemory, byte: u8) -> bool {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes);
    bytes.iter().all(|there| *there == byte)
}

pub(super) fn a_receive_whose_memory_was_let_go_of_takes_nothing(link: LinkKind) {
    let pair = Pair::new(link);
    let memory = filled(4096, BEFORE);
    let late = pair.server.pd.register(memory.clone(), Access::ALL).expect("register");
    pair.s().post_recv(&[RecvWr { wr_id: WrId(7), local: late.sge(0, 64).into() }]).expect("receive");
    drop(late);
    pair.c().post_send(&[send(1, SendOp::Send, pair.client.put(0, b"late"))]).expect("post");
    let completion = pair.server.next();
    assert_eq!(completion.wr_id, WrId(7));
    // rdma_rxe reports all errors of a receive with one status (see `verbs_provider`).
    let told = [WcStatus::LocalProtection, WcStatus::LocalLength];
    let told = if link == LinkKind::Rdma { &told[..] } else { &told[..1] };
    assert!(told.contains(&completion.status), "{completion:?}");
    assert_eq!(pair.s().state(), QpState::Error);
    assert!(is_all(&memory, BEFORE));
}

/// READs under way may complete. Replies that arrive after the region was dropped are written nowhere.
pub(super) fn reads_into_memory_that_was_let_go_of_end(link: LinkKind) {
    const READS: u64 = 8;
    const LEN: u32 = 256 << 10;
    let pair = Pair::new(link);
    let (client, server) = (&pair.client, &pair.server);
    for _ in 0..3 {
        let memory = filled(READS as usize * LEN as usize, BEFORE);
        let late = client.pd.register(memory.clone(), Access::ALL).expect("register");
        let read = |id| send(id, SendOp::Read(server.place(id * 4096)), late.sge(id * u64::from(LEN), LEN));
        let reads: Vec<_> = (0..READS).map(read).collect();
        if pair.c().post_send(&reads).is_err() {
            // An earlier round has broken the connection.
            break;
        }
        drop((reads, late));
        memory.fill(0, memory.len(), AFTER);
        let statuses: Vec<_> = (0..READS).map(|_| client.next().status).collect();
        assert!(is_all(&memory, AFTER), "{statuses:?}");
        let refused = statuses.iter().position(|status| *status != WcStatus::Success);
        let (done, behind) = statuses.split_at(refused.unwrap_or(statuses.len()));
        assert!(done.iter().all(|status| *status == WcStatus::Success));
        assert!(behind.iter().skip(1).all(|status| *status == WcStatus::Flushed), "{statuses:?}");
    }
}

/// A peer writes again and again: none of its bytes arrives once the region is dropped.
pub(super) fn writes_to_memory_that_was_let_go_of_are_refused(link: LinkKind) {
    // Over shm the peer maps the region, and completes what it has begun: see `rdma::soft`.
    if !has(link, Ability::EndsPeersCopies, link != LinkKind::Shm) {
        return;
    }
    const LEN: u32 = 256 << 10;
    let pair = Pair::new(link);
    let memory = filled(LEN as usize, BEFORE);
    let late = pair.server.pd.register(memory.clone(), Access::ALL).expect("register");
    let place = Remote::Memory { rkey: late.rkey(), offset: 0 };
    let (client, written) = (&pair.client, AtomicBool::new(false));
    let status = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            loop {
                let write = send(1, SendOp::Write(place), client.mr.sge(0, LEN));
                pair.c().post_send(&[write]).expect("post");
                match client.next().status {
                    WcStatus::Success => written.store(true, Ordering::Release),
                    status => return status,
                }
            }
        });
        let deadline = Instant::now() + PATIENCE;
        while !written.load(Ordering::Acquire) {
            assert!(Instant::now() < deadline, "nothing was written");
            std::thread::yield_now();
        }
        drop(late);
        memory.fill(0, LEN as usize, AFTER);
        writing.join().expect("writer")
    });
    assert_eq!(status, WcStatus::RemoteAccess);
    assert!(is_all(&memory, AFTER));
}
