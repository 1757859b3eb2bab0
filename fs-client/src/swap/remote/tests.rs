use super::*;
use cuttlefs_common::odrp::{JoinOptions, MemoryNode, NodeOptions};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Endpoint};
use std::sync::Arc;

#[test]
fn no_operation_is_under_way_behind_one_that_was_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
    let options = NodeOptions { budget: 100, ..NodeOptions::new(20) };
    let at = Endpoint::Unix(directory.path().join("node"));
    let node = MemoryNode::start(&device, &at, options).expect("a node");
    let mut pages = RemotePages::join(&device, &node.endpoint(), JoinOptions { pages: 100 }).expect("joined");
    let (old, new) = ([1; PAGE], [2; PAGE]);
    let stored: Vec<(u64, &Bytes)> = (0..10).map(|page| (page, &old)).collect();
    Remote::store(&mut pages, &stored).expect("there is room");
    for round in 0..50 {
        // Mapped stores have a connection of their own, and these are posted behind more unmapped ones than the node has pages for.
        let fresh = (50..62).map(|page| (page, &new));
        let all: Vec<(u64, &Bytes)> = fresh.chain((0..10).map(|page| (page, &new))).collect();
        assert!(matches!(Remote::store(&mut pages, &all), Err(RemoteError::Empty)), "round {round}");
        let again = Remote::store(&mut pages, &stored);
        assert!(again.is_ok(), "round {round}: {}", again.expect_err("an error"));
        assert_eq!(*Remote::load(&mut pages, 3).expect("loaded"), old);
        pages.forget(&(50..62).collect::<Vec<_>>()).expect("given back");
        assert_eq!((pages.stored(), node.figures().free), (10, 10), "round {round}");
    }
}
