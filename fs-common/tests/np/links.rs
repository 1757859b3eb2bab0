//! What accesses do, over each link.

use super::*;
use cuttlefs_common::np::{NpError, Status};
use cuttlefs_common::rdma::{Capabilities, CompletionQueue, FileTarget, ProtectionDomain, RdmaError};

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64).wrapping_mul(31).wrapping_add(seed * 7 + 1) as u8 | 1).collect()
}

#[test]
fn what_was_written_is_read_wherever_the_page_is() {
    for link in LINKS {
        let served = Served::new(link, 256);
        let mut peer = served.peer();
        assert_eq!(peer.peer.region_len(), 256 * PAGE);
        assert_eq!(served.region.figures().resident, 0, "nothing was touched");
        assert_eq!(peer.read(100 * PAGE - 8, 16), [0; 16], "{link:?}");
        // Eight times what fits into its frames, with ranges of all kinds: inline, in one piece, in several.
        let lens = [1usize, 8, 1000, 1024, 1025, 4096, 5000, 70_000, 200_000];
        let mut places = Vec::new();
        let mut offset = 3;
        for round in 0..9u64 {
            for len in lens {
                if offset + len as u64 > 256 * PAGE {
                    break;
                }
                let bytes = pattern(round, len);
                peer.write(offset, &bytes);
                places.push((offset, bytes));
                offset += len as u64;
            }
        }
        for _ in 0..2 {
            for (offset, bytes) in &places {
                assert!(peer.read(*offset, bytes.len()) == *bytes, "{link:?} {offset} {}", bytes.len());
                let mut own = vec![0; bytes.len()];
                served.region.read(*offset, &mut own).expect("read");
                assert!(own == *bytes);
            }
        }
        let (region, peer) = (served.region.figures(), peer.peer.figures());
        assert!(region.major_faults > 100 && region.written > 100 && region.resident <= 32, "{region:?}");
        assert!(
            peer.read_faults > 5 && peer.write_faults > 5 && peer.asked_at_once > 50,
            "{link:?} {peer:?}"
        );
        assert_eq!(served.server.figures().breaches, 0);
    }
}

/// A device that has verbs, and cannot look pages up, as RNICs are.
struct Plain(Arc<dyn Device>);

impl Device for Plain {
    fn name(&self) -> &str {
        "plain"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { paged_memory: false, ..self.0.capabilities() }
    }
    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        self.0.alloc_pd()
    }
    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        self.0.create_cq(depth)
    }
    fn set_file_target(&self, target: Arc<dyn FileTarget>) {
        self.0.set_file_target(target);
    }
}

fn serves_by_messages(device: &Arc<dyn Device>, link: LinkKind) {
    let served = Served::by(device, link, 256, PagedAccess::ReadWrite);
    let mut peer = served.peer_by(device, Served::settings());
    assert!(!peer.peer.is_optimistic());
    // Eight times what fits into its frames.
    for turn in 0..2 {
        for page in (0..256).step_by(3) {
            let bytes = pattern(page + turn, 5000);
            if page < 254 {
                peer.write(page * PAGE + 7, &bytes);
                assert!(peer.read(page * PAGE + 7, 5000) == bytes, "{link:?} {page}");
            }
        }
    }
    assert!(peer.read(0, 1 << 19).iter().any(|byte| *byte != 0));
    peer.write(8, &7u64.to_le_bytes());
    assert_eq!(peer.run(NpOp::FetchAdd(5), 8, 8).status, NpStatus::Success);
    assert_eq!(peer.read(8, 8), 12u64.to_le_bytes());
    let figures = peer.peer.figures();
    assert_eq!((figures.one_sided, figures.entry_reads, figures.read_faults), (0, 0, 0), "{figures:?}");
    assert!(served.region.figures().major_faults > 100);
    assert_eq!(served.server.figures().breaches, 0);
    let readers = Served::by(device, link, 16, PagedAccess::Read);
    let mut reader = readers.peer_by(device, Served::settings());
    assert_eq!(reader.read(0, 100), [0; 100]);
    let wr = reader.wr(NpOp::Write, 0, 0, 8);
    assert!(matches!(reader.peer.post(wr), Err(NpError::ReadOnly)));
}

