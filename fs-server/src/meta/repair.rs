//! Repairs a store's records, one problem at a time, each as one batch.
//!
//! # How it works
//! Each round is a survey and the repair of all problems of the first kind that it found: a repair may cause or end problems of later kinds. Each
//! repair reads the records as they are by then, so that one that is no longer needed does nothing. If fsck is killed, the store has whole repairs
//! only, and the next run goes on from there.
//!
//! # Failure
//! Problems that are still there after a bounded number of rounds stay, and are reported.

use super::error::MetaError;
use super::key::{self, tag};
use super::name::{HashKey, SLOTS_PER_BUCKET};
use super::problem::{Detail, Problem, ProblemKind};
use super::record::{self, BucketRecord, BytesRecord, CounterRecord, EntryRecord, ExtentRecord, InodeRecord};
use super::store::{Batch, Store};
use super::survey::Survey;
use super::view::View;
use super::written::Written;
use cuttlefs_common::attr::{FileKind, InodeFlags, Timestamp};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::Extent;

/// Most rounds. Each kind of problem takes one, and directories that form loops a few more.
const MOST_ROUNDS: usize = 100;
/// The directory for inodes that have no name.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// Repairs a store at rest. Returns the repaired problems, in order, and those that are left.
///
/// # Errors
/// If the store cannot be read or written.
pub fn repair(
    store: &dyn Store,
    hash_key: HashKey,
    pool_pages: u64,
    now: Timestamp,
) -> Result<(Vec<Problem>, Survey), MetaError> {
    let mut repaired = Vec::new();
    for _ in 0..MOST_ROUNDS {
        let survey = Survey::of(store, hash_key, pool_pages)?;
        let Some(first) = survey.problems.first().map(|problem| problem.kind) else {
            return Ok((repaired, survey));
        };
        let repairer = Repairer { store, view: View::of_store(store, hash_key), pool_pages, now };
        for problem in survey.problems.into_iter().filter(|problem| problem.kind == first) {
            if problem.kind == ProblemKind::PageMap {
                store.recount()?;
                repaired.push(problem);
                continue;
            }
            let batch = repairer.batch(&problem)?;
            if !batch.is_empty() {
                store.commit(batch)?;
                repaired.push(problem);
            }
        }
        store.flush()?;
    }
    Ok((repaired, Survey::of(store, hash_key, pool_pages)?))
}

/// The key of a bucket, and a name in it.
type NameAt = (Vec<u8>, Vec<u8>);

struct Repairer<'a> {
    store: &'a dyn Store,
    view: View<'a>,
    pool_pages: u64,
    now: Timestamp,
}

