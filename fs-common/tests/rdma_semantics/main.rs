//! The verbs' semantics, one suite over every provider and link: the software RNIC's (`shm`, `tcp` with keys and without, `unix`), the simulated RNIC, and
//! in a virtual machine an RNIC. `suite!` below says which tests run where; `abilities` says which of them have nothing to test over which link.

use cuttlefs_common::ids::{FileKey, QpNumber, Rkey};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, FileAtomic,
    FileRead, FileTarget, FileValue, FileWrite, LinkKind, Listener, MemoryRegion, PostError,
    ProtectionDomain, QpConfig, QpState, QueuePair, RdmaError, RecvWr, RegionOwner, Remote, SGES_MAX, SendOp,
    SendWr, Sge, SgeList, SharedReceiveQueue, WcStatus, WindowId, WrId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

mod abilities;
mod access;
mod draining;
mod files;
mod flush;
mod pair;
mod queues;
mod ranges;
mod shared;
mod windows;

use abilities::{Ability, abilities_are_as_expected, has};
use access::{
    access_errors, deregistered_memory_is_gone, discarded_memory_is_still_the_regions,
    many_registrations_stay_reachable, refused, silent_failure_is_heard, what_is_no_dma_buf_is_refused,
};
use draining::{
    a_receive_whose_memory_was_let_go_of_takes_nothing, reads_into_memory_that_was_let_go_of_end,
    writes_to_memory_that_was_let_go_of_are_refused,
};
use files::{
    an_atomic_is_of_one_aligned_word, files_are_changed_by_atomics_and_appends, files_are_read_by_the_engine,
    files_are_written_where_the_target_takes_it, windows_are_mapped_read_only,
};
use flush::{
    a_connection_that_ends_forgets_its_flush, a_failed_device_fails_its_flush,
    a_flush_comes_after_earlier_writes_and_holds_up_completions_only,
    a_flush_waits_for_messages_without_a_place, a_refusal_waits_for_the_flush_before_it,
    a_region_says_how_far_it_is_flushed, a_target_that_closed_takes_no_flush, flush_errors,
    flushes_stand_among_other_requests, messages_are_flushed_where_they_land, real_devices_persist,
    the_owners_bytes_are_not_the_peers,
};
use pair::{Half, Pair, bad, endpoint, join, join_as, next_of, ok, options, send};
use queues::{
    a_burst_larger_than_the_link_arrives, a_hundred_on_one_queue, a_poll_has_its_room,
    a_queue_takes_its_depth_whatever_the_provider_does_beside, close_flushes_and_the_peer_notices,
    message_too_long, messages_wait_for_receives, ping_pong_loses_no_wake_up, queues_are_bounded,
    short_and_long_requests_of_one_doorbell_keep_their_order, two_threads_post_to_one_queue_pair,
    what_is_before_a_refused_request_is_done, what_is_inline_is_copied_by_the_post,
};
use ranges::{
    a_message_fills_ranges_as_far_as_it_goes, a_word_in_two_ranges_is_not_torn, lengths_of_ranges_add_up,
    one_bad_range_spoils_its_request, several_ranges_are_one_string_of_bytes, too_many_ranges_are_no_request,
    what_is_inline_is_gathered_by_the_post,
};
use shared::{
    a_broken_queue_pair_leaves_shared_receives, a_dry_shared_queue_lets_messages_wait,
    a_message_too_long_breaks_only_its_queue_pair, queue_pairs_share_receives,
    receives_of_a_queue_pair_that_is_gone_come_back, shared_receives_have_several_ranges,
};
use windows::{
    a_window_is_of_one_queue_pair, a_window_opens_its_range, a_window_opens_nothing_else,
    a_window_that_is_dropped_opens_nothing, an_invalidated_window_opens_nothing,
    what_cannot_be_bound_breaks_its_queue_pair,
};

const PATIENCE: Duration = Duration::from_secs(10);
const MEMORY_LEN: usize = 2 << 20;

fn send_and_receive(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |client, server| {
        [vec![client.receive(100, 0, 64)], vec![server.receive(200, 4096, 64), server.receive(201, 8192, 64)]]
    });
    let hello = pair.client.put(1000, b"hello");
    pair.c()
        .post_send(&[send(1, SendOp::Send, hello), send(2, SendOp::SendImm(77), Sge::EMPTY)])
        .expect("post");
    ok(pair.client.next(), 1, CompletionKind::Send, 5);
    ok(pair.client.next(), 2, CompletionKind::Send, 0);
    ok(pair.server.next(), 200, CompletionKind::Recv, 5);
    let imm = pair.server.next();
    ok(imm, 201, CompletionKind::RecvWithImm, 0);
    assert_eq!(imm.imm, Some(77));
    assert_eq!(pair.server.bytes(4096, 5), b"hello");
    pair.s().post_send(&[send(3, SendOp::Send, pair.server.put(0, b"world!"))]).expect("post");
    ok(pair.client.next(), 100, CompletionKind::Recv, 6);
    assert_eq!(pair.client.bytes(0, 6), b"world!");
}

