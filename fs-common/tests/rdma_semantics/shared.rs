//! Receives that queue pairs share. Where there are none, `abilities` has the test of that.

use super::*;

/// Local ranges of a shared receive.
const SHARED_SGES: u32 = 2;

/// A server's half with shared receives, and two connections that take from them.
struct Sharing {
    client: Half,
    server: Half,
    receives: Arc<dyn SharedReceiveQueue>,
    /// The client's and the server's queue pair of each connection.
    one: [Option<Arc<dyn QueuePair>>; 2],
    two: [Option<Arc<dyn QueuePair>>; 2],
    _listener: Arc<dyn Listener>,
    _dir: tempfile::TempDir,
}

impl Sharing {
    /// Posts `depth` receives of `len` bytes, each at 64 times its number. `None`: there are no shared receives over this link.
    fn new(link: LinkKind, depth: u32, len: u32) -> Option<Self> {
        let dir = tempfile::tempdir().expect("dir");
        let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
        if !has(link, Ability::SharedReceives, server.device.capabilities().shared_receives) {
            return None;
        }
        let receives = server.pd.create_shared_receives(depth, SHARED_SGES).expect("shared receives");
        let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
        let all: Vec<_> = (0..u64::from(depth)).map(|id| server.receive(id, id * 64, len)).collect();
        receives.post(&all).expect("receives");
        let connect = || {
            let configs = [client.config(16), QpConfig::with_shared(&server.cq, 16, &receives)];
            let (client_qp, server_qp, _) = join_as(&client, &listener, configs, [vec![], vec![]]);
            [Some(client_qp), Some(server_qp)]
        };
        let (one, two) = (connect(), connect());
        Some(Self { client, server, receives, one, two, _listener: listener, _dir: dir })
    }

    /// Sends these bytes, as request `id`.
    fn say(&self, qp: &[Option<Arc<dyn QueuePair>>; 2], id: u64, bytes: &[u8]) {
        let local = self.client.put(id * 64, bytes);
        end_of(qp, 0).post_send(&[send(id, SendOp::Send, local)]).expect("post");
    }

    /// The next message: the receive that it took, its queue pair, and its bytes.
    fn hear(&self) -> (u64, QpNumber, Vec<u8>) {
        let completion = self.server.next();
        assert_eq!(
            (completion.kind, completion.status),
            (CompletionKind::Recv, WcStatus::Success),
            "{completion:?}"
        );
        let id = completion.wr_id.0;
        (id, completion.qp, self.server.bytes(id as usize * 64, completion.byte_len as usize))
    }
}

fn end_of(qp: &[Option<Arc<dyn QueuePair>>; 2], end: usize) -> &dyn QueuePair {
    qp[end].as_deref().expect("open")
}

pub(super) fn queue_pairs_share_receives(link: LinkKind) {
    let Some(sharing) = Sharing::new(link, 4, 64) else { return };
    let (client, server) = (&sharing.client, &sharing.server);
    let numbers = [&sharing.one, &sharing.two].map(|qp| end_of(qp, 1).number());
    sharing.say(&sharing.one, 10, b"of one");
    assert_eq!(sharing.hear(), (0, numbers[0], b"of one".to_vec()), "the oldest receive is taken first");
    ok(client.next(), 10, CompletionKind::Send, 6);
    sharing.say(&sharing.two, 11, b"of two");
    assert_eq!(sharing.hear(), (1, numbers[1], b"of two".to_vec()));
    ok(client.next(), 11, CompletionKind::Send, 6);
    let write = SendOp::WriteImm(server.place(4096), 7);
    end_of(&sharing.two, 0).post_send(&[send(12, write, client.put(0, b"there"))]).expect("post");
    let arrived = server.next();
    ok(arrived, 2, CompletionKind::RecvWithImm, 5);
    assert_eq!((arrived.imm, arrived.qp), (Some(7), numbers[1]));
    ok(client.next(), 12, CompletionKind::Write, 5);
    let receive = server.receive(9, 0, 64);
    assert_eq!(end_of(&sharing.one, 1).post_recv(&[receive]), Err(PostError::SharedReceives));
    // Three of the four receives were taken and polled, one is still posted.
    let four: Vec<_> = (4..8).map(|id| server.receive(id, id * 64, 64)).collect();
    assert_eq!(sharing.receives.post(&four), Err(PostError::QueueFull { posted: 3 }));
    assert_eq!(sharing.receives.ran_dry(), 0);
}

