//! Several local ranges in one work request: one string of bytes, gathered and scattered in order.

use super::*;
use cuttlefs_common::ids::Lkey;

const _: () = assert!(SGES_MAX == 4, "the tests cut lengths in four");

const MOST: u32 = SGES_MAX as u32;

/// A pair of queue pairs that take as many ranges as there can be, and a second region at each side, so that one request names keys of two.
struct Gathering {
    pair: Pair,
    /// The client's and the server's.
    other: [Arc<dyn MemoryRegion>; 2],
}

impl Gathering {
    fn new(link: LinkKind) -> Self {
        let pair = Pair::gathering(link, MOST);
        assert_eq!(pair.client.device.capabilities().max_sges, MOST, "this suite wants all of them");
        let other = [&pair.client, &pair.server].map(|half| {
            let memory = Arc::new(SharedMemory::new("other", MEMORY_LEN).expect("memory"));
            half.pd.register(memory, Access::ALL).expect("register")
        });
        Self { pair, other }
    }

    /// Ranges of these lengths, the odd ones in the second region, each some bytes behind the last one of its region.
    fn ranges(&self, end: usize, lens: &[u32]) -> Vec<Place<'_>> {
        let half = [&self.pair.client, &self.pair.server][end];
        let mut next = [64 + 5, 640];
        let place = |(index, len): (usize, &u32)| {
            let at = next[index % 2];
            next[index % 2] += u64::from(*len) + 3;
            Place { region: if index % 2 == 0 { &*half.mr } else { &*self.other[end] }, at, len: *len }
        };
        lens.iter().enumerate().map(place).collect()
    }
}

/// A range of a region.
#[derive(Clone, Copy)]
struct Place<'g> {
    region: &'g dyn MemoryRegion,
    at: u64,
    len: u32,
}

impl Place<'_> {
    fn fill(&self, bytes: &[u8]) {
        self.region.memory().write(self.at as usize, bytes);
    }

    /// The bytes there, and those right before and behind.
    fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.len as usize + 2];
        self.region.memory().read(self.at as usize - 1, &mut out);
        out
    }
}

