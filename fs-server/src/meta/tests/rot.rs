//! Bits rot in the store's files: a read returns the stored value or an error, never something else.

use super::format;
use crate::meta::{Batch, Direction, DiskOptions, DiskStore, Store};
use cuttlefs_common::world::{Random, SeededRandom};
use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

const SEEDS: u64 = 120;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

fn records(store: &dyn Store) -> Result<Records, String> {
    let mut found = Records::new();
    let scanned = store.scan(&[0], &[0xff; 20], Direction::Forward, &mut |key, value| {
        found.insert(key.to_vec(), value.to_vec());
        true
    });
    scanned.map(|()| found).map_err(|error| error.to_string())
}

fn copy(from: &Path, to: &Path) -> Vec<PathBuf> {
    fs::create_dir_all(to).expect("a directory");
    let mut files = Vec::new();
    for entry in fs::read_dir(from).expect("list") {
        let path = entry.expect("entry").path();
        let target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            files.extend(copy(&path, &target));
        } else {
            fs::copy(&path, &target).expect("copied");
            files.push(target);
        }
    }
    files
}

#[test]
fn a_flipped_bit_is_an_error_or_changes_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let whole = directory.path().join("whole");
    let expected = {
        let store = DiskStore::open(&whole, DiskOptions::default()).expect("open");
        format(&store);
        for round in 0..40u32 {
            let mut batch = Batch::default();
            (0..20u32).for_each(|at| {
                let key = format!("Z{:08}", (round * 7 + at * 13) % 500);
                batch.put(key.into_bytes(), vec![(round + at) as u8; 50 + at as usize]);
            });
            store.commit(batch).expect("commit");
            if round % 5 == 0 {
                store.flush().expect("flush");
            }
        }
        store.flush().expect("flush");
        records(&store).expect("readable")
    };
    let (mut refused, mut same) = (0, 0);
    let mut silent = Vec::new();
    for seed in 0..SEEDS {
        let random = SeededRandom::new(seed);
        let at = directory.path().join(format!("{seed}"));
        let files: Vec<_> = copy(&whole, &at)
            .into_iter()
            .filter(|path| fs::metadata(path).expect("there").len() > 0)
            .collect();
        let path = &files[random.next_u64() as usize % files.len()];
        let mut bytes = fs::read(path).expect("read");
        // The bit is in a byte that is not zero: the files are zeros for the most part.
        let used: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
        if used.is_empty() {
            continue;
        }
        let place = used[random.next_u64() as usize % used.len()];
        bytes[place] ^= 1 << (random.next_u64() % 8);
        fs::write(path, &bytes).expect("write");
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let store = DiskStore::open(&at, DiskOptions::default()).map_err(|error| error.to_string())?;
            records(&store)
        }));
        match opened {
            Ok(Ok(found)) if found == expected => same += 1,
            Ok(Ok(_)) => silent.push((seed, path.clone(), place)),
            Ok(Err(_)) | Err(_) => refused += 1,
        }
        fs::remove_dir_all(&at).expect("removed");
    }
    println!("seeds 0 to {SEEDS}: {refused} refused, {same} without effect");
    assert!(silent.is_empty(), "{silent:?}");
    assert!(refused > 0 && same > 0);
}
