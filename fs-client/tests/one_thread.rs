//! Client and server together in one thread, with all translations.

mod world;

use cuttlefs_client::file::volume::{FsError, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{NewNode, OpenBy, RenameMode, Reply, Request, Rights, Sink};
use cuttlefs_common::status::Status;
use std::sync::atomic::Ordering;
use std::time::Duration;
use world::contents::{CALLER, pattern, read};
use world::{World, WorldConfig};

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;

fn config(translation: Translation) -> WorldConfig {
    WorldConfig::new(1, translation, 4096, 64)
}

fn both(test: impl Fn(&World)) {
    for translation in Translation::ALL {
        test(&World::new(config(translation)));
    }
}

#[test]
fn what_is_written_is_read() {
    both(|world| {
        let volume = world.client();
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, READ_WRITE).expect("create");
        // More than the frames hold, so that some of it must be on SSD.
        let bytes = pattern(1 << 20, 3);
        assert_eq!(volume.write(&CALLER, file.handle, 4000, &bytes), Ok(1 << 20));
        assert_eq!(read(&volume, file.handle, 4000, 1 << 20), Ok(bytes.clone()));
        assert_eq!(read(&volume, file.handle, 0, 4000), Ok(vec![0; 4000]), "a hole reads as zeros");
        assert_eq!(read(&volume, file.handle, 4000 + (1 << 20) - 5, 100).map(|b| b.len()), Ok(5));
        assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|a| a.size), Ok(4000 + (1 << 20)));
        volume.write(&CALLER, file.handle, 5000, b"small").expect("write");
        assert_eq!(read(&volume, file.handle, 5000, 5), Ok(b"small".to_vec()));
        let set = SetAttr { size: Some(10), ..SetAttr::default() };
        volume.set_attr(&CALLER, attr.ino, set).expect("truncate");
        assert_eq!(read(&volume, file.handle, 0, 100), Ok(vec![0; 10]));
    });
}

#[test]
fn a_resident_read_costs_no_rpc() {
    both(|world| {
        let volume = world.client();
        let (_, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"hot", 0o644, true, READ_WRITE).expect("create");
        let bytes = pattern(16 * 4096, 9);
        volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
        assert_eq!(read(&volume, file.handle, 0, 16 * 4096), Ok(bytes.clone()));
        let figure = |name| volume.figures().into_iter().find(|(known, _)| *known == name).expect(name).1;
        let (before, reads) = (figure("rpc_requests"), figure("onesided_reads"));
        for page in 0..16u64 {
            let got = read(&volume, file.handle, page * 4096, 4096).expect("read");
            assert_eq!(got, bytes[page as usize * 4096..][..4096]);
        }
        assert_eq!((figure("rpc_requests"), figure("onesided_reads")), (before, reads + 16));
    });
}

/// What the page bitmap is where the target translates: a page that was on SSD at the last look around is fetched, and nothing is READ before.
#[test]
fn a_page_that_was_on_ssd_at_the_last_look_around_costs_one_request_and_no_read() {
    const PAGES: u64 = 256;
    let world = World::new(config(Translation::InitiatorByReads));
    let volume = world.client();
    let (_, file) = volume.create(&CALLER, InodeNo::ROOT, b"cold", 0o644, true, READ_WRITE).expect("create");
    let bytes = pattern(PAGES as usize * 4096, 5);
    volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
    let figure = |name| volume.figures().into_iter().find(|(known, _)| *known == name).expect(name).1;
    let figures = || ["onesided_reads", "sparse_fetches", "rpc_requests"].map(figure);
    // Reads each page, and returns how many of them took one fetch and nothing else.
    let fetched_at_once = || {
        let costs_one_fetch = |page: &u64| {
            let before = figures();
            let got = read(&volume, file.handle, page * 4096, 4096).expect("read");
            assert_eq!(got, bytes[*page as usize * 4096..][..4096], "page {page}");
            let after = figures();
            [0, 1, 2].map(|place| after[place] - before[place]) == [0, 1, 1]
        };
        (0..PAGES).filter(costs_one_fetch).count()
    };
    assert_eq!(fetched_at_once(), 0, "nothing was looked at");
    volume.look_around();
    let away = fetched_at_once();
    // There are 64 frames.
    assert!(away >= 150, "{away} of {PAGES} pages");
    // The pages of an older look are looked at.
    volume.look_around();
    volume.look_around();
    assert_eq!(fetched_at_once(), 0);
}