#[test]
fn an_rnic_that_cannot_look_pages_up_serves_by_messages() {
    for link in LINKS {
        let device: Arc<dyn Device> = Arc::new(Plain(device()));
        serves_by_messages(&device, link);
    }
}

/// Over a real RNIC (scripts/vm/rdma-test.sh).
#[cfg(feature = "verbs")]
#[test]
#[ignore = "wants an RNIC"]
fn over_rdma_a_region_is_served_by_messages() {
    use cuttlefs_common::rdma::verbs_provider::VerbsDevice;
    let endpoint = Endpoint::Rdma { host: rdma_host(), port: 0, via: None };
    let device: Arc<dyn Device> = VerbsDevice::to_listen(&endpoint, TcpSecurity::Insecure).expect("an RNIC");
    serves_by_messages(&device, LinkKind::Rdma);
}

#[test]
fn resident_pages_need_no_processor() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut peer = served.peer();
        for page in 0..16 {
            peer.write(page * PAGE, &pattern(page, 4096));
        }
        // The first uses were a streak of faults, which ends with a try.
        for _ in 0..8 {
            peer.read(0, 8);
        }
        let (asked, before) = (served.server.figures().requests, peer.peer.figures());
        for round in 0..3 {
            for page in 0..16 {
                let bytes = pattern(page + round, 4096);
                peer.write(page * PAGE, &bytes);
                assert!(peer.read(page * PAGE, 4096) == bytes);
            }
        }
        assert_eq!(served.server.figures().requests, asked, "{link:?}");
        assert_eq!(peer.peer.figures().one_sided - before.one_sided, 96, "{:?}", peer.peer.figures());
    }
}

#[test]
fn writes_that_are_not_signaled_are_checked_with_the_next_that_is() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut peer = served.peer();
        served.region.bring_in(0, 8 * PAGE).expect("in");
        for page in 0..8 {
            peer.read(page * PAGE, 8);
        }
        let before = peer.peer.figures();
        peer.memory.write(0, &pattern(1, 8 * 512));
        for at in 0..8u64 {
            // Eight in one page, two of them of a page that is gone.
            let mut wr = peer.wr(NpOp::Write, at * 512, at * 512, 512);
            wr.signaled = at == 7;
            peer.peer.post(wr).expect("posted");
        }
        assert_eq!(peer.peer.drain().len(), 1);
        assert!(peer.read(0, 4096) == pattern(1, 4096));
        let after = peer.peer.figures();
        assert!(after.entry_reads - before.entry_reads <= 9, "{link:?}: one READ checks neighbours");
        // Of pages that follow each other, out of order, one of them gone meanwhile.
        for page in 0..8 {
            peer.write(page * PAGE, &[1; 8]);
        }
        served.region.evict_page(5).expect("evicted");
        peer.memory.write(0, &pattern(2, 40_000));
        let before = peer.peer.figures();
        for at in [0u64, 1, 2, 4, 3, 5, 6, 7] {
            let mut wr =
                peer.wr(NpOp::Write, at * PAGE + 100, at * 5000, 5000 - 1000 * (at & 1) as u32 - 1500);
            wr.signaled = at == 7;
            peer.peer.post(wr).expect("posted");
        }
        assert_eq!(peer.peer.drain().len(), 1);
        for at in 0..8u64 {
            let len = 5000 - 1000 * (at & 1) as usize - 1500;
            let mut wanted = vec![0; len];
            peer.memory.read(at as usize * 5000, &mut wanted);
            let mut found = vec![0; len];
            served.region.read(at * PAGE + 100, &mut found).expect("read");
            assert!(found == wanted, "{link:?} {at}");
        }
        assert!(peer.peer.figures().entry_reads - before.entry_reads <= 5, "{link:?}");
        // What nobody signals is checked by a drain.
        served.region.evict_page(0).expect("evicted");
        let mut wr = peer.wr(NpOp::Write, 5, 0, 100);
        wr.signaled = false;
        peer.peer.post(wr).expect("posted");
        assert_eq!(peer.peer.drain(), []);
        assert!(peer.read(5, 100) == pattern(2, 100), "{link:?}");
    }
}

