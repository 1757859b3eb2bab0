//! Checks of the server's own state against the design's invariants: frames hold the bytes of their pages, no pool page is in two files, the free
//! space is the space that no extent names, and the metadata's records agree with each other.

use super::world::World;
use cuttlefs_common::ids::{PAGE_SIZE, PoolPage};
use cuttlefs_common::rdma::WindowId;
use cuttlefs_common::region::ResidencyTable;
use cuttlefs_server::meta::{Meta, Survey};
use std::collections::BTreeMap;

/// Checks a server while no request runs.
pub fn check(world: &World, pool_pages: u64) {
    world.with_server(|server| {
        let server = server.server();
        assert_eq!(server.meta.damage_count(), 0);
        assert_eq!(server.files.pages().figures().leaked_frames, 0);
        assert_eq!(server.files.pages().figures().counts.rotten_pages, 0);
        let table = ResidencyTable::over(server.files.window(WindowId::Residency));
        let frames = server.files.window(WindowId::Frames);
        let mut owners = BTreeMap::new();
        for page in 0..pool_pages {
            let entry = table.load(PoolPage(page));
            if !entry.is_resident() {
                continue;
            }
            let frame = entry.frame();
            let other = owners.insert(frame, page);
            assert_eq!(other, None, "pool page {page} and another are both in frame {frame}");
            if entry.is_dirty() || entry.is_changing() {
                continue;
            }
            let mut bytes = vec![0; PAGE_SIZE];
            frames.read(frame.0 as usize * PAGE_SIZE, &mut bytes);
            assert!(bytes == world.peek(page), "the clean frame {frame} is not what pool page {page} holds");
        }
    });
    check_records(world, pool_pages);
}

/// Checks the metadata, as fsck does. Returns the number of pages that extents name.
pub fn check_records(world: &World, pool_pages: u64) -> u64 {
    let store = world.store();
    let (_, hash_key) = Meta::identity(store.as_ref()).expect("a formatted store");
    let survey = Survey::of(store.as_ref(), hash_key, pool_pages).expect("memory can be read");
    assert!(survey.problems.is_empty(), "{:?}", survey.problems);
    survey.extents.iter().map(|(_, extent)| extent.len_pages).sum()
}
