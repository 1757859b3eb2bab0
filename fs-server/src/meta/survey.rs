//! The check whether a store's records agree with each other, for tests and for `cuttlefsd fsck`. It reads everything, repairs nothing, and goes on
//! after a record that does not parse.
//!
//! It takes some 200 bytes for each inode, 48 for each extent, and a bit or two for each page.

use super::apply::mark_of;
use super::images;
use super::key::{self, tag};
use super::name::HashKey;
use super::page_map::{NO_PAGES, PART_PAGES, PageMap, PartBits, PartKey};
use super::problem::{Detail, Problem, ProblemKind};
use super::record::{self, BytesRecord, ClientRecord, ExtentRecord, InodeRecord, RecordError, SlotRecord};
use super::store::{Direction, Store, StoreError};
use super::view::View;
use crate::acl::Acl;
use crate::bits;
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, DEFAULT_ACL_XATTR, FileKind, InodeFlags};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use std::collections::{BTreeMap, BTreeSet};

/// Checks a store at rest, without the relations that operations alone do not guarantee: the length of a file beside its extents is up to whoever
/// commits these, and the numbers of inodes up to whoever makes them. The size of the pool is not known here.
///
/// # Errors
/// If the store cannot be read.
pub fn check(store: &dyn Store, hash_key: HashKey) -> Result<Vec<Problem>, StoreError> {
    let mut problems = Survey::of(store, hash_key, u64::MAX)?.problems;
    problems.retain(|problem| !matches!(problem.kind, ProblemKind::PastEnd | ProblemKind::NextIno));
    Ok(problems)
}

/// Flags that say which attributes an inode has.
const OF_ATTRIBUTES: InodeFlags =
    InodeFlags::ACCESS_ACL.with(InodeFlags::DEFAULT_ACL, true).with(InodeFlags::CAPABILITY, true);

fn is_acl(name: &[u8]) -> bool {
    name == ACCESS_ACL_XATTR || name == DEFAULT_ACL_XATTR
}

/// The result of a survey.
#[derive(Debug, Default)]
pub struct Survey {
    /// The problems, in the order in which they are to be repaired.
    pub problems: Vec<Problem>,
    /// Every extent, by its first pool page.
    pub extents: Vec<(InodeNo, Extent)>,
    /// Pool pages whose bytes are in an image.
    pub images: BTreeSet<PoolPage>,
    /// The marked zones.
    pub marks: Vec<u64>,
    /// The number of inodes.
    pub inodes: u64,
    /// The number of entries.
    pub entries: u64,
}

#[derive(Default)]
struct Counted {
    names: u32,
    subdirectories: u32,
    /// A directory's parent: the recorded one if that has an entry for it, else the first directory with one.
    parent: Option<InodeNo>,
    pages: u64,
    xattrs: u32,
    /// The flags that follow from its attributes.
    marks: InodeFlags,
}

struct Surveyor<'a> {
    store: &'a dyn Store,
    view: View<'a>,
    pool_pages: u64,
    inodes: BTreeMap<InodeNo, InodeRecord>,
    counted: BTreeMap<InodeNo, Counted>,
    orphans: BTreeSet<InodeNo>,
    /// Files with a cut that is not finished.
    cuts: BTreeSet<InodeNo>,
    found: Survey,
}

/// A function that gets each record's key and value. Its error is the fault of the record by itself.
type Visit<'a, T> = &'a mut dyn FnMut(&mut T, &[u8], &[u8]) -> Result<(), RecordError>;

impl Survey {
    /// Surveys a store at rest, whose pool has `pool_pages` pages.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn of(store: &dyn Store, hash_key: HashKey, pool_pages: u64) -> Result<Self, StoreError> {
        let mut surveyor = Surveyor {
            store,
            view: View::of_store(store, hash_key),
            pool_pages,
            inodes: BTreeMap::new(),
            counted: BTreeMap::new(),
            orphans: BTreeSet::new(),
            cuts: BTreeSet::new(),
            found: Self::default(),
        };
        surveyor.inodes()?;
        surveyor.entries()?;
        surveyor.cuts()?;
        surveyor.extents()?;
        surveyor.page_map()?;
        surveyor.images()?;
        surveyor.attributes()?;
        surveyor.targets_and_orphans()?;
        surveyor.clients()?;
        surveyor.marks()?;
        surveyor.counts();
        surveyor.reach();
        let mut found = surveyor.found;
        found.problems.sort_by_key(|problem| problem.kind);
        Ok(found)
    }
}

