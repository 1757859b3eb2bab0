//! Paths of inodes, for people who are told of an inode by its number.
//!
//! Records have a directory's parent, and not the names of an inode. So all entries are read once for each level. Only fsck does that, for a pool at
//! rest.

use super::key::{self, tag};
use super::record;
use super::store::{Direction, Store, StoreError};
use cuttlefs_common::ids::InodeNo;
use std::collections::{BTreeMap, BTreeSet};

/// Levels that are climbed. The path of a deeper inode begins there.
const LEVELS_MAX: usize = 256;

/// A path of each inode that can be reached from the root, with `/` between its parts. If an inode has several names, it is any of them.
///
/// # Errors
/// If the store cannot be read.
pub fn paths(
    store: &dyn Store,
    wanted: &BTreeSet<InodeNo>,
) -> Result<BTreeMap<InodeNo, Vec<u8>>, StoreError> {
    let mut names: BTreeMap<InodeNo, (InodeNo, Vec<u8>)> = BTreeMap::new();
    let mut ahead = wanted.clone();
    ahead.remove(&InodeNo::ROOT);
    for _ in 0..LEVELS_MAX {
        if ahead.is_empty() {
            break;
        }
        let all = key::all(tag::ENTRY);
        let mut parents = BTreeSet::new();
        store.scan(&all.from, &all.to, Direction::Forward, &mut |key, value| {
            // Damaged records are reported elsewhere.
            let (Some((parent, _)), Ok(bucket)) = (key::parse_bucket(key), record::parse_bucket(value))
            else {
                return true;
            };
            for entry in bucket.entries.iter().filter(|entry| ahead.contains(&entry.ino)) {
                names.entry(entry.ino).or_insert_with(|| {
                    parents.insert(parent);
                    (parent, entry.name.to_vec())
                });
            }
            true
        })?;
        parents.retain(|parent| *parent != InodeNo::ROOT && !names.contains_key(parent));
        ahead = parents;
    }
    Ok(wanted.iter().filter_map(|ino| Some((*ino, path(&names, *ino)?))).collect())
}

/// The path of an inode; `None` if it has no name.
fn path(names: &BTreeMap<InodeNo, (InodeNo, Vec<u8>)>, ino: InodeNo) -> Option<Vec<u8>> {
    let mut parts = Vec::new();
    let mut at = ino;
    // A damaged pool may have directories that form a loop.
    while let Some((parent, name)) = names.get(&at).filter(|_| parts.len() <= LEVELS_MAX) {
        parts.push(name.as_slice());
        at = *parent;
    }
    let start: &[u8] = if at == InodeNo::ROOT { b"" } else { b"..." };
    parts.push(start);
    parts.reverse();
    (ino == InodeNo::ROOT || parts.len() > 1).then(|| parts.join(&b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_up_to_the_root() {
        let name = |parent: u64, name: &str| (InodeNo(parent), name.as_bytes().to_vec());
        let names = BTreeMap::from([
            (InodeNo(5), name(InodeNo::ROOT.0, "a")),
            (InodeNo(6), name(5, "b c")),
            (InodeNo(8), name(77, "lost")),
            (InodeNo(9), name(10, "x")),
            (InodeNo(10), name(9, "y")),
        ]);
        let shown = |ino| path(&names, InodeNo(ino)).map(|path| String::from_utf8(path).expect("UTF-8"));
        assert_eq!(shown(6).as_deref(), Some("/a/b c"));
        assert_eq!(shown(8).as_deref(), Some(".../lost"));
        assert_eq!(shown(7), None);
        assert!(shown(9).is_some_and(|path| path.starts_with("...")), "a ring has an end");
    }
}