fn one_sided(link: LinkKind) {
    let pair = Pair::new(link);
    let (client, server) = (&pair.client, &pair.server);
    for len in [1u32, 4096, 70_000, 1 << 20] {
        let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        server.put(512, &bytes);
        pair.c()
            .post_send(&[send(1, SendOp::Read(server.place(512)), client.mr.sge(64, len))])
            .expect("post");
        ok(client.next(), 1, CompletionKind::Read, len);
        assert!(client.bytes(64, len as usize) == bytes);
        let back: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        pair.c()
            .post_send(&[send(2, SendOp::Write(server.place(512)), client.put(64, &back))])
            .expect("post");
        ok(client.next(), 2, CompletionKind::Write, len);
        assert!(server.bytes(512, len as usize) == back);
    }
    // And the server reads and writes the client's memory.
    client.put(0, b"of the client");
    pair.s().post_send(&[send(3, SendOp::Read(client.place(0)), server.mr.sge(0, 13))]).expect("post");
    let driver = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while driver.load(Ordering::Relaxed) {
                client.cq.wait(Duration::from_millis(5));
                client.cq.poll(&mut Vec::new(), 0);
            }
        });
        ok(server.next(), 3, CompletionKind::Read, 13);
        pair.s()
            .post_send(&[send(4, SendOp::Write(client.place(100)), server.put(0, b"pushed"))])
            .expect("post");
        ok(server.next(), 4, CompletionKind::Write, 6);
        driver.store(false, Ordering::Relaxed);
    });
    assert_eq!(client.bytes(100, 6), b"pushed");
}

fn write_imm_and_atomics(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| [vec![], vec![server.receive(9, 0, 64)]]);
    let (client, server) = (&pair.client, &pair.server);
    let data = client.put(0, b"data");
    pair.c().post_send(&[send(1, SendOp::WriteImm(server.place(4096), 5), data)]).expect("post");
    ok(client.next(), 1, CompletionKind::Write, 4);
    let arrived = server.next();
    ok(arrived, 9, CompletionKind::RecvWithImm, 4);
    assert_eq!(arrived.imm, Some(5));
    assert_eq!(server.bytes(4096, 4), b"data");
    server.put(8, &7u64.to_le_bytes());
    let swap = |expect, swap| SendOp::CompareSwap { remote: server.place(8), expect, swap };
    let old = client.mr.sge(64, 8);
    for (op, kind, before, after) in [
        (swap(7, 9), CompletionKind::CompareSwap, 7u64, 9u64),
        (swap(7, 1), CompletionKind::CompareSwap, 9, 9),
        (SendOp::FetchAdd { remote: server.place(8), add: 5 }, CompletionKind::FetchAdd, 9, 14),
    ] {
        pair.c().post_send(&[send(2, op, old)]).expect("post");
        ok(client.next(), 2, kind, 8);
        assert_eq!(client.bytes(64, 8), before.to_le_bytes());
        assert_eq!(server.bytes(8, 8), after.to_le_bytes());
    }
    pair.c().post_send(&[send(3, SendOp::FetchAdd { remote: server.place(9), add: 1 }, old)]).expect("post");
    bad(client.next(), 3, WcStatus::RemoteInvalid);
}