impl Repairer<'_> {
    fn batch(&self, problem: &Problem) -> Result<Batch, MetaError> {
        use ProblemKind as Kind;
        let mut batch = Batch::default();
        let ino = problem.ino;
        match (problem.kind, &problem.detail) {
            (Kind::BadRecord, _) if problem.key == key::NEXT_INO || problem.key == key::STARTS => {
                // A number that was never given out, because all used ones are below it.
                batch.put(key::NEXT_INO, record::encode(&CounterRecord(self.next_ino()?)));
                if problem.key == key::STARTS {
                    // Change counters must not repeat, so they go on behind the highest of any inode.
                    batch.put(key::STARTS, record::encode(&CounterRecord(self.most_changes()? >> 32)));
                }
            }
            (
                Kind::BadRecord
                | Kind::NoInode
                | Kind::StrayTarget
                | Kind::StrayExtent
                | Kind::NamedOrphan
                | Kind::StrayImage,
                _,
            ) => {
                batch.remove(problem.key.clone());
            }
            (Kind::NoRoot, _) => {
                batch.put(key::inode(InodeNo::ROOT), record::encode(&self.directory(InodeNo::ROOT)))
            }
            (Kind::NextIno, _) => batch.put(key::NEXT_INO, record::encode(&CounterRecord(self.next_ino()?))),
            (Kind::WrongBucket | Kind::Dangling, Detail::Name(name)) => {
                self.edit(&mut batch, &problem.key, &mut |entries| {
                    entries.retain(|entry| entry.name != name || entry.ino != ino);
                })?;
            }
            (Kind::WrongKind, Detail::Name(name)) => {
                let inode = self.view.inode(ino)?;
                self.edit(&mut batch, &problem.key, &mut |entries| {
                    for entry in entries.iter_mut().filter(|entry| entry.name == name) {
                        entry.kind = inode.map_or(entry.kind, |inode| inode.kind);
                    }
                })?;
            }
            (Kind::SecondParent, Detail::Name(_)) => self.one_name(&mut batch, ino)?,
            (Kind::NoTarget, _) => batch.remove(key::inode(ino)),
            (Kind::BadXattr, Detail::Name(name)) => {
                self.view.keys(&key::all_of_xattr(ino, name))?.into_iter().for_each(|key| batch.remove(key));
            }
            (
                Kind::FileOverlap | Kind::PoolOverlap | Kind::PastPool | Kind::PastEnd,
                Detail::Page(page, keeper),
            ) => {
                self.cut(&mut batch, problem, *page, *keeper)?;
            }
            (Kind::Unreachable, _) => self.rescue(&mut batch, ino)?,
            (Kind::WrongParent, Detail::Numbers(_, number)) => {
                self.change(&mut batch, ino, |inode| inode.parent = InodeNo(*number))?;
            }
            (Kind::LinkCount, Detail::Numbers(_, number)) => {
                self.change(&mut batch, ino, |inode| {
                    inode.nlink = u32::try_from(*number).unwrap_or(u32::MAX)
                })?;
            }
            (Kind::Allocated, Detail::Numbers(_, number)) => {
                self.change(&mut batch, ino, |inode| inode.allocated_pages = *number)?;
            }
            (Kind::XattrCount, Detail::Numbers(_, number)) => {
                self.change(&mut batch, ino, |inode| {
                    inode.xattrs = u32::try_from(*number).unwrap_or(u32::MAX)
                })?;
            }
            (Kind::Marks, Detail::Numbers(_, number)) => {
                self.change(&mut batch, ino, |inode| {
                    inode.flags = InodeFlags(u32::try_from(*number).unwrap_or(0));
                })?;
            }
            (kind, detail) => unreachable!("a survey gives no {kind:?} with {detail:?}"),
        }
        Ok(batch)
    }

    fn directory(&self, parent: InodeNo) -> InodeRecord {
        let time = self.now;
        InodeRecord {
            kind: FileKind::Directory,
            mode: if parent == InodeNo::ROOT { 0o755 } else { 0o700 },
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: PAGE_SIZE_U64,
            allocated_pages: 0,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            change: 1,
            parent,
            xattrs: 0,
            flags: InodeFlags::default(),
            written: Written::default(),
            name_lost: 0,
        }
    }

    fn change(
        &self,
        batch: &mut Batch,
        ino: InodeNo,
        change: impl FnOnce(&mut InodeRecord),
    ) -> Result<(), MetaError> {
        if let Some(mut inode) = self.view.inode(ino)? {
            change(&mut inode);
            batch.put(key::inode(ino), record::encode(&inode));
        }
        Ok(())
    }

    /// Visits every inode, until `visit` returns `false`.
    fn each_inode(&self, visit: &mut dyn FnMut(InodeNo, &InodeRecord)) -> Result<(), MetaError> {
        let range = key::all(tag::INODE);
        self.view.scan(&range.from, &range.to, super::store::Direction::Forward, &mut |key, value| {
            if let (Some(ino), Ok(inode)) = (key::parse_ino(key), record::parse_inode(value)) {
                visit(ino, &inode);
            }
            Ok(true)
        })
    }

    /// A number that no inode has or had, as far as the store tells.
    fn next_ino(&self) -> Result<u64, MetaError> {
        let mut next = InodeNo::ROOT.0 + 1;
        self.each_inode(&mut |ino, _| next = next.max(ino.0.saturating_add(1)))?;
        let stored = self.store.get(key::NEXT_INO)?.and_then(|value| record::parse(&value).ok());
        Ok(stored.map_or(next, |CounterRecord(stored)| stored.max(next)))
    }

    fn most_changes(&self) -> Result<u64, MetaError> {
        let mut most = 0;
        self.each_inode(&mut |_, inode| most = most.max(inode.change))?;
        Ok(most)
    }

    /// Changes the entries of a bucket. A bucket without entries is removed.
    fn edit(
        &self,
        batch: &mut Batch,
        key: &[u8],
        edit: &mut dyn FnMut(&mut Vec<EntryRecord<'_>>),
    ) -> Result<(), MetaError> {
        let Some(value) = self.store.get(key)? else { return Ok(()) };
        let mut bucket = record::parse_bucket(&value).map_err(MetaError::record(key))?;
        let before = bucket.entries.clone();
        edit(&mut bucket.entries);
        if bucket.entries.is_empty() {
            batch.remove(key);
        } else if bucket.entries != before {
            batch.put(key, record::encode(&bucket));
        }
        Ok(())
    }

    /// Removes all names of a directory but one: that in its recorded parent, or the first.
    fn one_name(&self, batch: &mut Batch, ino: InodeNo) -> Result<(), MetaError> {
        let recorded = self.view.inode(ino)?.map(|inode| inode.parent);
        let names = self.names_of(ino)?;
        let kept = if ino == InodeNo::ROOT {
            None
        } else {
            let there = names
                .iter()
                .position(|(key, _)| key::parse_bucket(key).map(|(parent, _)| parent) == recorded);
            Some(there.unwrap_or(0))
        };
        for (_, (key, name)) in names.iter().enumerate().filter(|(index, _)| Some(*index) != kept) {
            // If a bucket has two names, the later rounds edit it again.
            self.edit(batch, key, &mut |entries| {
                entries.retain(|entry| entry.ino != ino || entry.name != name)
            })?;
        }
        Ok(())
    }

    /// The names of an inode, each with its bucket.
    fn names_of(&self, ino: InodeNo) -> Result<Vec<NameAt>, MetaError> {
        let mut names = Vec::new();
        let range = key::all(tag::ENTRY);
        self.view.scan(&range.from, &range.to, super::store::Direction::Forward, &mut |key, value| {
            if let Ok(bucket) = record::parse_bucket(value) {
                let entries = bucket.entries.iter().filter(|entry| entry.ino == ino);
                names.extend(entries.map(|entry| (key.to_vec(), entry.name.to_vec())));
            }
            Ok(true)
        })?;
        Ok(names)
    }

    /// Takes pages from an extent that another one keeps, or that cannot exist.
    fn cut(&self, batch: &mut Batch, problem: &Problem, page: u64, keeper: InodeNo) -> Result<(), MetaError> {
        let ino = problem.ino;
        let Some((_, first)) = key::parse_paged(&problem.key) else { return Ok(()) };
        let Some(value) = self.store.get(&problem.key)? else { return Ok(()) };
        let extent = ExtentRecord::parse(first, &value).map_err(MetaError::record(&problem.key))?.at(first);
        // The pages of the extent that stay, counted from its first.
        let stays: Vec<(u64, u64)> = match problem.kind {
            ProblemKind::PastPool => vec![(0, self.pool_pages.saturating_sub(extent.pool_page.0))],
            ProblemKind::PastEnd => vec![(0, page.saturating_sub(first.0))],
            ProblemKind::FileOverlap => {
                let mut before = first.0;
                self.view.extents(
                    ino,
                    FilePage(0),
                    FilePage(first.0.saturating_sub(1)),
                    super::store::Direction::Forward,
                    &mut |other| {
                        before = before.max(other.file_end().0);
                        true
                    },
                )?;
                vec![(before - first.0, extent.len_pages)]
            }
            _ => {
                let mut claims = Vec::new();
                self.view.all_extents(&mut |owner, other| {
                    if (owner, other.file_page) != (ino, first) && owner == keeper {
                        claims.push((other.pool_page.0, other.pool_page.0 + other.len_pages));
                    }
                    true
                })?;
                without(extent, claims)
            }
        };
        batch.remove(problem.key.clone());
        for (from, to) in stays.into_iter().filter(|(from, to)| from < to) {
            let to = to.min(extent.len_pages);
            if from < to {
                let rest = ExtentRecord {
                    pool_page: PoolPage(extent.pool_page.0 + from),
                    len_pages: to - from,
                    state: extent.state,
                };
                batch.put(key::extent(ino, FilePage(first.0 + from)), record::encode(&rest));
            }
        }
        Ok(())
    }

    /// Gives an inode a name by which it can be found. An inode without bytes, names and entries is freed instead.
    fn rescue(&self, batch: &mut Batch, ino: InodeNo) -> Result<(), MetaError> {
        let Some(mut inode) = self.view.inode(ino)? else { return Ok(()) };
        let names = self.names_of(ino)?;
        if names.is_empty() && !inode.is_directory() && inode.nlink == 0 {
            // It lost its last name on purpose, and only the orphan's record is missing.
            batch.put(key::orphan(ino), record::encode(&BytesRecord { bytes: b"" }));
            return Ok(());
        }
        let empty = inode.is_directory() && self.view.is_empty_directory(ino)?;
        if names.is_empty() && empty && inode.nlink == 0 {
            batch.put(key::orphan(ino), record::encode(&BytesRecord { bytes: b"" }));
            return Ok(());
        }
        // Takes the inode out of a loop of directories.
        for (key, name) in &names {
            self.edit(batch, key, &mut |entries| {
                entries.retain(|entry| entry.ino != ino || entry.name != name)
            })?;
        }
        let found = match self.view.find(InodeNo::ROOT, LOST_AND_FOUND)? {
            Some(found) if found.kind == FileKind::Directory && found.ino != ino => found.ino,
            Some(_) => InodeNo::ROOT,
            None => {
                let made = InodeNo(self.next_ino()?);
                batch.put(key::NEXT_INO, record::encode(&CounterRecord(made.0 + 1)));
                batch.put(
                    key::inode(made),
                    record::encode(&InodeRecord { mode: 0o700, ..self.directory(InodeNo::ROOT) }),
                );
                self.enter(batch, InodeNo::ROOT, LOST_AND_FOUND, made, FileKind::Directory)?;
                self.change(batch, InodeNo::ROOT, |root| root.nlink += 1)?;
                made
            }
        };
        // A file may already have that name.
        let mut name = format!("#{ino}");
        while !self.enter(batch, found, name.as_bytes(), ino, inode.kind)? && name.len() < 64 {
            name.push('~');
        }
        if inode.is_directory() {
            inode.parent = found;
        }
        inode.nlink = inode.nlink.max(1);
        batch.put(key::inode(ino), record::encode(&inode));
        Ok(())
    }

    /// Adds an entry, if the name is free.
    fn enter(
        &self,
        batch: &mut Batch,
        parent: InodeNo,
        name: &[u8],
        ino: InodeNo,
        kind: FileKind,
    ) -> Result<bool, MetaError> {
        let hash = self.view.hash(name);
        let value = self.view.bucket(parent, hash)?;
        let mut bucket = match &value {
            Some(value) => {
                record::parse_bucket(value).map_err(MetaError::record(&key::bucket(parent, hash)))?
            }
            None => BucketRecord::default(),
        };
        let slot =
            (0..SLOTS_PER_BUCKET as u8).find(|slot| bucket.entries.iter().all(|entry| entry.slot != *slot));
        let Some(slot) = slot.filter(|_| bucket.entries.iter().all(|entry| entry.name != name)) else {
            return Ok(false);
        };
        bucket.entries.push(EntryRecord { slot, ino, kind, name });
        bucket.entries.sort_by_key(|entry| entry.slot);
        batch.put(key::bucket(parent, hash), record::encode(&bucket));
        Ok(true)
    }
}

/// The parts of an extent that `claims` does not cover, counted from its first page.
fn without(extent: Extent, mut claims: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    claims.sort_unstable();
    let (start, end) = (extent.pool_page.0, extent.pool_page.0 + extent.len_pages);
    let mut rest = Vec::new();
    let mut at = start;
    for (from, to) in claims.into_iter().filter(|(from, to)| *from < end && *to > start) {
        if from > at {
            rest.push((at - start, from - start));
        }
        at = at.max(to);
    }
    if at < end {
        rest.push((at - start, extent.len_pages));
    }
    rest
}