#[test]
fn one_read_checks_the_signaled_writes_of_a_doorbell_to_pages_that_follow_each_other() {
    let served = Served::new(LinkKind::Tcp, 64);
    served.region.bring_in(0, 16 * PAGE).expect("in");
    let mut peer = served.peer();
    for page in 0..16 {
        peer.write(page * PAGE, &[1; 8]);
    }
    let orders: [[u64; 16]; 2] =
        [std::array::from_fn(|at| at as u64), std::array::from_fn(|at| at as u64 * 7 % 16)];
    // READs of entries: one a doorbell, one for 40 KiB; of pages that do not follow each other one each.
    for (order, len, reads) in [(0, 100, 1), (0, 2048, 1), (0, 4096, 2), (1, 100, 16), (0, 100, 1)] {
        let before = peer.peer.figures();
        let bytes = pattern(before.one_sided, 16 * 4096);
        peer.memory.write(0, &bytes);
        let gone = before.one_sided % 16;
        served.region.evict_page(gone).expect("evicted");
        let requests: Vec<NpWr> =
            orders[order].iter().map(|page| peer.wr(NpOp::Write, page * PAGE, page * PAGE, len)).collect();
        assert_eq!(peer.peer.post_all(requests).expect("posted"), 16);
        let done = peer.peer.drain();
        assert!(done.len() == 16 && done.iter().all(|done| done.status == NpStatus::Success), "{done:?}");
        let after = peer.peer.figures();
        assert_eq!(after.entry_reads - before.entry_reads, reads, "{len} B in order {order}");
        // The one whose page was gone is asked for, and no other.
        assert_eq!(
            (after.calls - before.calls, after.write_faults - before.write_faults),
            (1, 1),
            "{after:?}"
        );
        let mut found = vec![0; len as usize];
        for page in 0..16 {
            served.region.read(page * PAGE, &mut found).expect("read");
            assert!(found == bytes[page as usize * 4096..][..len as usize], "{len} B at page {page}");
        }
        // So that its entry is known again.
        peer.write(gone * PAGE, &[1; 8]);
    }
    // One alone is not waited for.
    let before = peer.peer.figures();
    let wr = peer.wr(NpOp::Write, 0, 0, 100);
    peer.peer.post(wr).expect("posted");
    assert_eq!((peer.peer.drain().len(), peer.peer.figures().entry_reads - before.entry_reads), (1, 1));
}

#[test]
fn data_that_looks_like_the_signature_is_read_all_the_same() {
    let served = Served::new(LinkKind::Tcp, 64);
    let mut peer = served.peer();
    let mut bytes = vec![0; 3 * 4096];
    served.region.signature().fill(0, &mut bytes);
    peer.write(PAGE, &bytes);
    for (offset, len) in [(PAGE, 4096), (PAGE + 17, 4096), (2 * PAGE + 1, 1), (PAGE, 3 * 4096)] {
        let from = (offset - PAGE) as usize;
        assert!(peer.read(offset, len) == bytes[from..from + len]);
    }
    // With the WRITE these are five faults in a row.
    assert_eq!((peer.peer.figures().read_faults, peer.peer.figures().asked_at_once), (3, 1));
}

