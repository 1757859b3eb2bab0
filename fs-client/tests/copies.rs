//! Copies within a server, in one thread: each takes effect once and completely whatever is lost meanwhile, and replaces what came before it.

mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::{InodeFlags, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::life::End;
use cuttlefs_common::rdma::sim::Cut;
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use std::rc::Rc;
use std::time::Duration;
use world::contents::{CALLER, pattern, read};
use world::kinds::each_kind;
use world::{Crash, Death, World};

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const ROOT: InodeNo = InodeNo::ROOT;

/// A copy to a place beyond the end of its own source makes the file longer, so a second run of the copy would find more to copy.
#[test]
fn a_short_copy_within_a_file_is_as_short_the_second_time() {
    each_kind(|world| {
        for (cut, pass) in [(Cut::Reply, 0), (Cut::Reply, 1), (Cut::Request, 0), (Cut::Request, 1)] {
            for death in [Death::Sudden, Death::WrittenBack] {
                let volume = world.client();
                let (attr, file) =
                    volume.create(&CALLER, ROOT, b"copy", 0o644, true, READ_WRITE).expect("create");
                volume.write(&CALLER, file.handle, 0, &pattern(10_000, 0)).expect("write");
                world.kill_after(cut, pass, death);
                let copied = volume.copy_range(&CALLER, file.handle, 4_000, file.handle, 20_000, 8_000);
                assert_eq!(copied.map(|copied| copied.len), Ok(6_000), "{cut:?} after {pass}, {death:?}");
                assert!(!world.network().cut_is_pending() && world.has_died(), "{cut:?} after {pass}");
                assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size), Ok(26_000));
                assert_eq!(
                    read(&volume, file.handle, 20_000, 9_000),
                    Ok(pattern(10_000, 0)[4_000..].to_vec())
                );
                volume.release(file.handle);
                volume.unlink(&CALLER, ROOT, b"copy").expect("unlink");
                volume.shut_down();
            }
        }
    });
}

/// More than one request carries: the server copies it in five pieces.
const LARGE: usize = 1_200_000;

/// The marks forbid a copy like any other change except a write(2) through a descriptor that was open before. The kernel of a FUSE file system does
/// not check this.
#[test]
fn nothing_is_copied_to_a_file_that_may_not_change() {
    each_kind(|world| {
        for len in [3_000, LARGE] {
            for flags in [InodeFlags::IMMUTABLE, InodeFlags::APPEND_ONLY] {
                let volume = world.client();
                let copy = Copied::new(&volume, len, false);
                let ino = volume.lookup(&CALLER, ROOT, copy.target_name()).expect("lookup").ino;
                let mark = |flags| SetAttr { flags: Some(flags), ..SetAttr::default() };
                volume.set_attr(&CALLER, ino, mark(flags)).expect("marked");
                let refused = Err(FsError::Server(Status::NotPermitted));
                assert_eq!(copy.copy(&volume, len), refused, "{len} bytes, marks {flags:?}");
                assert_eq!(volume.get_attr(&CALLER, ino).map(|attr| attr.size), Ok(0));
                volume.set_attr(&CALLER, ino, mark(InodeFlags(0))).expect("not marked any more");
                assert_eq!(copy.copy(&volume, len), Ok(len as u64));
                copy.remove(&volume);
                volume.shut_down();
            }
        }
    });
}

/// A copy that was answered is there after a kill, as every answered change, and fsync says so.
#[test]
fn a_copy_is_not_lost_with_a_killed_server() {
    each_kind(|world| {
        for len in [3_000, 300_000, LARGE] {
            let volume = world.client();
            let copy = Copied::new(&volume, len, false);
            assert_eq!(volume.write(&CALLER, copy.target, copy.to_offset + 10, b"older"), Ok(5));
            assert_eq!(copy.copy(&volume, len), Ok(len as u64));
            assert_eq!(volume.write(&CALLER, copy.target, copy.to_offset + 20, b"newer"), Ok(5));
            for _ in 0..2 {
                world.kill();
                world.start();
                world.pass(Duration::from_millis(300));
            }
            let mut expected = pattern(len, 0);
            expected[20..25].copy_from_slice(b"newer");
            assert_eq!(volume.fsync(&CALLER, copy.target, false), Ok(()), "{len}");
            let there = read(&volume, copy.target, copy.to_offset, len as u32 + 1);
            assert!(there == Ok(expected), "{len}: other bytes");
            copy.remove(&volume);
            volume.shut_down();
        }
    });
}