#[test]
fn two_clients_see_each_other() {
    both(|world| {
        let (one, two) = (world.client(), world.client());
        let (attr, file) =
            one.create(&CALLER, InodeNo::ROOT, b"shared", 0o644, true, READ_WRITE).expect("create");
        one.write(&CALLER, file.handle, 0, b"hello").expect("write");
        let other = two.open(&CALLER, attr.ino, READ_WRITE).expect("open");
        assert_eq!(read(&two, other.handle, 0, 10), Ok(b"hello".to_vec()));
        two.write(&CALLER, other.handle, 5, &pattern(100_000, 1)).expect("write");
        assert_eq!(read(&one, file.handle, 5, 100_000), Ok(pattern(100_000, 1)));
        one.unlink(&CALLER, InodeNo::ROOT, b"shared").expect("unlink");
        assert_eq!(two.lookup(&CALLER, InodeNo::ROOT, b"shared"), Err(FsError::Server(Status::NotFound)));
        assert_eq!(read(&two, other.handle, 0, 5), Ok(b"hello".to_vec()), "open files stay");
    });
}

#[test]
fn a_directory_is_moved_far_down_and_not_below_itself() {
    const LEVELS: usize = 4096;
    let world = World::new(config(Translation::Target));
    let volume = world.client();
    let make = |parent, name: &[u8]| {
        volume.make(&CALLER, parent, name, NewNode::Directory, 0o755).expect("make").ino
    };
    let rename = |from: (InodeNo, &[u8]), to: (InodeNo, &[u8]), mode| {
        volume.rename(&CALLER, from.0, from.1, to.0, to.1, mode)
    };
    let root = InodeNo::ROOT;
    let mut chain = vec![root];
    for level in 0..LEVELS + 1 {
        chain.push(make(chain[level], b"d"));
    }
    let (far, last, past) = (chain[1000], chain[LEVELS - 1], chain[LEVELS]);
    make(root, b"x");
    for (from, to) in [(root, far), (far, last), (last, root)] {
        rename((from, b"x"), (to, b"x"), RenameMode::NoReplace).expect("a move");
    }
    let too_far = rename((root, b"x"), (past, b"x"), RenameMode::NoReplace);
    assert_eq!(too_far, Err(FsError::Server(Status::NameTooLong)));
    make(far, b"y");
    rename((far, b"y"), (last, b"d"), RenameMode::Exchange).expect("both are far down");
    for (from, to) in [((root, b"d"), (last, b"e")), ((far, b"d"), (last, b"e"))] {
        let loops = rename((from.0, from.1), (to.0, to.1), RenameMode::NoReplace);
        assert_eq!(loops, Err(FsError::Server(Status::Invalid)));
    }
}

#[test]
fn space_comes_back_and_is_exact() {
    both(|world| {
        let volume = world.client();
        let free = volume.stat_fs(&CALLER).expect("statfs").free_pages;
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"big", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, file.handle, 0, &pattern(1 << 20, 0)).expect("write");
        assert_eq!(volume.stat_fs(&CALLER).expect("statfs").free_pages, free - 256);
        assert_eq!(volume.get_attr(&CALLER, attr.ino).expect("attr").allocated_bytes, 1 << 20);
        volume.unlink(&CALLER, InodeNo::ROOT, b"big").expect("unlink");
        assert_eq!(volume.stat_fs(&CALLER).expect("statfs").free_pages, free - 256, "still open");
        volume.release(file.handle);
        assert_eq!(volume.stat_fs(&CALLER).expect("statfs").free_pages, free);
        // The pool can be filled again and again, and a full pool refuses a write before it changes anything.
        for round in 0..3 {
            let (_, file) =
                volume.create(&CALLER, InodeNo::ROOT, b"fill", 0o644, true, READ_WRITE).expect("create");
            let mut offset = 0;
            let chunk = pattern(1 << 20, round);
            while volume.write(&CALLER, file.handle, offset, &chunk).is_ok() {
                offset += 1 << 20;
            }
            assert_eq!(offset, free * 4096 / (1 << 20) * (1 << 20), "round {round}");
            assert_eq!(
                read(&volume, file.handle, offset - 4096, 4096),
                Ok(chunk[(1 << 20) - 4096..].to_vec())
            );
            volume.unlink(&CALLER, InodeNo::ROOT, b"fill").expect("unlink");
            volume.release(file.handle);
            world.pass(Duration::from_secs(3));
        }
    });
}