fn order_and_silence(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| {
        [vec![], (0..8).map(|index| server.receive(index, 65536 + index * 64, 64)).collect()]
    });
    let (client, server) = (&pair.client, &pair.server);
    let mut requests = Vec::new();
    for index in 0..8u64 {
        let local = client.put(index * 8, &index.to_le_bytes());
        let mut write = send(100 + index, SendOp::Write(server.place(0)), local);
        write.signaled = false;
        requests.push(write);
        let mut message = send(200 + index, SendOp::Send, local);
        message.signaled = index == 7;
        requests.push(message);
    }
    pair.c().post_send(&requests).expect("post");
    for index in 0..8u64 {
        ok(server.next(), index, CompletionKind::Recv, 8);
        assert_eq!(server.bytes(65536 + index as usize * 64, 8), index.to_le_bytes());
    }
    assert_eq!(server.bytes(0, 8), 7u64.to_le_bytes());
    // All requests before it were unsignaled.
    ok(client.next(), 207, CompletionKind::Send, 8);
    client.nothing();
    // Completions come in the order of the requests, and unsignaled requests give their places in the queue back.
    for round in 0..20 {
        server.post_and_forget(pair.s());
        let requests = [
            send(1, SendOp::Read(server.place(0)), client.mr.sge(4096, 4096)),
            send(2, SendOp::Write(server.place(8192)), client.mr.sge(0, 8)),
            send(3, SendOp::Send, client.mr.sge(0, 8)),
            SendWr { signaled: false, ..send(4, SendOp::Write(server.place(8192)), client.mr.sge(0, 8)) },
            send(5, SendOp::Read(server.place(0)), client.mr.sge(4096, 8)),
        ];
        pair.c().post_send(&requests).unwrap_or_else(|error| panic!("round {round}: {error}"));
        for id in [1, 2, 3, 5] {
            assert_eq!(client.next().wr_id, WrId(id));
        }
        ok(server.next(), 50, CompletionKind::Recv, 8);
    }
}

