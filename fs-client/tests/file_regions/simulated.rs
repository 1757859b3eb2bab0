//! The same over the simulated RNIC, with a server that is killed and loses its power.

use super::program::Program;
use super::world::{World, WorldConfig, endpoint};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rdma::WcStatus;
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::rpc::{Request, SyncScope};
use cuttlefs_common::status::Status;

fn requests(world: &World) -> u64 {
    world.with_server(|server| server.server().counters.rpc().map(|(_, count)| count).sum())
}

#[test]
fn what_was_synced_is_there_after_a_kill_and_what_was_not_is_lost_whole() {
    for (seed, power) in [(1, false), (2, true), (3, false), (4, true)] {
        let world = World::new(WorldConfig::new(seed, Translation::Target, 4096, 256));
        let mut program = Program::start_by(world.network().device(), &endpoint(), 1);
        let opened = program.create(b"file", 0o644);
        let (ino, key) = (opened.attr.ino, opened.filekey);
        program.write(key, 0, false, &[7; 5000]).expect("written");
        program.done(&Request::Sync(SyncScope::All)).expect("durable");
        let bound = program.bind(key, (0, 5000), super::program::BOTH, 0).expect("bound");
        assert_eq!(program.write_at(key, 0, b"no"), Err(WcStatus::RemoteAccess));
        program.grant(key, 0, 8 * PAGE_SIZE_U64).expect("granted");
        let before = requests(&world);
        program.write_at(key, 4095, b"kept").expect("granted");
        assert_eq!(program.append(key, &[8; 6000]), Ok(5000));
        let known = u64::from_le_bytes([7; 8]);
        assert_eq!(program.swap(key, 16, known, 9), Ok(known));
        assert_eq!(program.add(key, 16, 1), Ok(9));
        assert_eq!(requests(&world), before, "no request was needed");
        program.done(&Request::Sync(SyncScope::Inode(ino))).expect("durable");
        let kept = program.read_at(key, 0, 20_000).expect("reads");
        assert_eq!((kept.len(), &kept[4095..4099], kept[16]), (11_000, b"kept".as_slice(), 10));
        program.write_at(key, 4095, b"lost").expect("granted");
        assert_eq!(program.append(key, &[9; 9000]), Ok(11_000));
        assert_eq!(program.read_at(key, 4095, 4).expect("reads"), b"lost");
        if power {
            world.lose_power()
        } else {
            world.kill()
        }
        world.start();
        program.connect().expect("attached");
        let again = program.reclaim(&opened).filekey;
        let bound_again = Request::BindAgain { filekey: again, key: bound };
        assert_eq!(program.bound(&bound_again), Ok(bound));
        program.done(&Request::Recovered { unanswered: vec![] }).expect("recovered");
        assert_eq!(program.fetch(key, 0, 4), Err(Status::Stale), "a filekey of the life before");
        // A whole page may have been written back before the power went, as any write without a sync may.
        let found = program.fetch(again, 0, 16_000).expect("reads");
        assert_eq!(found.len(), kept.len(), "no hole, and no part of the append");
        let is_whole =
            found == kept || power && found[..4095] == kept[..4095] && found[4099..] == kept[4099..];
        assert!(is_whole, "seed {seed}");
        assert_eq!(program.write_at(again, 0, b"no"), Err(WcStatus::RemoteAccess), "grants do not come back");
        let part = program.open_region(&bound.to_string()).expect("opened").filekey;
        assert_eq!(program.fetch(part, 0, 100).expect("inside"), kept[..100]);
        program.grant(again, 0, 8 * PAGE_SIZE_U64).expect("granted anew");
        assert_eq!(program.append(again, b"more"), Ok(kept.len() as u64));
    }
}
