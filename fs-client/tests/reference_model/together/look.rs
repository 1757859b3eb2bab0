//! Reads the state of the file system, to find which of several models it agrees with.

use super::super::model::{MOST_CLIENTS, Model};
use super::super::site::Site;
use super::super::walk::{CALLER, READ, list, open_how, read_all, status};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::attr::{Attr, FileKind, Timestamp};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::SeekFor;
use cuttlefs_common::status::Status;
use std::collections::{BTreeMap, BTreeSet};

/// The client that looks.
const LOOKER: usize = 0;

/// An inode as a client sees it.
struct Seen {
    attr: Attr,
    /// The change counter of a file at its open.
    change: u64,
    bytes: Vec<u8>,
    /// The pages that are not holes. `None` if this was not asked for.
    data: Option<BTreeSet<u64>>,
    entries: BTreeMap<Vec<u8>, InodeNo>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Reads an inode. With `closely` also which of its pages have data.
fn look(volume: &RemoteVolume, ino: InodeNo, closely: bool) -> Result<Seen, Status> {
    let attr = status(volume.get_attr(&CALLER, ino))?;
    let (bytes, entries, xattrs) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    let mut seen = Seen { attr, change: 0, bytes, data: None, entries, xattrs };
    match attr.kind {
        FileKind::File => {
            let open = status(volume.open(&CALLER, ino, open_how(READ)))?;
            seen.bytes = read_all(volume, open.handle, 0, attr.size + 10).expect("it is open for reading");
            if closely {
                let seek = |at, what| status(volume.seek(&CALLER, open.handle, at, what));
                let (mut at, mut data) = (0, BTreeSet::new());
                while let Ok(start) = seek(at, SeekFor::Data) {
                    at = seek(start, SeekFor::Hole)?;
                    data.extend(start / PAGE_SIZE_U64..at.div_ceil(PAGE_SIZE_U64));
                }
                seen.data = Some(data);
            }
            volume.release(open.handle);
            seen.change = open.change;
        }
        FileKind::Directory => seen.entries = list(volume, ino, 1000, false)?,
        _ => {}
    }
    let names = status(volume.list_xattr(&CALLER, ino))?;
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        seen.xattrs.insert(name.to_vec(), status(volume.get_xattr(&CALLER, ino, name))?);
    }
    Ok(seen)
}

/// Says why a model disagrees with what was read. Updates the model's knowledge of times and cached pages, as each look does.
fn disagrees(model: &mut Model, ino: InodeNo, seen: &Result<Seen, Status>, now: Timestamp) -> Option<String> {
    let (nlink, node) = match (model.nodes.contains_key(&ino), seen) {
        (false, Err(Status::Stale)) => return None,
        (false, Err(status)) => return Some(format!("inode {ino}: {status}")),
        (false, Ok(_)) => return Some(format!("inode {ino} is still there")),
        (true, _) => (model.nlink(ino), model.node_mut(ino)),
    };
    let seen = match seen {
        Ok(seen) => seen,
        Err(status) => return Some(format!("inode {ino}: {status}")),
    };
    let attr = &seen.attr;
    let allocated_bytes = node.contents.pages.len() as u64 * PAGE_SIZE_U64;
    let real = (attr.kind, attr.mode, attr.gid, attr.nlink, attr.size, attr.allocated_bytes);
    let wanted = (node.kind, node.mode, node.gid, nlink, node.size(), allocated_bytes);
    if real != wanted {
        return Some(format!("inode {ino}: kind, mode, group, links, size, space: {real:?}, not {wanted:?}"));
    }
    if seen.entries != node.entries {
        return Some(format!("inode {ino}: names {:?}, not {:?}", seen.entries, node.entries));
    }
    if seen.xattrs != node.xattrs {
        return Some(format!("inode {ino}: other attributes"));
    }
    if seen.bytes != node.contents.bytes {
        let at = seen.bytes.iter().zip(&node.contents.bytes).position(|(real, wanted)| real != wanted);
        return Some(format!("inode {ino}: other bytes from {at:?} on"));
    }
    let has_data = |(page, has): (&u64, &bool)| (*has && page * PAGE_SIZE_U64 < attr.size).then_some(*page);
    let data: BTreeSet<u64> = node.contents.pages.iter().filter_map(has_data).collect();
    if seen.data.as_ref().is_some_and(|seen| *seen != data) {
        return Some(format!("inode {ino}: pages with data {:?}, not {data:?}", seen.data));
    }
    if node.kind == FileKind::File && !node.more.opened(LOOKER, seen.change) {
        return Some(format!(
            "inode {ino}: the change counter does not tell that somebody else has changed it"
        ));
    }
    let times = (node.mtime, node.ctime);
    if !node.mtime.check(attr.mtime, now) || !node.ctime.check(attr.ctime, now) {
        return Some(format!("inode {ino}: times {:?}, {:?}, not {times:?}", attr.mtime, attr.ctime));
    }
    None
}

/// Returns the one of `states` that agrees with the file system. `None` if several that differ agree: only the number of allocated pages shows, and
/// not which pages of zeros are allocated.
pub fn single_out(site: &impl Site, states: Vec<Model>) -> Result<Option<Model>, Vec<String>> {
    let made: Vec<InodeNo> = states.iter().flat_map(|model| model.made.iter().copied()).collect();
    let made: BTreeSet<_> = made.into_iter().collect();
    let closely = states.len() > 1;
    let seen: Vec<_> = made.into_iter().map(|ino| (ino, look(site.client(LOOKER), ino, closely))).collect();
    let now = site.now();
    let (mut left, mut why): (Vec<Model>, Vec<String>) = (Vec::new(), Vec::new());
    for mut model in states {
        match seen.iter().find_map(|(ino, seen)| disagrees(&mut model, *ino, seen, now)) {
            None => left.push(model),
            Some(reason) => why.push(reason),
        }
    }
    let Some((first, others)) = left.split_first_mut() else { return Err(why) };
    // No client can see which cached pages are stale, nor which changes are unsynced. Take pages as stale only if all models say so, because stale
    // pages must be thrown away; take changes as unsynced if any model says so, because unsynced changes are synced before they are handed over.
    for other in others {
        for (ino, node) in &mut first.nodes {
            let other = other.nodes.get_mut(ino).expect("they agree about what is there");
            for client in 0..MOST_CLIENTS {
                node.more.stale_for[client] &= other.more.stale_for[client];
                node.more.unsynced_by[client] |= other.more.unsynced_by[client];
            }
            (other.more.stale_for, other.more.unsynced_by) = (node.more.stale_for, node.more.unsynced_by);
            if node.contents.pages != other.contents.pages {
                return Ok(None);
            }
        }
    }
    Ok(Some(left.swap_remove(0)))
}
