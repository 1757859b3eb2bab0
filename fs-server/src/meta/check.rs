//! Whether a store's records agree with each other. It looks at everything and holds a few words an inode; for
//! tests, and for an offline check of a pool. It repairs nothing.

use super::error::MetaError;
use super::key::{self, tag};
use super::name::{Cookie, HashKey};
use super::record::{self, RecordError};
use super::store::{Direction, Store};
use super::view::View;
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use std::collections::{BTreeMap, BTreeSet};

/// A contradiction between records.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("inode {ino}: {what}")]
pub struct Problem {
    /// Where.
    pub ino: InodeNo,
    /// What.
    pub what: &'static str,
}

#[derive(Default)]
struct Counted {
    names: u32,
    subdirectories: u32,
    parent: Option<InodeNo>,
    pages: u64,
    xattrs: u32,
}

/// Checks a store that is at rest.
///
/// # Errors
/// If a record cannot be read or parsed.
pub fn check(store: &dyn Store, hash_key: HashKey) -> Result<Vec<Problem>, MetaError> {
    let view = View::of_store(store, hash_key);
    let mut problems = Vec::new();
    let mut problem = |ino: InodeNo, what: &'static str| problems.push(Problem { ino, what });

    let inodes = inodes(&view)?;
    let mut counted: BTreeMap<InodeNo, Counted> = BTreeMap::new();
    for parent in inodes.iter().filter(|(_, inode)| inode.is_directory()).map(|(ino, _)| *ino) {
        view.entries_after(parent, Cookie::new(0, 0), &mut |found, name| {
            if view.hash(name) != found.cookie.hash() {
                problem(parent, "an entry is in the wrong bucket");
            }
            match inodes.get(&found.ino) {
                None => problem(found.ino, "an entry names no inode"),
                Some(inode) if inode.kind != found.kind => problem(found.ino, "an entry has another type"),
                Some(_) => {}
            }
            let child = counted.entry(found.ino).or_default();
            child.names += 1;
            child.parent = Some(parent);
            if found.kind == FileKind::Directory {
                counted.entry(parent).or_default().subdirectories += 1;
            }
            Ok(true)
        })?;
    }
    let mut pool: BTreeMap<u64, (InodeNo, u64)> = BTreeMap::new();
    let mut last = (InodeNo(0), 0);
    view.all_extents(&mut |ino, extent| {
        counted.entry(ino).or_default().pages += extent.len_pages;
        if last.0 == ino && extent.file_page.0 < last.1 {
            problem(ino, "extents overlap in the file");
        }
        last = (ino, extent.file_end().0);
        if pool.insert(extent.pool_page.0, (ino, extent.len_pages)).is_some() {
            problem(ino, "extents overlap in the pool");
        }
    })?;
    let mut used_until = 0;
    for (page, (ino, len)) in pool {
        if page < used_until {
            problem(ino, "extents overlap in the pool");
        }
        used_until = page + len;
    }
    for ino in
        keys_of(&view, tag::XATTR, &|key| key::parse_xattr(key).map(|(ino, _, piece)| (ino, piece == 0)))?
    {
        counted.entry(ino).or_default().xattrs += 1;
    }
    let whole = |key: &[u8]| key::parse_ino(key).map(|ino| (ino, true));
    let orphans: BTreeSet<_> = keys_of(&view, tag::ORPHAN, &whole)?.into_iter().collect();
    let symlinks: BTreeSet<_> = keys_of(&view, tag::SYMLINK, &whole)?.into_iter().collect();
    let owners = counted.keys().chain(&orphans).chain(&symlinks);
    for ino in owners.filter(|ino| !inodes.contains_key(ino)) {
        problem(*ino, "records of an inode that is not there");
    }
    for (ino, inode) in &inodes {
        let none = Counted::default();
        let found = counted.get(ino).unwrap_or(&none);
        let names = if *ino == InodeNo::ROOT { 1 } else { found.names };
        let expected = match (inode.is_directory(), names) {
            (true, 0) => 0,
            (true, 1) => 2 + found.subdirectories,
            (true, _) => u32::MAX,
            (false, names) => names,
        };
        if inode.nlink != expected {
            problem(*ino, "the link count is wrong");
        }
        if (inode.nlink == 0) != orphans.contains(ino) {
            problem(*ino, "no names and no orphan, or the other way round");
        }
        if inode.is_directory() && names > 0 && *ino != InodeNo::ROOT && found.parent != Some(inode.parent) {
            problem(*ino, "the parent is wrong");
        }
        if inode.allocated_pages != found.pages {
            problem(*ino, "allocated pages are not those of its extents");
        }
        if inode.xattrs != found.xattrs {
            problem(*ino, "attributes are counted wrong");
        }
        if (inode.kind == FileKind::Symlink) != symlinks.contains(ino) {
            problem(*ino, "a symlink without target, or a target without symlink");
        }
        if inode.is_directory() && inode.nlink > 0 && !reaches_root(*ino, &inodes) {
            problem(*ino, "it is not below the root");
        }
    }
    Ok(problems)
}

type Inodes = BTreeMap<InodeNo, record::InodeRecord>;

fn inodes(view: &View<'_>) -> Result<Inodes, MetaError> {
    let mut inodes = BTreeMap::new();
    let range = key::all(tag::INODE);
    view.scan(&range.from, &range.to, Direction::Forward, &mut |key, value| {
        let malformed = || MetaError::record(key)(RecordError::Malformed);
        let ino = key::parse_ino(key).ok_or_else(malformed)?;
        inodes.insert(ino, record::parse_inode(value).map_err(MetaError::record(key))?);
        Ok(true)
    })?;
    Ok(inodes)
}

fn reaches_root(ino: InodeNo, inodes: &Inodes) -> bool {
    let mut at = ino;
    for _ in 0..=inodes.len() {
        match inodes.get(&at) {
            _ if at == InodeNo::ROOT => return true,
            Some(inode) => at = inode.parent,
            None => return false,
        }
    }
    false
}

/// Gives the inode of a key, and whether it is wanted; `None`: no such key.
type KeyParser<'a> = &'a dyn Fn(&[u8]) -> Option<(InodeNo, bool)>;

/// What `parse` makes of all keys of a kind, where it says `true`.
fn keys_of(view: &View<'_>, tag: u8, parse: KeyParser<'_>) -> Result<Vec<InodeNo>, MetaError> {
    let mut inos = Vec::new();
    let range = key::all(tag);
    view.scan(&range.from, &range.to, Direction::Forward, &mut |key, _| {
        let (ino, wanted) = parse(key).ok_or_else(|| MetaError::record(key)(RecordError::Malformed))?;
        if wanted {
            inos.push(ino);
        }
        Ok(true)
    })?;
    Ok(inos)
}