#[test]
fn a_killed_server_comes_back_with_what_was_synced() {
    both(|world| {
        let volume = world.client();
        let (_, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"kept", 0o644, true, READ_WRITE).expect("create");
        let bytes = pattern(300_000, 5);
        volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        world.kill();
        world.start();
        // The handle stays valid: the client reclaims the file.
        assert_eq!(read(&volume, file.handle, 0, 300_000), Ok(bytes));
        volume.write(&CALLER, file.handle, 10, b"again").expect("write");
        assert_eq!(read(&volume, file.handle, 8, 9).map(|b| b[2..7].to_vec()), Ok(b"again".to_vec()));
    });
}

#[test]
fn a_sync_that_is_to_be_expected_is_made_before_it_is_asked_for() {
    both(|world| {
        let volume = world.client();
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"log", 0o644, true, READ_WRITE).expect("create");
        let ahead =
            || world.with_server(|server| server.server().counters.syncs_ahead.load(Ordering::Relaxed));
        let write = |round: u64| {
            volume.write(&CALLER, file.handle, round * 100, &pattern(100, round as u8)).expect("write");
        };
        for round in 0..3 {
            write(round);
            volume.fsync(&CALLER, file.handle, false).expect("fsync");
        }
        assert_eq!(ahead(), 1, "expected behind two that came");
        write(3);
        world.pass(Duration::from_millis(1));
        assert_eq!(ahead(), 2);
        // A sync after two writes instead of one breaks the rhythm: no sync is expected after the next write.
        write(4);
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        write(5);
        assert_eq!(ahead(), 2);
        // The client's copies go with it, so the store must have the bytes that no client asked to sync.
        for round in 0..3 {
            volume.fsync(&CALLER, file.handle, false).expect("fsync");
            write(6 + round);
        }
        world.pass(Duration::from_millis(1));
        assert_eq!(ahead(), 4);
        std::mem::forget(volume);
        world.lose_power();
        world.start();
        let other = world.client();
        let opened = other.open(&CALLER, attr.ino, READ_WRITE).expect("open");
        let expected: Vec<u8> = (0..9).flat_map(|round| pattern(100, round)).collect();
        assert_eq!(read(&other, opened.handle, 0, 1000), Ok(expected));
    });
}

#[test]
fn what_was_written_before_a_kill_is_synced_after_it() {
    both(|world| {
        let volume = world.client();
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"torn", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, file.handle, 0, &pattern(200_000, 1)).expect("write");
        let set = SetAttr { size: Some(150_000), ..SetAttr::default() };
        volume.set_attr(&CALLER, attr.ino, set).expect("truncate");
        volume.write(&CALLER, file.handle, 100_000, &pattern(30_000, 2)).expect("write");
        let append = OpenHow { append: true, ..READ_WRITE };
        let appending = volume.open(&CALLER, attr.ino, append).expect("open");
        volume.write(&CALLER, appending.handle, 0, b"the end").expect("append");
        volume.release(appending.handle);
        let mut expected = pattern(150_000, 1);
        expected[100_000..130_000].copy_from_slice(&pattern(30_000, 2));
        expected.extend_from_slice(b"the end");
        world.kill();
        world.start();
        // The server's memory is gone, and with it all changes above: the client must make them again.
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        world.kill();
        world.start();
        assert_eq!(read(&volume, file.handle, 0, 200_000), Ok(expected));
    });
}

