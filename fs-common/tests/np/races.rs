//! Many initiators on the same pages, over all links at once, and an owner that evicts all the time.

use super::*;
use cuttlefs_common::world::Random as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const PAGES: u64 = 96;
/// Bytes that belong to one writer; blocks of all writers lie side by side in each page.
const BLOCK: u64 = 64;
const STEPS: u64 = 1500;

/// The owner's device serves all links.
struct Crowd {
    region: Arc<NpRegion>,
    servers: Vec<NpServer>,
    _dir: tempfile::TempDir,
}

fn crowd() -> Crowd {
    let dir = tempfile::tempdir().expect("dir");
    let (region, _) = region(PAGES);
    let serve = |link| {
        NpServer::start(&device(), region.clone(), PagedAccess::ReadWrite, &endpoint(link, &dir))
            .expect("served")
    };
    let servers = LINKS.map(serve).into();
    Crowd { region, servers, _dir: dir }
}

impl Crowd {
    fn peer(&self, number: u64) -> Peer {
        let endpoint = self.servers[number as usize % LINKS.len()].endpoint();
        Peer::new(NpPeer::connect(&device(), &endpoint, Served::settings()).expect("connected"))
    }

    /// Evicts pages at random until told to stop.
    fn evict(&self, stop: &AtomicBool) {
        let random = SeededRandom::new(1);
        while !stop.load(Ordering::Relaxed) {
            self.region.evict_page(random.next_u64() % PAGES).expect("evicted");
            thread::yield_now();
        }
    }
}

/// A word says where it is and who wrote it.
fn word(offset: u64, writer: u64, count: u64) -> u64 {
    ((offset / 8) << 40) | ((writer + 1) << 32) | count
}

#[test]
fn no_word_is_lost_torn_or_misplaced() {
    const WRITERS: u64 = 6;
    let crowd = crowd();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let evicting = scope.spawn(|| crowd.evict(&stop));
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn({
                    let crowd = &crowd;
                    move || write_and_read(crowd, writer, WRITERS)
                })
            })
            .collect();
        let expected: Vec<Vec<u64>> =
            writers.into_iter().map(|writer| writer.join().expect("writer")).collect();
        stop.store(true, Ordering::Relaxed);
        evicting.join().expect("evictor");
        let mut found = [0; 8];
        for (index, offset) in (0..PAGES * PAGE).step_by(8).enumerate() {
            crowd.region.read(offset, &mut found).expect("read");
            let writer = offset / BLOCK % WRITERS;
            assert_eq!(u64::from_le_bytes(found), expected[writer as usize][index], "at {offset}");
        }
    });
    let figures = crowd.region.figures();
    assert!(figures.evictions > 100 && figures.major_faults > 100, "{figures:?}");
}

/// Writes own blocks and reads ranges of all. Returns the words that it has written last, of the whole region.
fn write_and_read(crowd: &Crowd, writer: u64, writers: u64) -> Vec<u64> {
    let random = SeededRandom::new(100 + writer);
    let mut peer = crowd.peer(writer);
    let mut own = vec![0u64; (PAGES * PAGE / 8) as usize];
    let memory = peer.memory.clone();
    for count in 1..=STEPS {
        if random.next_u64().is_multiple_of(2) {
            // Up to sixteen blocks at once.
            let blocks = 1 + random.next_u64() % 16;
            for number in 0..blocks {
                // The next one's place must not depend on the last one's: blocks of one post may overlap.
                let block = random.next_u64() % (PAGES * PAGE / BLOCK / writers) * writers + writer;
                let offset = block * BLOCK;
                if offset + BLOCK > PAGES * PAGE {
                    continue;
                }
                let at = number * BLOCK;
                for index in 0..BLOCK / 8 {
                    let value = word(offset + index * 8, writer, count << 8 | number);
                    memory.write((at + index * 8) as usize, &value.to_le_bytes());
                    own[(offset / 8 + index) as usize] = value;
                }
                let mut wr = peer.wr(NpOp::Write, offset, at, BLOCK as u32);
                wr.signaled = random.next_u64().is_multiple_of(3);
                peer.peer.post(wr).expect("posted");
            }
        } else {
            let len = 8 * (1 + random.next_u64() % 1500);
            let offset = random.next_u64() % ((PAGES * PAGE - len) / 8) * 8;
            let found = peer.read(offset, len as usize);
            for (index, bytes) in found.chunks_exact(8).enumerate() {
                let at = offset + 8 * index as u64;
                let value = u64::from_le_bytes(bytes.try_into().expect("a word"));
                if at / BLOCK % writers == writer {
                    assert_eq!(value, own[(at / 8) as usize], "writer {writer} lost its word at {at}");
                } else {
                    let of = (at / BLOCK % writers, at / 8);
                    assert!(
                        value == 0 || ((value >> 32 & 0xff) - 1, value >> 40) == of,
                        "{value:#x} is at {at}"
                    );
                }
            }
        }
        assert!(peer.peer.drain().iter().all(|done| done.status == NpStatus::Success));
    }
    own
}

#[test]
fn concurrent_atomics_add_up() {
    const PEERS: u64 = 6;
    const ADDS: u64 = 400;
    let crowd = crowd();
    let stop = AtomicBool::new(false);
    let swapped = AtomicU64::new(0);
    thread::scope(|scope| {
        let evicting = scope.spawn(|| crowd.evict(&stop));
        let adders: Vec<_> = (0..PEERS)
            .map(|number| {
                scope.spawn({
                    let (crowd, swapped) = (&crowd, &swapped);
                    move || {
                        let mut peer = crowd.peer(number);
                        for step in 0..ADDS {
                            let offset = step % 8 * 3 * PAGE + 16;
                            assert_eq!(peer.run(NpOp::FetchAdd(1), offset, 8).status, NpStatus::Success);
                            let old = peer.run(NpOp::CompareSwap { expect: step, swap: step + 1 }, 8, 8).old;
                            swapped.fetch_add(u64::from(old == step), Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        adders.into_iter().for_each(|adder| adder.join().expect("adder"));
        stop.store(true, Ordering::Relaxed);
        evicting.join().expect("evictor");
    });
    let word = |offset| {
        let mut found = [0; 8];
        crowd.region.read(offset, &mut found).expect("read");
        u64::from_le_bytes(found)
    };
    let sum: u64 = (0..8).map(|place| word(place * 3 * PAGE + 16)).sum();
    assert_eq!(sum, PEERS * ADDS);
    assert_eq!(word(8), swapped.load(Ordering::Relaxed), "each swap that somebody saw is one step");
}