/// A source with `len` bytes at its start, and a target with room for them: two files, or one file (`within`).
struct Copied {
    source: Handle,
    target: Handle,
    to_offset: u64,
}

impl Copied {
    fn new(volume: &RemoteVolume, len: usize, within: bool) -> Self {
        let (_, source) = volume.create(&CALLER, ROOT, b"source", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, source.handle, 0, &pattern(len, 0)).expect("write");
        if within {
            let to_offset = (len as u64).next_multiple_of(4096) + 100;
            return Self { source: source.handle, target: source.handle, to_offset };
        }
        let (_, target) = volume.create(&CALLER, ROOT, b"target", 0o644, true, READ_WRITE).expect("create");
        Self { source: source.handle, target: target.handle, to_offset: 5_000 }
    }

    fn target_name(&self) -> &'static [u8] {
        if self.source == self.target { b"source" } else { b"target" }
    }

    fn copy(&self, volume: &RemoteVolume, len: usize) -> Result<u64, FsError> {
        let copied = volume.copy_range(&CALLER, self.source, 0, self.target, self.to_offset, len as u64);
        copied.map(|copied| copied.len)
    }

    fn remove(self, volume: &RemoteVolume) {
        volume.release(self.source);
        volume.unlink(&CALLER, ROOT, b"source").expect("unlink");
        if self.source != self.target {
            volume.release(self.target);
            volume.unlink(&CALLER, ROOT, b"target").expect("unlink");
        }
    }
}

fn open(volume: &RemoteVolume, name: &[u8]) -> Handle {
    let ino = volume.lookup(&CALLER, ROOT, name).expect("lookup").ino;
    volume.open(&CALLER, ino, READ_WRITE).expect("open").handle
}

/// The deaths after which a change is there that was done and not answered.
fn deaths_that_keep_what_was_done(world: &World) -> &'static [Death] {
    if world.answers_are_durable() {
        &[Death::Sudden, Death::WrittenBack, Death::PowerLost]
    } else {
        &[Death::WrittenBack]
    }
}

/// Another client's writes to the target of a finished copy stay although the copying client asks again. Its writes to the source do not reach the
/// target.
#[test]
fn a_copy_that_was_done_is_not_done_again() {
    each_kind(|world| {
        for death in deaths_that_keep_what_was_done(world) {
            for within in [false, true] {
                let len = LARGE;
                let what = format!("{death:?}, {len} bytes, within {within}");
                let (volume, other) = (world.client(), Rc::new(world.client()));
                let copy = Copied::new(&volume, len, within);
                let to_offset = copy.to_offset;
                let [source, target] = [b"source", copy.target_name()].map(|name| open(&other, name));
                // The first reply is that of a request for the source's length.
                world.kill_after(Cut::Reply, 1, *death);
                let ahead = other.clone();
                world.behind_death(move || {
                    ahead.write(&CALLER, source, 0, b"new").expect("write");
                    ahead.write(&CALLER, target, to_offset + 50, b"mine").expect("write");
                });
                assert_eq!(copy.copy(&volume, len + 10), Ok(len as u64), "{what}");
                assert!(!world.network().cut_is_pending() && world.has_died(), "{what}");
                let mut expected = pattern(len, 0);
                expected[50..54].copy_from_slice(b"mine");
                let there = read(&volume, copy.target, to_offset, len as u32 + 100);
                assert!(there == Ok(expected), "{what}: other bytes");
                copy.remove(&volume);
                [source, target].into_iter().for_each(|handle| other.release(handle));
                volume.shut_down();
                other.shut_down();
            }
        }
    });
}