#[test]
fn what_is_more_than_can_be_kept_waits_and_is_not_lost() {
    both(|world| {
        let volume = world.client();
        let (_, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"long", 0o644, true, READ_WRITE).expect("create");
        // The same megabyte again and again: the bound counts the bytes written, not the bytes of the file.
        let chunk = |seed| pattern(1 << 20, seed);
        for seed in 0..40 {
            volume.write(&CALLER, file.handle, 0, &chunk(seed)).expect("write");
        }
        world.kill();
        world.start();
        assert_eq!(volume.fsync(&CALLER, file.handle, false), Ok(()));
        assert_eq!(read(&volume, file.handle, 0, 1 << 20), Ok(chunk(39)));
    });
}

#[test]
fn a_short_fetch_of_pages_apart_brings_those_pages() {
    both(|world| {
        let volume = world.client();
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"apart", 0o644, true, READ_WRITE).expect("create");
        let bytes = pattern(10_000, 5);
        volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
        let session = volume.session();
        let rights = Rights { read: true, write: false };
        let open = || Request::Open { ino: attr.ino, rights, truncate: false, by: OpenBy::Name { told: 0 } };
        let take = |reply: Reply<'_>| match reply {
            Reply::Opened(opened) => Ok(opened.filekey),
            other => panic!("{other:?}"),
        };
        let filekey = session.call(&CALLER, open, take).expect("open");
        // From inside page 0: parts of pages 0, 1 and 2, and a part beyond the end.
        let (offset, len) = (100_u64, 12_000_u32);
        for wanted in [vec![0, 2], vec![1], vec![2], vec![0, 1, 2], vec![]] {
            let mut pages = PageSet::none_of_range(offset, len as usize);
            wanted.iter().for_each(|page| pages.insert(*page));
            let fetch = || Request::Fetch { filekey, offset, len, pages: pages.clone(), sink: Sink::Inline };
            let take = |reply: Reply<'_>| match reply {
                Reply::Fetched { valid_len, inline } => Ok((valid_len, inline.to_vec())),
                other => panic!("{other:?}"),
            };
            let (valid_len, inline) = session.call(&CALLER, fetch, take).expect("fetch");
            assert_eq!(valid_len, 9_900);
            let part = |page: usize| &bytes[(page * 4096).max(100)..((page + 1) * 4096).min(10_000)];
            let expected: Vec<u8> = wanted.iter().flat_map(|page| part(*page)).copied().collect();
            assert_eq!(inline, expected, "pages {wanted:?}");
        }
    });
}

#[test]
fn a_file_that_no_name_leads_to_is_opened_only_by_who_means_it() {
    both(|world| {
        let (holder, other) = (world.client(), world.client());
        let (attr, held) =
            holder.create(&CALLER, InodeNo::ROOT, b"gone", 0o644, true, READ_WRITE).expect("create");
        holder.write(&CALLER, held.handle, 0, b"old").expect("write");
        other
            .open(&CALLER, attr.ino, READ_WRITE)
            .map(|file| other.release(file.handle))
            .expect("it has a name");
        other.unlink(&CALLER, InodeNo::ROOT, b"gone").expect("unlink");
        for volume in [&holder, &other] {
            // As an open by a name that the kernel still remembers.
            let open = |how| volume.open(&CALLER, attr.ino, how).map(|file| file.handle);
            let by_name = OpenHow { told: Some(0), ..READ_WRITE };
            assert_eq!(open(by_name), Err(FsError::Server(Status::Stale)));
            let cut = OpenHow { truncate: true, ..by_name };
            assert_eq!(open(cut), Err(FsError::Server(Status::Stale)));
            assert_eq!(read(&holder, held.handle, 0, 10), Ok(b"old".to_vec()), "it was not cut");
            let again = open(READ_WRITE).expect("it is there");
            assert_eq!(read(volume, again, 0, 10), Ok(b"old".to_vec()));
            volume.release(again);
        }
    });
}