fn list(places: &[Place<'_>]) -> SgeList {
    let sges: Vec<_> = places.iter().map(|place| place.region.sge(place.at, place.len)).collect();
    SgeList::of(&sges).expect("they are few enough")
}

/// Cuts a string into the places, in order.
fn spread(places: &[Place<'_>], string: &[u8]) {
    let mut rest = string;
    for place in places {
        let (part, behind) = rest.split_at(place.len as usize);
        place.fill(part);
        rest = behind;
    }
}

/// Fills the places, and a byte before and behind each, with what is there before a test.
fn blank(places: &[Place<'_>]) {
    for place in places {
        Place { at: place.at - 1, len: place.len + 2, ..*place }.fill(&vec![BLANK; place.len as usize + 2]);
    }
}

/// The places hold the string as far as it goes; behind it, and around the places, nothing was written.
fn assert_holds(places: &[Place<'_>], string: &[u8]) {
    let mut rest = string;
    for (index, place) in places.iter().enumerate() {
        let (part, behind) = rest.split_at(rest.len().min(place.len as usize));
        let mut wanted = vec![BLANK; place.len as usize + 2];
        wanted[1..=part.len()].copy_from_slice(part);
        assert!(place.bytes() == wanted, "range {index} of {}, {} bytes", places.len(), place.len);
        rest = behind;
    }
    assert!(rest.is_empty());
}

const BLANK: u8 = 0xee;

fn string(len: u32) -> Vec<u8> {
    (0..len).map(|index| (index % 241) as u8).collect()
}

/// Cuts of the same length for who gathers and who scatters.
const CUTS: [(&[u32], &[u32]); 6] = [
    (&[5, 3], &[8]),
    (&[8], &[3, 0, 5]),
    (&[1, 0, 2, 0, 4, 9], &[4, 4, 4, 4]),
    (&[64, 4096, 8], &[4000, 1, 167]),
    (&[100, 400, 12], &[8, 16, 480, 8]),
    (&[16, 30_001, 30_000, 7], &[60_000, 24]),
];

pub(super) fn several_ranges_are_one_string_of_bytes(link: LinkKind) {
    let gathering = Gathering::new(link);
    let pair = &gathering.pair;
    for (from, to) in CUTS {
        let len: u32 = from.iter().sum();
        assert_eq!(len, to.iter().sum::<u32>());
        let bytes = string(len);
        let (ours, theirs) = (gathering.ranges(0, from), gathering.ranges(1, to));
        blank(&theirs);
        spread(&ours, &bytes);
        // A message.
        pair.s().post_recv(&[RecvWr { wr_id: WrId(7), local: list(&theirs) }]).expect("receive");
        pair.c().post_send(&[send(1, SendOp::Send, list(&ours))]).expect("post");
        ok(pair.server.next(), 7, CompletionKind::Recv, len);
        ok(pair.client.next(), 1, CompletionKind::Send, len);
        assert_holds(&theirs, &bytes);
        // A WRITE, at each alignment of its end.
        for shift in 0..9 {
            let place = 300_000 + shift;
            pair.server.put(place - 1, &vec![BLANK; len as usize + 2]);
            pair.c()
                .post_send(&[send(2, SendOp::Write(pair.server.place(place)), list(&ours))])
                .expect("post");
            ok(pair.client.next(), 2, CompletionKind::Write, len);
            let there = pair.server.bytes(place as usize - 1, len as usize + 2);
            assert!(there == [&[BLANK], &bytes[..], &[BLANK]].concat(), "{from:?} at {shift}");
        }
        // A WRITE with an immediate takes a receive and leaves its ranges alone.
        blank(&theirs);
        pair.s().post_recv(&[RecvWr { wr_id: WrId(8), local: list(&theirs) }]).expect("receive");
        let write = SendOp::WriteImm(pair.server.place(500_000), 77);
        pair.c().post_send(&[send(3, write, list(&ours))]).expect("post");
        ok(pair.server.next(), 8, CompletionKind::RecvWithImm, len);
        ok(pair.client.next(), 3, CompletionKind::Write, len);
        assert!(pair.server.bytes(500_000, len as usize) == bytes);
        assert_holds(&theirs, &[]);
        // And READs, of all at once and of a part behind another request.
        blank(&ours);
        let read = |id, local| send(id, SendOp::Read(pair.server.place(500_000)), local);
        pair.c().post_send(&[read(4, list(&ours))]).expect("post");
        ok(pair.client.next(), 4, CompletionKind::Read, len);
        assert_holds(&ours, &bytes);
    }
}

pub(super) fn a_message_fills_ranges_as_far_as_it_goes(link: LinkKind) {
    let gathering = Gathering::new(link);
    let pair = &gathering.pair;
    let theirs = gathering.ranges(1, &[4, 4, 4]);
    let post = |id| pair.s().post_recv(&[RecvWr { wr_id: WrId(id), local: list(&theirs) }]).expect("receive");
    for len in [0, 1, 3, 4, 5, 8, 11, 12] {
        blank(&theirs);
        post(len.into());
        let bytes = string(len);
        pair.c().post_send(&[send(1, SendOp::Send, pair.client.put(0, &bytes))]).expect("post");
        ok(pair.server.next(), len.into(), CompletionKind::Recv, len);
        ok(pair.client.next(), 1, CompletionKind::Send, len);
        assert_holds(&theirs, &bytes);
    }
    blank(&theirs);
    post(99);
    pair.c().post_send(&[send(2, SendOp::Send, pair.client.put(0, &string(13)))]).expect("post");
    bad(pair.server.next(), 99, WcStatus::LocalLength);
    assert_eq!(pair.s().state(), QpState::Error);
    if link != LinkKind::Rdma {
        // An RNIC may have placed what came before it saw the end.
        assert_holds(&theirs, &[]);
    }
}

/// More ranges than the queue pair was made for: the post refuses the request, and what stands behind it, and the queue pair goes on.
pub(super) fn too_many_ranges_are_no_request(link: LinkKind) {
    for most in [1, 2, MOST - 1] {
        let pair = Pair::gathering(link, most);
        let ranges = |count: u32| {
            let ranges: Vec<_> =
                (0..count).map(|index| pair.client.mr.sge(u64::from(index) * 64, 8)).collect();
            SgeList::of(&ranges).expect("there can be as many")
        };
        pair.client.put(0, &string(512));
        let write = |id, count| send(id, SendOp::Write(pair.server.place(4096 * id)), ranges(count));
        let requests = [write(1, most), write(2, most + 1), write(3, 1)];
        let refused = Err(PostError::TooManySges { posted: 1, most });
        assert_eq!(pair.c().post_send(&requests), refused);
        ok(pair.client.next(), 1, CompletionKind::Write, most * 8);
        assert_eq!(pair.c().post_send(&requests[1..]), Err(PostError::TooManySges { posted: 0, most }));
        pair.c().post_send(&requests[2..]).expect("it goes on");
        ok(pair.client.next(), 3, CompletionKind::Write, 8);
        assert_eq!(pair.server.bytes(2 * 4096, 8), [0; 8], "of the second request nothing was done");
        let receives =
            [most, most + 1, 1].map(|count| RecvWr { wr_id: WrId(count.into()), local: ranges(count) });
        assert_eq!(pair.c().post_recv(&receives), refused);
        pair.s().post_send(&[send(4, SendOp::Send, pair.server.put(0, b"hello"))]).expect("post");
        ok(pair.client.next(), most.into(), CompletionKind::Recv, 5);
        pair.client.nothing();
    }
    // Ranges without bytes do not count, and no request can name more than there can be.
    let half = Half::new(link, Access::ALL);
    let mut ranges = vec![half.mr.sge(0, 1); SGES_MAX];
    ranges.extend([half.mr.sge(0, 0), Sge::EMPTY]);
    assert_eq!(SgeList::of(&ranges).map(|list| list.count()), Ok(MOST));
    ranges.push(half.mr.sge(0, 1));
    assert!(SgeList::of(&ranges).is_err());
    // Nor is a queue pair made for more, or for none.
    let dir = tempfile::tempdir().expect("dir");
    let listener: Arc<dyn Listener> = Arc::from(half.pd.listen(&endpoint(link, &dir)).expect("listen"));
    for asked in [0, half.device.capabilities().max_sges + 1] {
        let qp = half.config(4).sges(asked);
        let options = ConnectOptions { qp, receives: vec![], timeout: PATIENCE };
        let error = half.pd.connect(&listener.endpoint(), options).err().expect("refused").to_string();
        assert!(error.contains("local ranges"), "{error}");
        if half.device.capabilities().shared_receives {
            assert!(half.pd.create_shared_receives(4, asked).is_err());
        }
    }
}

/// One bad range among good ones: the request fails, and not a byte has moved.
pub(super) fn one_bad_range_spoils_its_request(link: LinkKind) {
    type Op = fn(&Half) -> SendOp;
    let ops: [Op; 3] = [
        |_| SendOp::Send,
        |server| SendOp::Write(server.place(4096)),
        |server| SendOp::Read(server.place(4096)),
    ];
    // A key that nobody has, and a range that ends behind its region.
    let bad_ranges: [fn(&Half) -> Sge; 2] = [
        |half| Sge { lkey: Lkey(half.mr.lkey().0 ^ 0x55), offset: 0, len: 4 },
        |half| half.mr.sge(MEMORY_LEN as u64 - 2, 4),
    ];
    // What an RNIC says of its own side's fault is up to it, and it finds it when it comes there.
    let is_told = |completion: Completion, id| match link {
        LinkKind::Rdma => assert_ne!(completion.status, WcStatus::Success),
        _ => bad(completion, id, WcStatus::LocalProtection),
    };
    for op in ops {
        for (bad_at, makes_bad) in (0..3).flat_map(|at| bad_ranges.map(|makes| (at, makes))) {
            let gathering = Gathering::new(link);
            let pair = &gathering.pair;
            pair.s().post_recv(&[pair.server.receive(7, 8192, 64)]).expect("receive");
            let ours = gathering.ranges(0, &[4, 4, 4]);
            blank(&ours);
            pair.server.put(4096, &[0x77; 64]);
            pair.server.put(8192, &[0x77; 64]);
            let mut ranges: Vec<_> = ours.iter().map(|place| place.region.sge(place.at, place.len)).collect();
            ranges[bad_at] = makes_bad(&pair.client);
            let local = SgeList::of(&ranges).expect("three");
            pair.c().post_send(&[send(1, op(&pair.server), local)]).expect("post");
            is_told(pair.client.next(), 1);
            assert_eq!(pair.c().state(), QpState::Error);
            pair.settle_server();
            if link != LinkKind::Rdma {
                assert_holds(&ours, &[]);
                assert_eq!(pair.server.bytes(4096, 64), [0x77; 64]);
                assert_eq!(pair.server.bytes(8192, 64), [0x77; 64]);
            }
        }
    }
    // A receive of which one range was let go of takes nothing.
    let gathering = Gathering::new(link);
    let (pair, [_, late]) = (&gathering.pair, &gathering.other);
    let theirs = gathering.ranges(1, &[4, 4, 4]);
    blank(&theirs);
    let memory = Arc::new(SharedMemory::new("let go of", 4096).expect("memory"));
    let gone = pair.server.pd.register(memory, Access::ALL).expect("register");
    let first = &theirs[0];
    let ranges = [first.region.sge(first.at, first.len), gone.sge(0, 4), late.sge(2000, 4)];
    let local = SgeList::of(&ranges).expect("three");
    pair.s().post_recv(&[RecvWr { wr_id: WrId(7), local }]).expect("receive");
    drop(gone);
    pair.c().post_send(&[send(1, SendOp::Send, pair.client.put(0, &string(12)))]).expect("post");
    let completion = pair.server.next();
    assert_eq!(completion.wr_id, WrId(7));
    match link {
        LinkKind::Rdma => assert_ne!(completion.status, WcStatus::Success),
        _ => {
            assert_eq!(completion.status, WcStatus::LocalProtection);
            assert_holds(&theirs, &[]);
        }
    }
    assert_eq!(pair.s().state(), QpState::Error);
}

/// Each range is short enough, and all together are not. An atomic's word lands in one range.
pub(super) fn lengths_of_ranges_add_up(link: LinkKind) {
    let end_of = |op: &dyn Fn(&Half) -> SendOp, lens: [u32; SGES_MAX]| {
        let pair = Pair::gathering(link, MOST);
        let ranges = lens.map(|len| pair.client.mr.sge(0, len));
        let local = SgeList::of(&ranges).expect("four");
        pair.s().post_recv(&[pair.server.receive(7, 0, 1 << 20)]).expect("receive");
        pair.c().post_send(&[send(1, op(&pair.server), local)]).expect("post");
        pair.client.next()
    };
    let quarters = |bytes: u32| [bytes / 4, bytes / 4, bytes / 4, bytes - 3 * (bytes / 4)];
    let capabilities = Half::new(link, Access::ALL).device.capabilities();
    let message = capabilities.max_message_bytes;
    ok(end_of(&|_| SendOp::Send, quarters(message)), 1, CompletionKind::Send, message);
    bad(end_of(&|_| SendOp::Send, quarters(message + 1)), 1, WcStatus::LocalLength);
    let transfer = capabilities.max_transfer_bytes;
    // The longest transfer of an RNIC is longer than the test's memory, even four times.
    if transfer as usize <= MEMORY_LEN {
        let write = |server: &Half| SendOp::Write(server.place(0));
        let read = |server: &Half| SendOp::Read(server.place(0));
        ok(end_of(&write, quarters(transfer)), 1, CompletionKind::Write, transfer);
        ok(end_of(&read, quarters(transfer)), 1, CompletionKind::Read, transfer);
        for op in [&write as &dyn Fn(&Half) -> SendOp, &read] {
            bad(end_of(op, quarters(transfer + 1)), 1, WcStatus::LocalLength);
            bad(end_of(op, [MEMORY_LEN as u32; SGES_MAX]), 1, WcStatus::LocalLength);
        }
    }
    let add = |server: &Half| SendOp::FetchAdd { remote: server.place(0), add: 1 };
    ok(end_of(&add, [0, 8, 0, 0]), 1, CompletionKind::FetchAdd, 8);
    bad(end_of(&add, [4, 4, 0, 0]), 1, WcStatus::LocalLength);
}

/// The owner adds to both halves of a word at once. A READ brings both from one moment, also if they land in two ranges.
pub(super) fn a_word_in_two_ranges_is_not_torn(link: LinkKind) {
    const BOTH: u64 = 1 << 32 | 1;
    let gathering = Gathering::new(link);
    let pair = &gathering.pair;
    let ours = gathering.ranges(0, &[4, 4]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let memory = pair.server.mr.memory();
        scope.spawn(|| {
            for value in 0..u64::from(u32::MAX) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                memory.store_u64(4096, value * BOTH, Ordering::Relaxed);
                if value % 64 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        // Until the word was seen to change often, or for a while: a machine may have no second core for the owner.
        let (mut torn, mut last, mut changes) = (None, Vec::new(), 0);
        let until = Instant::now() + Duration::from_secs(2);
        while torn.is_none() && changes < 2000 && Instant::now() < until {
            let read = send(1, SendOp::Read(pair.server.place(4096)), list(&ours));
            pair.c().post_send(&[read]).expect("post");
            assert_eq!(pair.client.next().status, WcStatus::Success);
            let [first, second] = [&ours[0], &ours[1]].map(|place| place.bytes()[1..5].to_vec());
            changes += u32::from(first != last);
            torn = (first != second).then(|| (first.clone(), second));
            last = first;
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(torn, None);
    });
}

/// What is inline is gathered by the post: the ranges may change at once.
pub(super) fn what_is_inline_is_gathered_by_the_post(link: LinkKind) {
    const WISHED: u32 = 64;
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let configs = [client.config(16).inline(WISHED).sges(3), server.config(16)];
    let (client_qp, server_qp, _) = join_as(&client, &listener, configs, [vec![], vec![]]);
    if !has(link, Ability::Inline, client_qp.max_inline() > 0) {
        return;
    }
    let bytes = string(WISHED);
    for id in 0..4 {
        client.put(0, &bytes[..10]);
        client.put(1000, &bytes[10..50]);
        client.put(2000, &bytes[50..]);
        let local = [(0, 10), (1000, 40), (2000, 14)].map(|(at, len)| client.mr.sge(at, len));
        let local = SgeList::of(&local).expect("three");
        let write = send(10 + id, SendOp::Write(server.place(4096 + id * 64)), local);
        client_qp.post_send(&[send(id, SendOp::Send, local), write]).expect("post");
        for at in [0, 1000, 2000] {
            client.put(at, &[0xff; 40]);
        }
    }
    for id in 0..4 {
        server_qp.post_recv(&[server.receive(id, 0, WISHED)]).expect("receive");
        ok(server.next(), id, CompletionKind::Recv, WISHED);
        assert_eq!(server.bytes(0, WISHED as usize), bytes);
        ok(client.next(), id, CompletionKind::Send, WISHED);
        ok(client.next(), 10 + id, CompletionKind::Write, WISHED);
        assert_eq!(server.bytes(4096 + id as usize * 64, WISHED as usize), bytes);
    }
}