#[test]
fn an_initiator_that_looks_pages_up_needs_no_signature_and_no_entries() {
    let served = Served::new(LinkKind::Shm, 128);
    served.region.bring_in(0, 32 * PAGE).expect("in");
    let mut peer = served.peer();
    // Bytes that look like the signature, over many pages; signaled, and not.
    let mut bytes = vec![0; 20 * 4096];
    served.region.signature().fill(0, &mut bytes);
    peer.write(0, &bytes);
    assert!(peer.read(0, bytes.len()) == bytes);
    assert!(peer.read(4095, 2) == bytes[4095..4097]);
    let figures = peer.peer.figures();
    assert_eq!((figures.one_sided, figures.calls, figures.entry_reads), (3, 0, 0));
    for at in 0..10u64 {
        let mut wr = peer.wr(NpOp::Write, at * PAGE, at * PAGE + 1, 4096);
        wr.signaled = at == 9;
        peer.peer.post(wr).expect("posted");
    }
    assert_eq!(peer.peer.drain().len(), 1);
    assert_eq!((peer.peer.figures().calls, peer.peer.figures().entry_reads), (0, 0), "posts tell");
    // One of the pages is gone: its access alone is asked for.
    served.region.evict_page(5).expect("evicted");
    peer.memory.write(0, &pattern(1, 10 * 4096));
    for at in 0..10u64 {
        let mut wr = peer.wr(NpOp::Write, at * PAGE, at * PAGE, 4096);
        wr.signaled = at & 1 == 1;
        peer.peer.post(wr).expect("posted");
    }
    assert_eq!(peer.peer.drain().len(), 5);
    let before = peer.peer.figures();
    // A READ behind the one that met it; and those that come behind that before anybody polls have one each, so that they are done in order.
    assert_eq!((before.calls, before.entry_reads), (1, 5), "{before:?}");
    let mut found = vec![0; 10 * 4096];
    served.region.read(0, &mut found).expect("read");
    assert!(found == pattern(1, 10 * 4096));
    // Of several pages that one WRITE meets the entries tell which is gone, and only that part is asked for.
    served.region.evict_page(5).expect("evicted");
    peer.write(3 * PAGE + 7, &pattern(2, 4 * 4096));
    let after = peer.peer.figures();
    assert_eq!((after.calls, after.entry_reads - before.entry_reads), (2, 3), "{after:?}");
    served.region.read(3 * PAGE + 7, &mut found[..4 * 4096]).expect("read");
    assert!(found[..4 * 4096] == pattern(2, 4 * 4096));
    served.region.write(0, &pattern(1, 10 * 4096)).expect("written");
    // The same for READs; those beside it find data that looks like the signature, and need not ask.
    served.region.write(PAGE, &bytes[..4096]).expect("written");
    served.region.evict_page(5).expect("evicted");
    for at in [5u64, 1, 2] {
        let wr = peer.wr(NpOp::Read, at * PAGE, at * PAGE, 4096);
        peer.peer.post(wr).expect("posted");
    }
    assert_eq!(peer.peer.drain().len(), 3);
    assert_eq!(peer.peer.figures().read_faults, 1, "{:?}", peer.peer.figures());
    for at in [1usize, 2, 5] {
        let mut found = [0; 4096];
        peer.memory.read(at * 4096, &mut found);
        let wanted = if at == 1 {
            bytes[..4096].to_vec()
        } else {
            pattern(1, 10 * 4096)[at * 4096..][..4096].to_vec()
        };
        assert!(found[..] == wanted, "{at}");
    }
}

