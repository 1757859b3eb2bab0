//! A server whose connections share their receives, as over an RNIC, and a peer that sends more requests than a connection may have running.
//! Over the simulated RNIC, and, where there is one (scripts/vm/rdma-test.sh), over a real one.

mod raw_peer;
mod running;
mod world;

use cuttlefs_client::file::volume::{Handle, OpenHow, Volume};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::rpc::{AWAIT_LOCKS_MAX_MS, Request};
use raw_peer::Peer;
use std::sync::atomic::Ordering;
use std::time::Duration;
use world::contents::{CALLER, pattern, read};
use world::{World, WorldConfig, endpoint};

/// A request that is not answered before its time is over.
const LONG: Request<'static> = Request::AwaitLocks { hold_ms: AWAIT_LOCKS_MAX_MS };

/// One round's: more at once than there may be.
const TOO_MANY: [(u16, Request<'static>); 5] = [(1, LONG), (2, LONG), (3, LONG), (4, LONG), (5, LONG)];
/// More rounds than are needed to take all shared receives of a worker, if they did not come back.
const ROUNDS: u64 = 40;
/// Writes and reads again.
fn goes_on(volume: &impl Volume, handle: Handle, salt: u8) {
    let bytes = pattern(100, salt);
    assert_eq!(volume.write(&CALLER, handle, 0, &bytes), Ok(100));
    assert_eq!(read(volume, handle, 0, 100), Ok(bytes), "others go on");
}

fn create(volume: &impl Volume) -> Handle {
    let made = volume.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, OpenHow::READ_WRITE);
    made.expect("create").1.handle
}

fn world() -> World {
    World::new(WorldConfig::new(1, Translation::InitiatorByReads, 4096, 64))
}

fn peer_in(world: &World, secret: u8) -> Peer {
    Peer::attached(world.network().device().as_ref(), &endpoint(), secret).0
}

fn bad_messages(world: &World) -> u64 {
    world.with_server(|server| server.server().counters.bad_messages.load(Ordering::Relaxed))
}

fn connections(world: &World) -> usize {
    world.with_server(|server| server.server().admission.connections.len())
}

#[test]
fn as_many_requests_at_once_as_are_allowed_are_answered() {
    let world = world();
    let peer = peer_in(&world, 7);
    peer.post(&[(1, LONG), (2, LONG)]);
    let mut slots = [peer.answer(), peer.answer()].map(|reply| (reply.slot.0, reply.result));
    slots.sort_unstable_by_key(|(slot, _)| *slot);
    assert_eq!(slots, [(1, Ok(())), (2, Ok(()))]);
    // Both are answered, so there is room for the next.
    peer.post(&[(3, Request::Heartbeat), (4, Request::Heartbeat)]);
    assert_eq!([peer.answer(), peer.answer()].map(|reply| reply.result), [Ok(()); 2]);
    assert_eq!(bad_messages(&world), 0);
}

#[test]
fn one_request_more_at_once_ends_its_connection_and_no_receive_is_lost() {
    let world = world();
    let volume = world.client();
    let handle = create(&volume);
    let before = connections(&world);
    for round in 0..ROUNDS {
        let peer = peer_in(&world, 100 + round as u8);
        // What comes behind the third one finds its connection gone.
        peer.post(&TOO_MANY);
        peer.wait_for_end();
        assert_eq!(bad_messages(&world), round + 1);
        goes_on(&volume, handle, round as u8);
        drop(peer);
        world.pass(Duration::from_millis(100));
        assert_eq!(connections(&world), before, "nothing of it is left");
    }
}

mod rdma {
    use super::running::{serving, until};
    use super::*;
    use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
    use cuttlefs_common::rdma::soft::{SoftOptions, TcpSecurity};
    use cuttlefs_common::rdma::{Device, Endpoint, open_to_connect, open_to_listen};
    use cuttlefs_common::world::SeededRandom;
    use cuttlefs_server::pages::Hotspots;
    use cuttlefs_server::pages::policy::RegionPolicy;
    use cuttlefs_server::pool::FormatOptions;
    use cuttlefs_server::rights::ExportRule;
    use cuttlefs_server::serve::RunningServer;
    use serving::Serve;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    /// More halves of messages than a worker has receives for their sender.
    const HALVES: u8 = 70;

    fn serve() -> Serve {
        Serve {
            frames: 256,
            listen: vec![serving::rdma_endpoint()],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        }
    }

    pub(super) fn made_pool(directory: &Path) -> PathBuf {
        let pool = directory.join("pool");
        let format = FormatOptions { dir: pool.clone(), size: 16 << 20, ..FormatOptions::default() };
        serving::make_pool(&format, [4; 16]);
        pool
    }

    fn key(seed: u64) -> ClusterKey {
        ClusterKey::generate(&format!("key-{seed}"), &SeededRandom::new(seed)).expect("a key")
    }

    /// Serves the holders of these keys, all by one worker.
    pub(super) fn serve_keys(seeds: &[u64], pool: &Path) -> RunningServer {
        let listen = open_to_listen(&[serving::rdma_endpoint()], with_keys(seeds)).expect("an RNIC");
        serving::serve_with_workers(1, listen, vec![ExportRule::default()], pool, serve()).expect("start")
    }

    pub(super) fn device_with_key(seed: u64, endpoint: &Endpoint) -> Arc<dyn Device> {
        open_to_connect(endpoint, with_keys(&[seed])).expect("an RNIC")
    }

    fn with_keys(seeds: &[u64]) -> SoftOptions {
        let keys = seeds.iter().map(|seed| key(*seed)).collect();
        let tcp = TcpSecurity::Keys(ClusterKeys::new(keys).expect("keys"));
        SoftOptions { tcp, ..SoftOptions::default() }
    }

    #[test]
    #[ignore = "wants an RNIC"]
    fn one_request_more_at_once_ends_its_connection_and_no_receive_is_lost() {
        let directory = tempfile::tempdir().expect("directory");
        let pool = made_pool(directory.path());
        let running = serving::serve(&pool, serve()).expect("start");
        let endpoint = running.endpoints().remove(0);
        let volume = serving::connect(&endpoint, "honest", 2, false);
        let handle = create(&volume);
        let (counters, connections) = (&running.server().counters, &running.server().admission.connections);
        let before = connections.len();
        let device = serving::device_to(&endpoint);
        for round in 0..ROUNDS {
            let peer = Peer::attached(device.as_ref(), &endpoint, 100 + round as u8).0;
            peer.post(&TOO_MANY);
            peer.wait_for_end();
            assert_eq!(counters.bad_messages.load(Ordering::Relaxed), round + 1);
            goes_on(&volume, handle, round as u8);
            drop(peer);
            until("nothing of it is left", || connections.len() == before);
        }
        volume.shut_down();
        running.stop();
    }

    /// RNICs forget a receive whose message ends in the middle. A holder of one key, who also stays connected, does that again and again; both keys'
    /// connections have one worker.
    #[test]
    #[ignore = "wants an RNIC"]
    fn messages_that_end_in_the_middle_take_no_receive_of_others_for_good() {
        let directory = tempfile::tempdir().expect("directory");
        let pool = made_pool(directory.path());
        let running = serve_keys(&[1, 2], &pool);
        let endpoint = running.endpoints().remove(0);
        let device_of = |seed| device_with_key(seed, &endpoint);
        let volume = serving::connect_by(device_of(1), &endpoint, "honest", 2, false);
        let handle = create(&volume);
        let hostile = device_of(2);
        let stays = Peer::attached(hostile.as_ref(), &endpoint, 100);
        for round in 0..HALVES {
            let peer = Peer::connected(hostile.as_ref(), &endpoint);
            peer.post_half_a_message();
            peer.wait_for_end();
            goes_on(&volume, handle, round);
        }
        drop(stays);
        goes_on(&volume, handle, HALVES);
        let connections = &running.server().admission.connections;
        until("nothing of it is left", || {
            connections.all().iter().all(|one| one.peer().key() != &hostile_key())
        });
        // Its next connection has all receives again.
        Peer::attached(hostile.as_ref(), &endpoint, 101);
        volume.shut_down();
        running.stop();
    }

    fn hostile_key() -> PeerKey {
        PeerKey::Key("key-2".into())
    }
}

/// Not among those that `rdma-test.sh` runs: it takes more than a minute there, and wants `ulimit -n` above its thousand connections.
mod crowd {
    use super::rdma::{device_with_key, made_pool, serve_keys};
    use super::running::{serving, until};
    use super::*;

    /// An RNIC's completion queue holds only so many connections' completions: those of a worker of rdma_rxe's some 990. A holder of one key makes
    /// as many as it gets at the only worker, and others still get theirs.
    #[test]
    #[ignore = "wants an RNIC"]
    fn who_takes_all_connections_that_it_gets_leaves_some_to_others() {
        let directory = tempfile::tempdir().expect("directory");
        let pool = made_pool(directory.path());
        let running = serve_keys(&[1, 2, 3], &pool);
        let endpoint = running.endpoints().remove(0);
        let device_of = |seed| device_with_key(seed, &endpoint);
        let volume = serving::connect_by(device_of(1), &endpoint, "honest", 2, false);
        let handle = create(&volume);
        let connections = &running.server().admission.connections;
        let before = connections.len();
        let hostile = device_of(2);
        let mut all = Vec::new();
        let refusal = loop {
            match Peer::try_connected(hostile.as_ref(), &endpoint) {
                Ok(peer) => {
                    // One session, which stays.
                    peer.attach(100);
                    all.push(peer);
                }
                Err(error) => break error.to_string(),
            }
        };
        assert!(refusal.contains("this peer has its share of"), "{refusal}");
        assert!(all.len() > 64, "a mount with all lanes in use has as many, and this peer {}", all.len());
        goes_on(&volume, handle, 1);
        Peer::attached(device_of(3).as_ref(), &endpoint, 101);
        drop(all);
        until("nothing of them is left", || connections.len() == before);
        volume.shut_down();
        running.stop();
    }
}