pub(super) fn a_dry_shared_queue_lets_messages_wait(link: LinkKind) {
    let Some(sharing) = Sharing::new(link, 2, 64) else { return };
    let ones = end_of(&sharing.one, 1).number();
    for id in 0..3 {
        sharing.say(&sharing.one, id, &[b'a', id as u8]);
    }
    sharing.say(&sharing.two, 3, b"b");
    let mut heard = vec![sharing.hear(), sharing.hear()];
    sharing.server.nothing();
    assert_eq!(sharing.receives.ran_dry(), 1);
    let again: Vec<_> = (2..4).map(|id| sharing.server.receive(id, id * 64, 64)).collect();
    sharing.receives.post(&again).expect("receives");
    heard.extend([sharing.hear(), sharing.hear()]);
    assert_eq!(sharing.receives.ran_dry(), 2);
    let (of_one, of_two): (Vec<_>, Vec<_>) = heard.into_iter().partition(|(_, qp, _)| *qp == ones);
    let said =
        |heard: Vec<(u64, QpNumber, Vec<u8>)>| heard.into_iter().map(|(.., bytes)| bytes).collect::<Vec<_>>();
    assert_eq!(said(of_one), [[b'a', 0], [b'a', 1], [b'a', 2]], "in order");
    assert_eq!(said(of_two), [b"b"]);
    for _ in 0..4 {
        assert_eq!(sharing.client.next().status, WcStatus::Success);
    }
}

pub(super) fn a_broken_queue_pair_leaves_shared_receives(link: LinkKind) {
    let Some(sharing) = Sharing::new(link, 4, 64) else { return };
    end_of(&sharing.one, 0).close();
    let deadline = Instant::now() + PATIENCE;
    while end_of(&sharing.one, 1).state() != QpState::Error {
        assert!(Instant::now() < deadline);
        sharing.server.cq.wait(Duration::from_millis(20));
    }
    sharing.server.nothing();
    for id in 0..4 {
        sharing.say(&sharing.two, id, b"still here");
    }
    let mut taken: Vec<_> = (0..4).map(|_| sharing.hear().0).collect();
    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 2, 3]);
}

pub(super) fn a_message_too_long_breaks_only_its_queue_pair(link: LinkKind) {
    let Some(sharing) = Sharing::new(link, 2, 4) else { return };
    sharing.say(&sharing.one, 0, b"12345");
    let broken = sharing.server.next();
    bad(broken, 0, WcStatus::LocalLength);
    assert_eq!(broken.qp, end_of(&sharing.one, 1).number());
    assert_eq!(end_of(&sharing.one, 1).state(), QpState::Error);
    assert_eq!(sharing.server.bytes(0, 8), [0; 8]);
    sharing.say(&sharing.two, 1, b"1234");
    assert_eq!(sharing.hear().2, b"1234");
}

/// The poster of a receive gets its memory back, whatever happened to the queue pair that took the receive.
pub(super) fn receives_of_a_queue_pair_that_is_gone_come_back(link: LinkKind) {
    let Some(mut sharing) = Sharing::new(link, 1, 64) else { return };
    let number = end_of(&sharing.one, 1).number();
    sharing.say(&sharing.one, 0, b"unheard");
    assert_eq!(sharing.client.next().status, WcStatus::Success);
    // An RNIC has placed the message by now. The simulated one would place it at the next poll, so it has taken no receive.
    drop(sharing.one[1].take());
    if link == LinkKind::Rdma {
        let back = sharing.server.next();
        assert_eq!((back.wr_id, back.qp), (WrId(0), number), "{back:?}");
        sharing.receives.post(&[sharing.server.receive(0, 0, 64)]).expect("its place is free");
    }
    sharing.server.nothing();
    sharing.say(&sharing.two, 1, b"heard");
    assert_eq!(sharing.hear().2, b"heard");
}

/// A shared receive fills its ranges in order. One with more of them than the queue was made for is not posted.
pub(super) fn shared_receives_have_several_ranges(link: LinkKind) {
    let Some(sharing) = Sharing::new(link, 4, 4) else { return };
    for id in 0..4 {
        sharing.say(&sharing.one, id, b"four");
        assert_eq!(sharing.hear().2, b"four");
    }
    let server = &sharing.server;
    let local = |ranges: &[(u64, u32)]| {
        let ranges: Vec<_> = ranges.iter().map(|(at, len)| server.mr.sge(*at, *len)).collect();
        SgeList::of(&ranges).expect("few")
    };
    let two = RecvWr { wr_id: WrId(5), local: local(&[(1000, 3), (2000, 61)]) };
    let three = RecvWr { wr_id: WrId(6), local: local(&[(0, 1), (10, 1), (20, 1)]) };
    let refused = Err(PostError::TooManySges { posted: 1, most: SHARED_SGES });
    assert_eq!(sharing.receives.post(&[two, three, two]), refused);
    sharing.say(&sharing.two, 5, b"several");
    ok(server.next(), 5, CompletionKind::Recv, 7);
    assert_eq!((server.bytes(1000, 4), server.bytes(2000, 5)), (b"sev\0".to_vec(), b"eral\0".to_vec()));
    server.nothing();
}