#[test]
fn where_posts_tell_of_their_end_completions_wait_in_the_peer() {
    let served = Served::new(LinkKind::Shm, 64);
    served.region.bring_in(0, 8 * PAGE).expect("in");
    let mut peer = served.peer_with(NpSettings { depth: 4, ..Served::settings() });
    // The first access may have to wait until this end knows the region.
    peer.read(0, 8);
    peer.memory.write(0, &pattern(1, 4096));
    let write = peer.wr(NpOp::Write, 0, 0, 4096);
    // It waits for the WRITE, whose end the same post finds out.
    let read = NpWr { order: NpOrder::STRICT, ..peer.wr(NpOp::Read, 0, 8192, 4096) };
    let silent = NpWr { signaled: false, ..peer.wr(NpOp::Write, PAGE, 0, 100) };
    let gone = peer.wr(NpOp::Read, 9 * PAGE, 0, 8);
    assert_eq!(peer.peer.post_all([write, read, silent]).expect("posted"), 3);
    assert_eq!(peer.peer.outstanding(), 2, "two completions");
    assert_eq!(peer.peer.post_all([gone, write]).expect("posted"), 2);
    assert!(matches!(peer.peer.post(write), Err(NpError::Full(4))), "two completions, and two accesses");
    let mut out = Vec::new();
    assert_eq!(peer.peer.poll(&mut out, 1), 1);
    out.extend(peer.peer.drain());
    let ids: Vec<u64> = out.iter().map(|done| done.id).collect();
    assert_eq!(ids[..2], [write.id, read.id]);
    assert_eq!(ids.len(), 4);
    let mut found = [0; 4096];
    peer.memory.read(8192, &mut found);
    assert!(found[..] == pattern(1, 4096));
    served.region.read(PAGE, &mut found[..100]).expect("read");
    assert!(found[..100] == pattern(1, 4096)[..100]);
}

#[test]
fn a_streak_of_faults_asks_the_owner_at_once_until_a_try_finds_its_page() {
    for link in LINKS {
        let served = Served::new(link, 128);
        let mut peer = served.peer();
        for page in 0..40 {
            assert_eq!(peer.read(page * PAGE, 8), [0; 8], "{link:?}");
        }
        let faulted = peer.peer.figures();
        // After four faults each eighth is tried.
        assert_eq!((faulted.read_faults, faulted.asked_at_once, faulted.calls), (8, 32, 40), "{link:?}");
        let pages: Vec<u64> = (64..80).collect();
        for page in &pages {
            served.region.write(page * PAGE, &pattern(*page, 4096)).expect("written");
        }
        for page in &pages {
            assert!(peer.read(page * PAGE, 4096) == pattern(*page, 4096));
        }
        let found = peer.peer.figures();
        assert!(found.one_sided - faulted.one_sided >= 8, "{link:?} {found:?}");
        for page in &pages {
            peer.write(page * PAGE, &pattern(page + 1, 2000));
        }
        assert_eq!(peer.peer.figures().calls, found.calls, "{link:?}: the streak is over");
    }
}

#[test]
fn the_owner_can_be_asked_for_everything() {
    for link in LINKS {
        let served = Served::new(link, 128);
        let mut peer = served.peer_with(NpSettings { optimistic: false, ..Served::settings() });
        for len in [1, 1024, 5000, 300_000] {
            peer.write(77, &pattern(len as u64, len));
            assert!(peer.read(77, len) == pattern(len as u64, len), "{link:?} {len}");
        }
        assert_eq!((peer.peer.figures().one_sided, peer.peer.figures().calls), (0, 16), "{link:?}");
    }
}

#[test]
fn atomics_are_done_once() {
    for link in LINKS {
        let served = Served::new(link, 64);
        let mut peer = served.peer();
        for round in 0..20 {
            assert_eq!(peer.run(NpOp::FetchAdd(3), 8, 8).old, round * 3);
            served.region.evict_page(0).expect("evicted");
        }
        assert_eq!(peer.run(NpOp::CompareSwap { expect: 1, swap: 9 }, 8, 8).old, 60, "{link:?}");
        assert_eq!(peer.run(NpOp::CompareSwap { expect: 60, swap: 9 }, 8, 8).old, 60);
        assert_eq!(served.region.fetch_add(8, 1).expect("added"), 9);
    }
}

