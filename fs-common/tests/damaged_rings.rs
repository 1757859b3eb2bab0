//! A peer over shared memory that damages its rings and goes. It is the only test of its process, whose descriptors it looks through.

use cuttlefs_common::odrp::{JoinOptions, MemoryNode, NodeOptions, RemotePages};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Endpoint};
use std::fs::{OpenOptions, read_dir, read_link};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The rings of all connections, both ends'.
fn rings() -> Vec<PathBuf> {
    let all = read_dir("/proc/self/fd").expect("descriptors").map(|entry| entry.expect("one").path());
    let are_rings =
        |path: &PathBuf| read_link(path).is_ok_and(|to| to.to_string_lossy().contains("cuttlefs-rings"));
    all.filter(are_rings).collect()
}

/// What says that a side has ended is in the rings, too: a side that believed it there kept its connection, and a thread of it span for ever.
#[test]
fn a_peer_that_damages_its_rings_is_let_go() {
    let directory = tempfile::tempdir().expect("a directory");
    let endpoint = Endpoint::Shm(directory.path().join("node.sock"));
    let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
    let lease = Duration::from_secs(600);
    let node = MemoryNode::start(&device, &endpoint, NodeOptions { lease, ..NodeOptions::new(16) });
    let node = node.expect("a node");
    for byte in [0xffu8, 1, 0xa5] {
        let mut client = RemotePages::join(&device, &endpoint, JoinOptions { pages: 16 }).expect("a client");
        client.store(3, b"bytes").expect("a store");
        let all = rings();
        assert!(all.len() >= 10, "five connections, two ends of each: {all:?}");
        for ring in all {
            let file = OpenOptions::new().write(true).open(ring).expect("its own");
            let len = file.metadata().expect("its length").len();
            file.write_all_at(&vec![byte; len as usize], 0).expect("damaged");
        }
        drop(client);
        let deadline = Instant::now() + Duration::from_secs(60);
        while node.figures().clients > 0 || !rings().is_empty() {
            assert!(Instant::now() < deadline, "{byte:#x}: {} rings are kept", rings().len());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert_eq!(node.figures().free, 16);
}