/// When the server was killed, the client makes unsynced writes from before the copy again; they must not replace the copied bytes.
#[test]
fn a_copy_is_not_lost_under_an_older_write() {
    each_kind(|world| {
        for death in deaths_that_keep_what_was_done(world) {
            for answered in [false, true] {
                let volume = world.client();
                let copy = Copied::new(&volume, 10_000, false);
                let write = |from: u64, len: usize| {
                    let written =
                        volume.write(&CALLER, copy.target, copy.to_offset + from - 10, &vec![7; len]);
                    assert_eq!(written, Ok(len as u32));
                };
                // Across the copy's start, in its midst, and across its end.
                write(0, 30);
                write(4_000, 100);
                write(10_000, 20);
                let zeros = Allocate::ZeroRange { keep_size: false };
                volume.allocate(&CALLER, copy.target, copy.to_offset + 6_000, 200, zeros).expect("zero");
                if !answered {
                    // The first reply is that of a request for the source's length.
                    world.kill_after(Cut::Reply, 1, *death);
                }
                assert_eq!(copy.copy(&volume, 10_000), Ok(10_000), "{death:?}");
                if answered {
                    if *death == Death::WrittenBack {
                        world.pass(Duration::from_secs(3));
                    }
                    if *death == Death::PowerLost {
                        world.lose_power()
                    } else {
                        world.kill()
                    }
                    world.start();
                }
                assert!(!world.network().cut_is_pending(), "{death:?}");
                let expected = [vec![7; 10], pattern(10_000, 0), vec![7; 10]].concat();
                let there = read(&volume, copy.target, copy.to_offset - 10, 20_000);
                assert!(there == Ok(expected), "{death:?}, answered {answered}: other bytes");
                copy.remove(&volume);
                volume.shut_down();
            }
        }
    });
}

/// A copy that runs out of space finds that out when a part of its bytes is already in the target.
#[test]
fn a_copy_that_ran_out_of_space_is_not_done_again() {
    each_kind(|world| {
        for death in deaths_that_keep_what_was_done(world) {
            let (volume, other) = (world.client(), Rc::new(world.client()));
            let copy = Copied::new(&volume, LARGE, false);
            let target = open(&other, b"target");
            let (_, rest) = volume.create(&CALLER, ROOT, b"rest", 0o644, true, READ_WRITE).expect("create");
            // Room for one piece of 256 KiB.
            let room = volume.stat_fs(&CALLER).expect("statfs").free_pages - 80;
            let reserve = Allocate::Reserve { keep_size: true };
            volume.allocate(&CALLER, rest.handle, 0, room * 4096, reserve).expect("reserve");
            world.kill_after(Cut::Reply, 1, *death);
            let (ahead, at) = (other.clone(), copy.to_offset + 50);
            world.behind_death(move || {
                ahead.write(&CALLER, target, at, b"mine").expect("write");
            });
            assert_eq!(copy.copy(&volume, LARGE), Ok(256 << 10), "{death:?}");
            assert!(!world.network().cut_is_pending() && world.has_died(), "{death:?}");
            let mut expected = pattern(256 << 10, 0);
            expected[50..54].copy_from_slice(b"mine");
            let there = read(&volume, copy.target, copy.to_offset, LARGE as u32);
            assert!(there == Ok(expected), "{death:?}: other bytes");
            volume.release(rest.handle);
            volume.unlink(&CALLER, ROOT, b"rest").expect("unlink");
            copy.remove(&volume);
            other.release(target);
            volume.shut_down();
            other.shut_down();
        }
    });
}

/// Between two pieces no record says that the copy was done, and unsynced pieces are lost with the server: the client then copies everything again.
/// Once the copy is answered it is there, whatever dies later.
#[test]
fn a_copy_of_several_pieces_is_whole_whenever_the_server_dies() {
    each_kind(|world| {
        let mut deaths = 0;
        for after in (0..60).step_by(2) {
            let volume = world.client();
            let copy = Copied::new(&volume, LARGE, after % 4 == 2);
            let power = world.answers_are_durable() && after % 2 == 0;
            world.crash_after(Crash { end: End { after, of: None }, power }, None);
            assert_eq!(copy.copy(&volume, LARGE), Ok(LARGE as u64), "event {after}");
            world.calm();
            deaths += u32::from(world.has_died());
            world.lose_power();
            world.start();
            let there = read(&volume, copy.target, copy.to_offset, LARGE as u32 + 1);
            assert!(there == Ok(pattern(LARGE, 0)), "event {after}: other bytes");
            assert_eq!(volume.fsync(&CALLER, copy.target, false), Ok(()), "event {after}");
            copy.remove(&volume);
            volume.shut_down();
        }
        assert!(deaths >= 10, "{deaths} deaths");
    });
}