#[test]
fn what_cannot_be_is_refused_before_it_is_posted() {
    let served = Served::new(LinkKind::Unix, 64);
    let mut peer = served.peer();
    let local = LOCAL_LEN as u64;
    for (op, offset, at, len) in [
        (NpOp::Read, 64 * PAGE, 0, 1),
        (NpOp::Write, 64 * PAGE - 1, 0, 2),
        (NpOp::Read, u64::MAX, 0, 2),
        (NpOp::Read, 0, local - 1, 2),
        (NpOp::Read, 0, 0, 0),
        (NpOp::Read, 0, 0, (1 << 20) + 1),
        (NpOp::FetchAdd(1), 4, 0, 8),
        (NpOp::FetchAdd(1), 0, 0, 4),
    ] {
        let wr = peer.wr(op, offset, at, len);
        assert!(matches!(peer.peer.post(wr), Err(NpError::Range { .. })), "{op:?} {offset} {at} {len}");
    }
    let many = (0..65).map(|_| peer.wr(NpOp::Read, 0, 0, 1)).collect::<Vec<_>>();
    assert!(matches!(peer.peer.post_all(many), Err(NpError::Full(64))));
    assert_eq!(peer.peer.drain().len(), 64);
    let read_only = Served::with(LinkKind::Tcp, 64, PagedAccess::Read);
    let mut peer = read_only.peer();
    let wr = peer.wr(NpOp::Write, 0, 0, 1);
    assert!(matches!(peer.peer.post(wr), Err(NpError::ReadOnly)));
    assert_eq!(peer.read(0, 1), [0]);
}

#[test]
fn a_device_that_fails_takes_nothing_with_it() {
    let served = Served::new(LinkKind::Tcp, 128);
    let mut peer = served.peer();
    for page in 0..128 {
        peer.write(page * PAGE, &pattern(page, 4096));
    }
    (0..128).for_each(|page| drop(served.region.evict_page(page)));
    served.backing.fail_reads(5, true);
    assert_eq!(peer.run(NpOp::Read, 5 * PAGE + 1, 9).status, NpStatus::Refused(Status::Device));
    assert_eq!(peer.run(NpOp::Write, 5 * PAGE + 1, 9).status, NpStatus::Refused(Status::Device));
    assert_eq!(peer.run(NpOp::FetchAdd(1), 5 * PAGE, 8).status, NpStatus::Refused(Status::Device));
    assert!(peer.read(6 * PAGE, 4096) == pattern(6, 4096), "other pages are fine");
    served.backing.fail_reads(5, false);
    assert!(peer.read(5 * PAGE, 4096) == pattern(5, 4096), "nothing was changed");
    // A page that the device does not take stays where it is.
    peer.write(7 * PAGE, &pattern(99, 4096));
    served.backing.fail_writes(7, true);
    assert!(served.region.evict_page(7).is_err());
    for page in 0..128 {
        let seed = if page == 7 { 99 } else { page };
        assert!(peer.read(page * PAGE, 4096) == pattern(seed, 4096), "{page}");
    }
    // None is taken: a fault fails when all have been asked.
    (0..128).for_each(|page| served.backing.fail_writes(page, true));
    let mut refused = 0;
    for page in 0..128 {
        peer.memory.write(0, &pattern(page + 1, 4096));
        refused += u32::from(peer.run(NpOp::Write, page * PAGE, 4096).status != NpStatus::Success);
    }
    assert!((96..=127).contains(&refused), "{refused}");
    (0..128).for_each(|page| served.backing.fail_writes(page, false));
    peer.write(0, &pattern(3, 4096));
}

#[test]
fn an_owner_that_is_slow_is_waited_for_and_one_that_is_gone_is_not() {
    let served = Served::new(LinkKind::Unix, 64);
    let mut peer = served.peer();
    peer.write(0, &[7; 100]);
    served.region.evict_page(0).expect("evicted");
    served.backing.set_delay(Duration::from_millis(200));
    assert_eq!(peer.read(0, 100), [7; 100]);
    let wr = peer.wr(NpOp::Read, 0, 0, 100);
    drop(served);
    let posted = peer.peer.post(wr);
    let done = peer.peer.drain();
    assert!(posted.is_err() || done.iter().all(|done| done.status == NpStatus::Disconnected));
    let wr = peer.wr(NpOp::Read, 0, 0, 100);
    let again = peer.peer.post(wr).is_err() || peer.peer.drain()[0].status == NpStatus::Disconnected;
    assert!(again);
}