/// Lockless readers of tables rely on this: a READ never tears an aligned word, and a READ that is posted later never sees older memory. The target
/// writes in the order in which a pool page is written: odd version, bytes, even version.
fn reads_see_whole_words_in_order(link: LinkKind) {
    const VERSION: u64 = 0;
    const BYTES: u64 = 4096;
    let pair = Pair::new(link);
    let (client, server) = (&pair.client, &pair.server);
    let stop = AtomicBool::new(false);
    let over = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        let memory = server.mr.memory();
        scope.spawn(|| {
            for version in (0..u64::MAX / 2).map(|turn| turn * 2) {
                if stop.load(Ordering::Relaxed) || Instant::now() > over {
                    break;
                }
                // Both halves of the word hold the version, so that a torn word shows.
                let word = |version: u64| version << 32 | version;
                memory.store_u64(VERSION as usize, word(version + 1), Ordering::Relaxed);
                std::sync::atomic::fence(Ordering::Release);
                memory.fill(BYTES as usize, 4096, (version / 2) as u8);
                memory.store_u64(VERSION as usize, word(version + 2), Ordering::Release);
                // A pause in which a copy can be whole.
                if version % 256 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let read = |id, from, to, len| send(id, SendOp::Read(server.place(from)), client.mr.sge(to, len));
        let version_at = |offset| {
            let word = u64::from_le_bytes(client.bytes(offset, 8).try_into().expect("eight bytes"));
            assert_eq!(word >> 32, word & u64::from(u32::MAX), "a torn word");
            word & u64::from(u32::MAX)
        };
        let (mut proven, mut last) = (0, 0);
        let deadline = Instant::now() + PATIENCE;
        while proven < 500 {
            assert!(Instant::now() < deadline, "only {proven} copies could be proven");
            let requests = [read(1, VERSION, 0, 8), read(2, BYTES, BYTES, 4096), read(3, VERSION, 64, 8)];
            pair.c().post_send(&requests).expect("post");
            for id in 1..=3 {
                assert_eq!(client.next().wr_id, WrId(id));
            }
            let (before, after) = (version_at(0), version_at(64));
            assert!(last <= before && before <= after, "{last}, {before}, {after}");
            last = after;
            if before == after && before.is_multiple_of(2) && before > 0 {
                let wanted = (before / 2 - 1) as u8;
                assert!(client.bytes(BYTES as usize, 4096).iter().all(|byte| *byte == wanted), "{before}");
                proven += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn refusals_and_shutdown(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let bound = listener.endpoint();
    std::thread::scope(|scope| {
        scope.spawn(|| listener.accept().expect("accept").refuse("the pool is being checked"));
        let error = client.pd.connect(&bound, options(&client, 4, vec![])).err().expect("refused");
        assert!(
            matches!(&error, RdmaError::Refused { reason, .. } if reason.contains("being checked")),
            "{error}"
        );
    });
    assert!(matches!(server.pd.listen(&bound), Err(RdmaError::Io { .. })), "taken");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept().err());
        std::thread::sleep(Duration::from_millis(50));
        listener.close();
        assert!(matches!(waiting.join().expect("thread"), Some(RdmaError::Closed)));
    });
    drop(listener);
    assert!(client.pd.connect(&bound, options(&client, 4, vec![])).is_err());
    let other = Half::new(link, Access::ALL);
    let foreign = ConnectOptions { qp: other.config(4), receives: vec![], timeout: PATIENCE };
    let error = client.pd.connect(&bound, foreign).err().expect("refused");
    // All who open an RNIC get the same device, so there the queue is not foreign.
    assert_eq!(matches!(error, RdmaError::Unsupported(_)), link != LinkKind::Rdma, "{error}");
}

/// A server that can make no queue pair says so, in the place where others are refused.
fn who_gets_no_queue_pair_is_told_why(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let bound = listener.endpoint();
    std::thread::scope(|scope| {
        let accepting =
            scope.spawn(|| listener.accept().expect("accept").accept(server.config(0), vec![]).err());
        let error = client.pd.connect(&bound, options(&client, 4, vec![])).err().expect("refused");
        let cause = "a queue depth of 0 is not between 1 and";
        let at_server = accepting.join().expect("thread").expect("no queue pair").to_string();
        assert!(at_server.contains(cause), "{at_server}");
        assert!(matches!(&error, RdmaError::Refused { reason, .. } if reason.contains(cause)), "{error}");
    });
    // And the next one is accepted.
    let (client_qp, _server_qp, _) = join(&client, &server, &listener, 4, [vec![], vec![]]);
    assert_eq!(client_qp.state(), QpState::ReadyToSend);
}

/// The suite over every link: which tests run where. The lists are of tests that run
/// * `everywhere`;
/// * `with_time`: not over the simulated RNIC, where both ends are of one thread, nobody sleeps, and one end's end takes unpolled messages with it;
/// * `but_hardware`: over all but an RNIC, for the reasons that `rdma::verbs_provider` gives;
/// * `files`: as those, but over a simulated network whose targets translate;
/// * `software`: over the software RNIC only: their FLUSHes wait until the test goes on, and the simulated RNIC's are over with the post.
macro_rules! suite {
    (
        everywhere: $($every:ident),*; with_time: $($time:ident),*; but_hardware: $($all:ident),*; files: $($files:ident),*;
        software: $($soft:ident),* $(,)?
    ) => {
        suite!(@soft shm, super::LinkKind::Shm; $($every)* $($time)* $($all)* $($files)* $($soft)*);
        suite!(@soft tcp, super::LinkKind::Tcp; $($every)* $($time)* $($all)* $($files)* $($soft)*);
        suite!(@soft unix, super::LinkKind::Unix; $($every)* $($time)* $($all)* $($files)* $($soft)*);
        suite!(@keyed tls, super::LinkKind::Tcp; $($every)* $($time)* $($all)* $($files)* $($soft)*);
        suite!(@soft sim, super::LinkKind::Sim; $($every)* $($all)*);
        mod sim_target { $(#[test] fn $files() { super::pair::with_simulated_target(super::$files) })* }
        suite!(@hard $($every)* $($time)*);
    };
    (@soft $module:ident, $link:expr; $($name:ident)*) => {
        mod $module { $(#[test] fn $name() { super::$name($link) })* }
    };
    (@keyed $module:ident, $link:expr; $($name:ident)*) => {
        mod $module { $(#[test] fn $name() { super::pair::with_keys($link, super::$name) })* }
    };
    (@hard $($name:ident)*) => {
        #[cfg(feature = "verbs")]
        mod rdma { $(#[test] #[ignore = "wants an RNIC"] fn $name() { super::$name(super::LinkKind::Rdma) })* }
        #[cfg(feature = "verbs")]
        mod rdma_keys {
            $(#[test] #[ignore = "wants an RNIC"]
            fn $name() { super::pair::with_keys(super::LinkKind::Rdma, super::$name) })*
        }
    };
}

suite!(
    everywhere:
    abilities_are_as_expected,
    send_and_receive,
    one_sided,
    write_imm_and_atomics,
    order_and_silence,
    several_ranges_are_one_string_of_bytes,
    a_message_fills_ranges_as_far_as_it_goes,
    too_many_ranges_are_no_request,
    one_bad_range_spoils_its_request,
    lengths_of_ranges_add_up,
    a_word_in_two_ranges_is_not_torn,
    reads_see_whole_words_in_order,
    access_errors,
    silent_failure_is_heard,
    deregistered_memory_is_gone,
    discarded_memory_is_still_the_regions,
    many_registrations_stay_reachable,
    what_is_no_dma_buf_is_refused,
    message_too_long,
    messages_wait_for_receives,
    a_poll_has_its_room,
    a_queue_takes_its_depth_whatever_the_provider_does_beside,
    a_hundred_on_one_queue,
    two_threads_post_to_one_queue_pair,
    windows_are_mapped_read_only,
    flush_errors,
    flushes_stand_among_other_requests,
    a_region_says_how_far_it_is_flushed,
    the_owners_bytes_are_not_the_peers,
    a_target_that_closed_takes_no_flush,
    queue_pairs_share_receives,
    a_dry_shared_queue_lets_messages_wait,
    a_broken_queue_pair_leaves_shared_receives,
    a_message_too_long_breaks_only_its_queue_pair,
    receives_of_a_queue_pair_that_is_gone_come_back,
    shared_receives_have_several_ranges,
    a_receive_whose_memory_was_let_go_of_takes_nothing,
    reads_into_memory_that_was_let_go_of_end,
    what_is_inline_is_copied_by_the_post,
    what_is_inline_is_gathered_by_the_post,
    a_window_opens_its_range,
    a_window_opens_nothing_else,
    an_invalidated_window_opens_nothing,
    a_window_is_of_one_queue_pair,
    a_window_that_is_dropped_opens_nothing,
    what_cannot_be_bound_breaks_its_queue_pair;
    with_time:
    queues_are_bounded,
    close_flushes_and_the_peer_notices,
    ping_pong_loses_no_wake_up,
    writes_to_memory_that_was_let_go_of_are_refused,
    refusals_and_shutdown,
    who_gets_no_queue_pair_is_told_why;
    but_hardware:
    a_burst_larger_than_the_link_arrives,
    real_devices_persist;
    files:
    files_are_read_by_the_engine,
    files_are_written_where_the_target_takes_it,
    files_are_changed_by_atomics_and_appends;
    software:
    short_and_long_requests_of_one_doorbell_keep_their_order,
    what_is_before_a_refused_request_is_done,
    an_atomic_is_of_one_aligned_word,
    a_flush_comes_after_earlier_writes_and_holds_up_completions_only,
    a_failed_device_fails_its_flush,
    a_refusal_waits_for_the_flush_before_it,
    a_connection_that_ends_forgets_its_flush,
    messages_are_flushed_where_they_land,
    a_flush_waits_for_messages_without_a_place,
);

#[test]
fn listening_beyond_this_machine_needs_a_word() {
    let open = Endpoint::Tcp { host: "0.0.0.0".into(), port: 0 };
    let refused = SoftDevice::new(SoftOptions::default())
        .alloc_pd()
        .expect("a domain")
        .listen(&open)
        .err()
        .expect("refused");
    assert!(refused.to_string().contains("--insecure"), "{refused}");
    let device = SoftDevice::new(SoftOptions { tcp: TcpSecurity::Insecure, ..SoftOptions::default() });
    assert!(device.alloc_pd().expect("a domain").listen(&open).is_ok());
    let device =
        SoftDevice::new(SoftOptions { tcp: TcpSecurity::Keys(pair::keys()), ..SoftOptions::default() });
    assert!(device.alloc_pd().expect("a domain").listen(&open).is_ok());
}

#[test]
fn a_socket_left_behind_is_replaced_and_another_file_is_not() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("left.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
    let device = SoftDevice::new(SoftOptions::default());
    assert!(device.alloc_pd().expect("a domain").listen(&Endpoint::Unix(path)).is_ok());
    let file = dir.path().join("precious");
    std::fs::write(&file, "bytes").expect("write");
    assert!(device.alloc_pd().expect("a domain").listen(&Endpoint::Shm(file.clone())).is_err());
    assert_eq!(std::fs::read(&file).expect("still there"), b"bytes");
}

/// The client's READs complete as they are posted, so each poll finds a completion. The poll must look for messages in the ring all the same.
#[test]
fn who_always_finds_a_completion_hears_of_messages_over_shm() {
    let pair =
        Pair::with(LinkKind::Shm, 16, Access::ALL, |client, _| [vec![client.receive(100, 0, 64)], vec![]]);
    let (client, server) = (&pair.client, &pair.server);
    let read = || pair.c().post_send(&[send(2, SendOp::Read(server.place(512)), client.mr.sge(64, 8))]);
    // The first READ may have to wait until the client knows the region.
    read().expect("post");
    ok(client.next(), 2, CompletionKind::Read, 8);
    pair.s().post_send(&[send(1, SendOp::Send, server.put(0, b"hello"))]).expect("post");
    ok(server.next(), 1, CompletionKind::Send, 5);
    for _ in 0..1000 {
        read().expect("post");
        let mut out = Vec::new();
        assert_eq!(client.cq.poll(&mut out, 1), 1, "a completion is there before the poll");
        if out[0].kind == CompletionKind::Recv {
            return ok(out[0], 100, CompletionKind::Recv, 5);
        }
        ok(out[0], 2, CompletionKind::Read, 8);
    }
    panic!("the message was never seen");
}