impl Surveyor<'_> {
    fn problem(&mut self, kind: ProblemKind, ino: InodeNo, key: &[u8], detail: Detail) {
        self.found.problems.push(Problem { kind, ino, key: key.to_vec(), detail });
    }

    fn bad(&mut self, key: &[u8], error: RecordError) {
        let ino = key::parse_ino(key.get(..9).unwrap_or_default()).unwrap_or(InodeNo(0));
        self.problem(ProblemKind::BadRecord, ino, key, Detail::Record(error));
    }

    /// Visits all records of a kind. It copies them in parts, so that the visitor can change `self`.
    fn each(&mut self, tag: u8, visit: Visit<'_, Self>) -> Result<(), StoreError> {
        let range = key::all(tag);
        let store = self.store;
        store.scan(&range.from, &range.to, Direction::Forward, &mut |key, value| {
            if let Err(error) = visit(self, key, value) {
                self.bad(key, error);
            }
            true
        })
    }

    fn inodes(&mut self) -> Result<(), StoreError> {
        self.each(tag::INODE, &mut |this, key, value| {
            let ino = key::parse_ino(key).ok_or(RecordError::Malformed)?;
            this.inodes.insert(ino, record::parse_inode(value)?);
            Ok(())
        })?;
        self.found.inodes = self.inodes.len() as u64;
        let root = self.inodes.get(&InodeNo::ROOT);
        if !root.is_some_and(InodeRecord::is_directory) {
            self.problem(ProblemKind::NoRoot, InodeNo::ROOT, &key::inode(InodeNo::ROOT), Detail::None);
        }
        let needed = self.inodes.last_key_value().map_or(2, |(ino, _)| ino.0.saturating_add(1)).max(2);
        for name in [key::NEXT_INO, key::STARTS] {
            let number = self.store.get(name)?.map(|value| record::parse(&value));
            match number {
                Some(Ok(record::CounterRecord(next))) if name == key::STARTS || next >= needed => {}
                Some(Ok(record::CounterRecord(next))) => {
                    self.problem(ProblemKind::NextIno, InodeNo(0), name, Detail::Numbers(next, needed));
                }
                Some(Err(error)) => self.bad(name, error),
                None if name == key::NEXT_INO => {
                    self.problem(ProblemKind::NextIno, InodeNo(0), name, Detail::Numbers(0, needed));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn entries(&mut self) -> Result<(), StoreError> {
        self.each(tag::ENTRY, &mut |this, key, value| {
            let (parent, hash) = key::parse_bucket(key).ok_or(RecordError::Malformed)?;
            let bucket = record::parse_bucket(value)?;
            if !this.inodes.get(&parent).is_some_and(InodeRecord::is_directory) {
                this.problem(ProblemKind::NoInode, parent, key, Detail::None);
                return Ok(());
            }
            for entry in &bucket.entries {
                this.found.entries += 1;
                let name = || Detail::Name(entry.name.to_vec());
                let inode = this.inodes.get(&entry.ino).copied();
                let problem = match inode {
                    _ if this.view.hash(entry.name) != hash => Some(ProblemKind::WrongBucket),
                    None => Some(ProblemKind::Dangling),
                    Some(inode) if inode.kind != entry.kind => Some(ProblemKind::WrongKind),
                    Some(_) => None,
                };
                if let Some(kind) = problem {
                    this.problem(kind, entry.ino, key, name());
                }
                let is_directory = inode.is_some_and(|inode| inode.is_directory());
                if is_directory {
                    let recorded = inode.map(|inode| inode.parent);
                    let here = this.counted.entry(entry.ino).or_default();
                    let second = here.parent.is_some() || entry.ino == InodeNo::ROOT;
                    if !second || (recorded == Some(parent) && here.parent != recorded) {
                        here.parent = Some(parent);
                    }
                    if second {
                        this.problem(ProblemKind::SecondParent, entry.ino, key, name());
                    }
                    this.counted.entry(parent).or_default().subdirectories += 1;
                }
                this.counted.entry(entry.ino).or_default().names += 1;
            }
            Ok(())
        })
    }

    fn cuts(&mut self) -> Result<(), StoreError> {
        self.each(tag::CUT, &mut |this, key, value| {
            let ino = key::parse_ino(key).ok_or(RecordError::Malformed)?;
            let _: record::CounterRecord = record::parse(value)?;
            if this.inodes.contains_key(&ino) {
                this.cuts.insert(ino);
            } else {
                this.problem(ProblemKind::NoInode, ino, key, Detail::None);
            }
            Ok(())
        })
    }

    fn extents(&mut self) -> Result<(), StoreError> {
        let mut last = (InodeNo(0), 0);
        self.each(tag::EXTENT, &mut |this, key, value| {
            let (ino, page) = key::parse_paged(key).ok_or(RecordError::Malformed)?;
            let extent = ExtentRecord::parse(page, value)?.at(page);
            let page_detail = |page: FilePage| Detail::Page(page.0, ino);
            match this.inodes.get(&ino).copied() {
                None => this.problem(ProblemKind::NoInode, ino, key, Detail::None),
                Some(inode) if inode.kind != FileKind::File => {
                    this.problem(ProblemKind::StrayExtent, ino, key, Detail::None);
                }
                Some(inode) => {
                    let end = FilePage(inode.size.div_ceil(PAGE_SIZE_U64));
                    let is_past_end = extent.state == ExtentState::Written && extent.file_end() > end;
                    if is_past_end && !this.cuts.contains(&ino) {
                        this.problem(ProblemKind::PastEnd, ino, key, page_detail(end.max(page)));
                    }
                }
            }
            let before = if last.0 == ino { last.1 } else { 0 };
            if page.0 < before {
                this.problem(ProblemKind::FileOverlap, ino, key, page_detail(page));
            }
            last = (ino, before.max(extent.file_end().0));
            if extent.pool_page.0 + extent.len_pages > this.pool_pages {
                this.problem(ProblemKind::PastPool, ino, key, page_detail(page));
            }
            this.counted.entry(ino).or_default().pages += extent.len_pages;
            this.found.extents.push((ino, extent));
            Ok(())
        })?;
        self.found.extents.sort_by_key(|(ino, extent)| (extent.pool_page, *ino, extent.file_page));
        // The extent among those seen so far that reaches furthest.
        let mut claimed: Option<(InodeNo, Extent)> = None;
        let mut overlaps = Vec::new();
        for (ino, extent) in &self.found.extents {
            if let Some((other, before)) = claimed
                && extent.pool_page.0 < before.pool_page.0 + before.len_pages
            {
                overlaps.push(((other, before), (*ino, *extent)));
            }
            if claimed.is_none_or(|(_, before)| {
                before.pool_page.0 + before.len_pages < extent.pool_page.0 + extent.len_pages
            }) {
                claimed = Some((*ino, *extent));
            }
        }
        for (one, other) in overlaps {
            // Bytes win over reserved space, and the older file over the newer one, because it had the page first.
            let rank = |(ino, extent): &(InodeNo, Extent)| {
                (extent.state != ExtentState::Written, *ino, extent.file_page)
            };
            let (keeps, loses) = if rank(&one) <= rank(&other) { (one, other) } else { (other, one) };
            let page = one.1.pool_page.max(other.1.pool_page);
            let key = key::extent(loses.0, loses.1.file_page);
            self.problem(ProblemKind::PoolOverlap, loses.0, &key, Detail::Page(page.0, keeps.0));
        }
        Ok(())
    }

    /// Compares the map of pages with the extents.
    fn page_map(&mut self) -> Result<(), StoreError> {
        let mut expected = PageMap::default();
        self.found.extents.iter().for_each(|(_, extent)| expected.add_extent(ExtentRecord::from(*extent)));
        let (mut pages, mut first) = (0, None);
        let mut differ = |key: PartKey, one: &PartBits, other: &PartBits| {
            let differing: PartBits = std::array::from_fn(|word| one[word] ^ other[word]);
            if let Some(page) = bits::find(&differing, 0..PART_PAGES, true) {
                pages += bits::count(&differing, 0..PART_PAGES);
                first = first.or(Some(key.first_page() + page));
            }
        };
        let contradictions = self.store.pages(&mut |key, bits| differ(key, bits, &expected.take(key)))?;
        expected.visit(&mut |key, bits| differ(key, bits, &NO_PAGES));
        // Contradictions among the extents themselves are reported with these.
        let unexplained = contradictions > 0 && expected.contradictions == 0;
        if pages > 0 || unexplained {
            let detail = Detail::Pages(pages.max(1), first.unwrap_or(0));
            self.problem(ProblemKind::PageMap, InodeNo(0), b"", detail);
        }
        Ok(())
    }

    fn images(&mut self) -> Result<(), StoreError> {
        self.each(tag::IMAGE, &mut |this, key, value| {
            let (ino, page) = key::parse_paged(key).ok_or(RecordError::Malformed)?;
            images::parse(value)?;
            // Other faults of its extents are reported with these.
            match images::place_of(this.view, ino, page) {
                Ok(Some(place)) => drop(this.found.images.insert(place)),
                Ok(None) => this.problem(ProblemKind::StrayImage, ino, key, Detail::None),
                Err(_) => {}
            }
            Ok(())
        })
    }

    fn attributes(&mut self) -> Result<(), StoreError> {
        let mut heads = Vec::new();
        self.each(tag::XATTR, &mut |this, key, _| {
            let (ino, name, piece) = key::parse_xattr(key).ok_or(RecordError::Malformed)?;
            if !this.inodes.contains_key(&ino) {
                this.problem(ProblemKind::NoInode, ino, key, Detail::None);
            } else if piece == 0 {
                let counted = this.counted.entry(ino).or_default();
                counted.xattrs += 1;
                if let Some(mark) = mark_of(name) {
                    counted.marks = counted.marks.with(mark, true);
                }
                heads.push((ino, name.to_vec()));
            } else if heads.last().is_none_or(|(of, head)| *of != ino || head != name) {
                this.problem(ProblemKind::BadXattr, ino, key, Detail::Name(name.to_vec()));
            }
            Ok(())
        })?;
        for (ino, name) in heads {
            let is_good = match self.view.xattr(ino, &name) {
                Ok(Some(value)) if is_acl(&name) => matches!(Acl::parse(&value), Ok(Some(_))),
                value => value.is_ok(),
            };
            if !is_good {
                self.problem(ProblemKind::BadXattr, ino, &key::xattr(ino, &name, 0), Detail::Name(name));
            }
        }
        Ok(())
    }

    fn targets_and_orphans(&mut self) -> Result<(), StoreError> {
        let mut targets = BTreeSet::new();
        self.each(tag::SYMLINK, &mut |this, key, value| {
            let ino = key::parse_ino(key).ok_or(RecordError::Malformed)?;
            let _: BytesRecord<'_> = record::parse(value)?;
            match this.inodes.get(&ino) {
                None => this.problem(ProblemKind::NoInode, ino, key, Detail::None),
                Some(inode) if inode.kind != FileKind::Symlink => {
                    this.problem(ProblemKind::StrayTarget, ino, key, Detail::None);
                }
                Some(_) => drop(targets.insert(ino)),
            }
            Ok(())
        })?;
        let symlinks = self.inodes.iter().filter(|(_, inode)| inode.kind == FileKind::Symlink);
        let without: Vec<_> = symlinks.map(|(ino, _)| *ino).filter(|ino| !targets.contains(ino)).collect();
        for ino in without {
            self.problem(ProblemKind::NoTarget, ino, &key::inode(ino), Detail::None);
        }
        self.each(tag::ORPHAN, &mut |this, key, value| {
            let ino = key::parse_ino(key).ok_or(RecordError::Malformed)?;
            let _: BytesRecord<'_> = record::parse(value)?;
            if this.inodes.contains_key(&ino) {
                this.orphans.insert(ino);
            } else {
                this.problem(ProblemKind::NoInode, ino, key, Detail::None);
            }
            Ok(())
        })
    }

    fn clients(&mut self) -> Result<(), StoreError> {
        self.each(tag::CLIENT, &mut |_, key, value| match key.len() {
            17 => record::parse::<ClientRecord>(value).map(drop),
            19 => record::parse::<SlotRecord>(value).map(drop),
            _ => Err(RecordError::Malformed),
        })
    }

    fn marks(&mut self) -> Result<(), StoreError> {
        self.each(tag::MARK, &mut |this, key, value| {
            let _: BytesRecord<'_> = record::parse(value)?;
            this.found.marks.push(key::parse_mark(key).ok_or(RecordError::Malformed)?);
            Ok(())
        })
    }

    fn counts(&mut self) {
        let inodes = std::mem::take(&mut self.inodes);
        for (ino, inode) in &inodes {
            let none = Counted::default();
            let found = self.counted.get(ino).unwrap_or(&none);
            let is_root = *ino == InodeNo::ROOT;
            let names = if is_root { 1 } else { found.names };
            let expected = match (inode.is_directory(), names) {
                (true, 1..) => 2 + found.subdirectories,
                (true, 0) => 0,
                (false, names) => names,
            };
            let marks = inode.flags.with(OF_ATTRIBUTES, false).with(found.marks, true);
            let (pages, xattrs, parent) = (found.pages, found.xattrs, found.parent);
            let key = key::inode(*ino);
            let is_orphan = self.orphans.contains(ino);
            if names == 0 && !is_orphan {
                self.problem(ProblemKind::Unreachable, *ino, &key, Detail::None);
            } else if inode.nlink != expected {
                let numbers = Detail::Numbers(inode.nlink.into(), expected.into());
                self.problem(ProblemKind::LinkCount, *ino, &key, numbers);
            }
            if names > 0 && is_orphan {
                self.problem(ProblemKind::NamedOrphan, *ino, &key::orphan(*ino), Detail::None);
            }
            let parent = if is_root { Some(InodeNo::ROOT) } else { parent };
            if let Some(parent) = parent.filter(|parent| inode.is_directory() && *parent != inode.parent) {
                let numbers = Detail::Numbers(inode.parent.0, parent.0);
                self.problem(ProblemKind::WrongParent, *ino, &key, numbers);
            }
            if inode.allocated_pages != pages {
                self.problem(
                    ProblemKind::Allocated,
                    *ino,
                    &key,
                    Detail::Numbers(inode.allocated_pages, pages),
                );
            }
            if inode.xattrs != xattrs {
                let numbers = Detail::Numbers(inode.xattrs.into(), xattrs.into());
                self.problem(ProblemKind::XattrCount, *ino, &key, numbers);
            }
            if inode.flags != marks {
                let numbers = Detail::Numbers(inode.flags.0.into(), marks.0.into());
                self.problem(ProblemKind::Marks, *ino, &key, numbers);
            }
        }
        self.inodes = inodes;
    }

    /// Finds directories whose path does not lead to the root: they form loops. A loop is cut at its lowest number.
    fn reach(&mut self) {
        let parent = |ino: InodeNo| self.counted.get(&ino).and_then(|found| found.parent);
        let mut known: BTreeSet<InodeNo> = [InodeNo::ROOT].into();
        let mut rings = Vec::new();
        for ino in self.inodes.iter().filter(|(_, inode)| inode.is_directory()).map(|(ino, _)| *ino) {
            let mut way = vec![ino];
            let mut seen: BTreeSet<InodeNo> = way.iter().copied().collect();
            while let Some(last) = way.last().copied().filter(|last| !known.contains(last)) {
                match parent(last) {
                    // It has no names, which is reported where names are counted.
                    None => break,
                    Some(above) if !seen.insert(above) => {
                        let ring = way.iter().position(|ino| *ino == above).unwrap_or(0);
                        rings.extend(way[ring..].iter().min().copied());
                        break;
                    }
                    Some(above) => way.push(above),
                }
            }
            known.extend(way);
        }
        for ino in rings {
            self.problem(ProblemKind::Unreachable, ino, &key::inode(ino), Detail::None);
        }
    }
}
