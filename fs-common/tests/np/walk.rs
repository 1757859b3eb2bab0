//! Random walks in one thread: two peers, the owner, and evictions before any work request.

use super::stepped::{Stepped, before_each};
use super::*;
use cuttlefs_common::np::NpTarget;
use cuttlefs_common::rdma::sim::{self, SimNetwork, Translation};
use proptest::prelude::*;
use std::collections::HashMap;

const PAGES: u64 = 40;
/// Bytes of one request's local memory.
const ROOM: u64 = 4 * PAGE;

#[derive(Clone, Debug)]
enum Step {
    Post { peer: usize, op: u8, place: u64, len: u32, signaled: bool, order: u8 },
    Poll(usize),
    Serve,
    Evict(u64),
    Own { place: u64, len: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![1u32..64, 1u32..3000, 1u32..12_000];
    prop_oneof![
        6 => (0usize..2, 0u8..6, any::<u64>(), len, any::<bool>(), 0u8..8)
            .prop_map(|(peer, op, place, len, signaled, order)| Step::Post { peer, op, place, len, signaled, order }),
        3 => (0usize..2).prop_map(Step::Poll),
        3 => Just(Step::Serve),
        3 => (0..PAGES).prop_map(Step::Evict),
        1 => (any::<u64>(), 1usize..9000).prop_map(|(place, len)| Step::Own { place, len }),
    ]
}

/// A peer, and what its half of the region must hold.
struct Half {
    peer: Peer,
    first: u64,
    model: Vec<u8>,
    /// Requests under way: room in local memory, and what must be found.
    expected: HashMap<u64, Expected>,
}

enum Expected {
    Bytes(u64, Vec<u8>),
    Old(u64),
    Written,
}

impl Half {
    fn post(&mut self, op: u8, place: u64, len: u32, signaled: bool, order: u8) {
        if self.peer.peer.outstanding() >= 60 {
            return;
        }
        let is_atomic = op >= 4;
        let len = if is_atomic { 8 } else { len };
        let mut within = place % (self.model.len() as u64 - u64::from(len));
        if is_atomic {
            // The halves meet in the middle of a page.
            within = within / 8 * 8;
        }
        let room = self.peer.next % 64 * ROOM;
        let bytes = within as usize..within as usize + len as usize;
        let (np, expected) = match op {
            0 | 1 => (NpOp::Read, Expected::Bytes(room, self.model[bytes].to_vec())),
            2 | 3 => {
                let fresh: Vec<u8> = (0..len).map(|at| (at as u64 * 7 + place) as u8).collect();
                self.peer.memory.write(room as usize, &fresh);
                self.model[bytes].copy_from_slice(&fresh);
                (NpOp::Write, Expected::Written)
            }
            _ => {
                let word: [u8; 8] = self.model[bytes.clone()].try_into().expect("a word");
                let old = u64::from_le_bytes(word);
                let (np, new) = match op {
                    4 => (NpOp::FetchAdd(place), old.wrapping_add(place)),
                    _ => (NpOp::CompareSwap { expect: old, swap: place }, place),
                };
                self.model[bytes].copy_from_slice(&new.to_le_bytes());
                (np, Expected::Old(old))
            }
        };
        let mut wr = self.peer.wr(np, self.first + within, room, len);
        wr.signaled = signaled || !matches!(expected, Expected::Written);
        wr.order = NpOrder { before: order == 0, after: order == 1 };
        if wr.signaled {
            self.expected.insert(wr.id, expected);
        }
        self.peer.peer.post(wr).expect("posted");
    }

    fn take(&mut self, done: &[NpCompletion]) {
        for done in done {
            assert_eq!(done.status, NpStatus::Success);
            match self.expected.remove(&done.id).expect("it was signaled, and is done once") {
                Expected::Written => {}
                Expected::Old(old) => assert_eq!(done.old, old),
                Expected::Bytes(room, bytes) => {
                    let mut found = vec![0; bytes.len()];
                    self.peer.memory.read(room as usize, &mut found);
                    assert!(found == bytes, "a READ found what was not there");
                }
            }
        }
    }
}

fn walk(steps: &[Step], seed: u64, translation: Translation) {
    let network = SimNetwork::new(translation);
    let (region, _) = region(PAGES);
    let owner: Arc<dyn Device> = network.device();
    let target = NpTarget::new(&owner, region.clone(), PagedAccess::ReadWrite).expect("target");
    let endpoint = Endpoint::Tcp { host: "sim".into(), port: 1 };
    let listener = target.domain().listen(&endpoint).expect("listen");
    let pumped = target.clone();
    sim::set_pump(move || {
        let accepted = listener.accept().is_ok_and(|incoming| pumped.accept(incoming).is_ok());
        pumped.step() || accepted
    });
    // The halves meet in the middle of a page.
    let middle = PAGES * PAGE / 2 + 1000;
    let mut halves = [(0, middle), (middle, PAGES * PAGE)].map(|(first, end)| {
        let device: Arc<dyn Device> = Arc::new(Stepped(network.device()));
        let peer = NpPeer::connect(&device, &endpoint, Served::settings()).expect("connected");
        let model = vec![0; (end - first) as usize];
        Half { peer: Peer::new(peer), first, model, expected: HashMap::new() }
    });
    let evicted = region.clone();
    let mut at = seed;
    before_each(Some(Box::new(move || {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Now one page, now all, now none.
        match at >> 61 {
            0 => (0..PAGES).for_each(|page| drop(evicted.evict_page(page))),
            1..=4 => drop(evicted.evict_page((at >> 20) % PAGES)),
            5 => evicted.bring_in((at >> 20) % PAGES * PAGE, 1).expect("in"),
            _ => {}
        }
    })));
    for step in steps {
        match *step {
            Step::Post { peer, op, place, len, signaled, order } => {
                halves[peer].post(op, place, len, signaled, order)
            }
            Step::Poll(peer) => {
                let mut done = Vec::new();
                halves[peer].peer.peer.poll(&mut done, usize::MAX);
                halves[peer].take(&done);
            }
            Step::Serve => drop(target.step()),
            Step::Evict(page) => drop(region.evict_page(page).expect("evicted")),
            Step::Own { place, len } => {
                // No request of this part is under way only at the end; a page's bytes are those of either.
                let mut found = vec![0; len];
                region.read(place % (PAGES * PAGE - len as u64), &mut found).expect("read");
            }
        }
    }
    for half in &mut halves {
        let done = half.peer.peer.drain();
        half.take(&done);
        assert!(half.expected.is_empty(), "all that was signaled is done");
    }
    before_each(None);
    for half in &halves {
        let mut found = vec![0; half.model.len()];
        region.read(half.first, &mut found).expect("read");
        assert!(found == half.model, "a change was lost");
    }
    sim::clear_pump();
}

proptest! {
    #[test]
    fn nothing_is_lost_or_made_up(steps in prop::collection::vec(step(), 1..120), seed in any::<u64>()) {
        walk(&steps, seed, Translation::Target);
    }

    /// As over `shm`: the initiator's end of the link says whether pages were there.
    #[test]
    fn nor_where_the_initiator_looks_pages_up(steps in prop::collection::vec(step(), 1..120), seed in any::<u64>()) {
        walk(&steps, seed, Translation::Initiator);
    }
}
