//! The same random operations on metadata and on the reference model (`cuttlefs_reference`): every answer and the whole tree are compared, on both
//! stores.

use super::super::{DataCommit, NoteData, Operation, RangeUpdate};
use super::super::{DiskOptions, DiskStore};
use super::{HASH_KEY, MemoryStore, Store, USER, World, check, format};
use cuttlefs_common::attr::{FileKind, SetAttr};
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Clock;
use cuttlefs_reference::Time;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Steps between two comparisons of the whole tree.
const COMPARE_EVERY: usize = 8;
const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b".."];
const TARGET: &[u8] = b"target";

/// An operation whose inodes are numbered in the order in which they were made, and whose names are indexes.
#[derive(Clone, Debug)]
enum Step {
    Make { parent: usize, name: usize, kind: FileKind, sticky: bool },
    Create { parent: usize, name: usize, exclusive: bool },
    CreateNameless { parent: usize },
    Link { ino: usize, parent: usize, name: usize },
    Unlink { parent: usize, name: usize },
    Rmdir { parent: usize, name: usize },
    Rename { parent: usize, name: usize, new_parent: usize, new_name: usize, mode: RenameMode },
    Chmod { ino: usize, mode: u16 },
    Chown { ino: usize, gid: u32 },
    Truncate { ino: usize, pages: u64, extra: u64 },
    SetXattr { ino: usize, name: usize, len: usize, mode: XattrMode },
    RemoveXattr { ino: usize, name: usize },
    Note { ino: usize, size: u64 },
    Commit { ino: usize, first: u64, hole: bool, lens: Vec<u64>, size: u64 },
    Reap { ino: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let ino = || 0usize..24;
    // Mostly the first directories are chosen, so that trees grow deep.
    let parent = || prop_oneof![8 => 0usize..3, 1 => 0usize..24];
    let name = || prop_oneof![60 => 0usize..3, 2 => Just(3usize), 1 => Just(4usize)];
    let kind = prop_oneof![
        Just(FileKind::File),
        Just(FileKind::Directory),
        Just(FileKind::Directory),
        Just(FileKind::Symlink),
        Just(FileKind::Fifo)
    ];
    let mode = prop_oneof![
        3 => Just(RenameMode::Replace), 1 => Just(RenameMode::NoReplace), 2 => Just(RenameMode::Exchange)
    ];
    let xattr_mode = prop_oneof![Just(XattrMode::Any), Just(XattrMode::Create), Just(XattrMode::Replace)];
    prop_oneof![
        6 => (parent(), name(), kind, any::<bool>())
            .prop_map(|(parent, name, kind, sticky)| Step::Make { parent, name, kind, sticky }),
        2 => (parent(), name(), any::<bool>())
            .prop_map(|(parent, name, exclusive)| Step::Create { parent, name, exclusive }),
        1 => parent().prop_map(|parent| Step::CreateNameless { parent }),
        3 => (ino(), parent(), name()).prop_map(|(ino, parent, name)| Step::Link { ino, parent, name }),
        3 => (parent(), name()).prop_map(|(parent, name)| Step::Unlink { parent, name }),
        2 => (parent(), name()).prop_map(|(parent, name)| Step::Rmdir { parent, name }),
        6 => (parent(), name(), parent(), name(), mode).prop_map(|(parent, name, new_parent, new_name, mode)| {
            Step::Rename { parent, name, new_parent, new_name, mode }
        }),
        1 => (ino(), 0u16..0o10000).prop_map(|(ino, mode)| Step::Chmod { ino, mode }),
        1 => (ino(), 0u32..9).prop_map(|(ino, gid)| Step::Chown { ino, gid }),
        2 => (ino(), 0u64..12, 0u64..2).prop_map(|(ino, pages, extra)| Step::Truncate { ino, pages, extra }),
        2 => (ino(), 0usize..3, 0usize..9000, xattr_mode)
            .prop_map(|(ino, name, len, mode)| Step::SetXattr { ino, name, len, mode }),
        1 => (ino(), 0usize..3).prop_map(|(ino, name)| Step::RemoveXattr { ino, name }),
        2 => (ino(), 0u64..100_000).prop_map(|(ino, size)| Step::Note { ino, size }),
        4 => (ino(), 0u64..12, any::<bool>(), prop::collection::vec(1u64..4, 0..4), 0u64..100_000)
            .prop_map(|(ino, first, hole, lens, size)| Step::Commit { ino, first, hole, lens, size }),
        2 => ino().prop_map(|ino| Step::Reap { ino }),
    ]
}

/// The part of a file's data that metadata knows: its sizes and its mapping, not its bytes.
#[derive(Clone, Debug, Default, PartialEq)]
struct Data {
    live_size: u64,
    durable_size: u64,
    /// The pool page of each mapped file page.
    pages: BTreeMap<u64, u64>,
}

type Model = cuttlefs_reference::Model<Data>;
type Node = cuttlefs_reference::Node<Data>;

/// Every third inode is open.
fn is_open(ino: InodeNo) -> bool {
    ino.0.is_multiple_of(3)
}

type Answer = Result<(), Status>;

/// Sets the model's state of a new inode: it is open if `is_open` says so.
fn made(node: &mut Node, ino: InodeNo) {
    node.opens = usize::from(is_open(ino));
    if node.kind == FileKind::Symlink {
        node.target = TARGET.to_vec();
    }
    (node.more.live_size, node.more.durable_size) = (node.size(), node.size());
}

/// Metadata and the model, side by side.
struct Pair {
    world: World,
    model: Model,
    next_pool_page: u64,
}

impl Pair {
    fn new(store: Arc<dyn Store>) -> Self {
        format(&*store);
        let world = World::on(store);
        let root = world.attr(InodeNo::ROOT);
        let mut model = Model::new(&root, 0, world.clock.now(), (USER.uid, USER.gid));
        (model.now_is_exact, model.names_come_first) = (true, false);
        made(model.node_mut(InodeNo::ROOT), InodeNo::ROOT);
        Self { world, model, next_pool_page: 0 }
    }

    fn run(&mut self, step: &Step) {
        self.world.tick();
        self.model.now = self.world.clock.now();
        let execute = |world: &World, operation: &Operation<'_>| world.execute(operation, &is_open);
        let world = &self.world;
        let model = &mut self.model;
        let (real, expected): (Answer, Answer) = match step {
            Step::Make { parent, name, kind, sticky } => {
                let (parent, name) = (model.pick(*parent), NAMES[*name]);
                let mode = if *sticky { 0o3755 } else { 0o644 };
                let node = match kind {
                    FileKind::File => NewNode::File,
                    FileKind::Directory => NewNode::Directory,
                    FileKind::Symlink => NewNode::Symlink(TARGET),
                    kind => NewNode::Special { kind: *kind, rdev: 0 },
                };
                let real = execute(world, &Operation::Make { parent, name, node, mode });
                let expected = model.place(parent, name).and_then(|taken| match taken {
                    Some(_) => Err(Status::Exists),
                    None => Ok(()),
                });
                if let (Ok(outcome), Ok(())) = (&real, expected) {
                    let ino = outcome.attr.expect("attr").ino;
                    made(model.add(parent, name, ino, *kind, mode), ino);
                }
                (real.map(|_| ()), expected)
            }
            Step::Create { parent, name, exclusive } => {
                let (parent, name) = (model.pick(*parent), NAMES[*name]);
                let create = Operation::Create { parent, name, mode: 0o600, exclusive: *exclusive };
                let real = execute(world, &create);
                let expected = model.place(parent, name).and_then(|taken| match taken {
                    None => Ok(None),
                    Some(_) if *exclusive => Err(Status::Exists),
                    Some(ino) => match model.nodes[&ino].kind {
                        FileKind::File => Ok(Some(ino)),
                        FileKind::Directory => Err(Status::IsDirectory),
                        _ => Err(Status::Exists),
                    },
                });
                if let (Ok(outcome), Ok(taken)) = (&real, expected) {
                    let ino = outcome.attr.expect("attr").ino;
                    match taken {
                        Some(taken) => assert_eq!((ino, outcome.created), (taken, false)),
                        None => made(model.add(parent, name, ino, FileKind::File, 0o600), ino),
                    }
                }
                (real.map(|_| ()), expected.map(|_| ()))
            }
            Step::CreateNameless { parent } => {
                let parent = model.pick(*parent);
                let real = execute(world, &Operation::CreateNameless { parent, mode: 0o600 });
                let expected = model.directory(parent).map(|_| ());
                if let (Ok(outcome), Ok(())) = (&real, expected) {
                    let ino = outcome.attr.expect("attr").ino;
                    made(model.add_nameless(parent, ino, FileKind::File, 0o600), ino);
                }
                (real.map(|_| ()), expected)
            }
            Step::Link { ino, parent, name } => {
                let (ino, parent, name) = (model.pick(*ino), model.pick(*parent), NAMES[*name]);
                let real = execute(world, &Operation::Link { ino, parent, name });
                (real.map(|_| ()), model.link(ino, parent, name))
            }
            Step::Unlink { parent, name } | Step::Rmdir { parent, name } => {
                let (parent, name) = (model.pick(*parent), NAMES[*name]);
                let wants_directory = matches!(step, Step::Rmdir { .. });
                let operation = if wants_directory {
                    Operation::Rmdir { parent, name }
                } else {
                    Operation::Unlink { parent, name }
                };
                let real = execute(world, &operation);
                (real.map(|_| ()), model.remove(parent, name, wants_directory))
            }
            Step::Rename { parent, name, new_parent, new_name, mode } => {
                let (from, to) =
                    ((model.pick(*parent), NAMES[*name]), (model.pick(*new_parent), NAMES[*new_name]));
                let rename = Operation::Rename {
                    parent: from.0,
                    name: from.1,
                    new_parent: to.0,
                    new_name: to.1,
                    mode: *mode,
                };
                (execute(world, &rename).map(|_| ()), model.rename(from, to, *mode))
            }
            Step::Chmod { ino, mode } => {
                let ino = model.pick(*ino);
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                let expected = model.node(ino).map(|_| ());
                if expected.is_ok() {
                    model.node_mut(ino).mode = *mode;
                    model.changed(ino);
                }
                (world.meta.set_attr(USER, ino, &set, None).map(|_| ()), expected)
            }
            Step::Chown { ino, gid } => {
                let ino = model.pick(*ino);
                let set = SetAttr { gid: Some(*gid), ..SetAttr::default() };
                let expected = model.node(ino).map(|_| ());
                if expected.is_ok() {
                    let node = model.node_mut(ino);
                    node.chown_drops_set_ids(USER.gid);
                    node.gid = *gid;
                    model.changed(ino);
                }
                (world.meta.set_attr(USER, ino, &set, None).map(|_| ()), expected)
            }
            Step::Truncate { ino, pages, extra } => {
                let ino = model.pick(*ino);
                let size = pages * 4096 + extra;
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                let expected = model.node(ino).and_then(|node| match node.kind {
                    FileKind::File => Ok(()),
                    FileKind::Directory => Err(Status::IsDirectory),
                    _ => Err(Status::Invalid),
                });
                if expected.is_ok() {
                    let data = &mut model.node_mut(ino).more;
                    (data.live_size, data.durable_size) = (size, size);
                    data.pages.retain(|page, _| *page < pages + extra);
                    model.touch(ino);
                }
                (world.meta.set_attr(USER, ino, &set, None).map(|_| ()), expected)
            }
            Step::SetXattr { ino, name, len, mode } => {
                let (ino, name) = (model.pick(*ino), NAMES[*name]);
                let value: Vec<u8> = (0..*len).map(|index| (index * 7) as u8).collect();
                let set = Operation::SetXattr { ino, name, value: &value, mode: *mode };
                let real = execute(world, &set);
                let expected =
                    model.node(ino).and_then(|node| match (mode, node.xattrs.contains_key(name)) {
                        (XattrMode::Create, true) => Err(Status::Exists),
                        (XattrMode::Replace, false) => Err(Status::NoAttribute),
                        _ => Ok(()),
                    });
                if expected.is_ok() {
                    model.node_mut(ino).xattrs.insert(name.to_vec(), value.clone());
                    model.changed(ino);
                }
                (real.map(|_| ()), expected)
            }
            Step::RemoveXattr { ino, name } => {
                let (ino, name) = (model.pick(*ino), NAMES[*name]);
                let real = execute(world, &Operation::RemoveXattr { ino, name });
                let expected = model.node(ino).and_then(|node| match node.xattrs.contains_key(name) {
                    true => Ok(()),
                    false => Err(Status::NoAttribute),
                });
                if expected.is_ok() {
                    model.node_mut(ino).xattrs.remove(name);
                    model.changed(ino);
                }
                (real.map(|_| ()), expected)
            }
            Step::Note { ino, size } => {
                let ino = model.pick(*ino);
                let note = NoteData { size: Some(*size), allocated_pages: None, modified: true };
                let expected = model.node(ino).and_then(|node| match node.kind {
                    FileKind::File => Ok(()),
                    _ => Err(Status::Invalid),
                });
                if expected.is_ok() {
                    model.node_mut(ino).more.live_size = *size;
                    model.touch(ino);
                }
                (world.meta.note_data(ino, note).map(|_| ()), expected)
            }
            Step::Commit { ino, first, hole, lens, size } => {
                let ino = model.pick(*ino);
                let mut extents = Vec::new();
                let mut at = *first;
                for len in lens {
                    // Now and then the pool pages have a gap, so that some extents join and some do not.
                    self.next_pool_page += u64::from(len % 2 == 0);
                    extents.push(Extent {
                        file_page: FilePage(at),
                        pool_page: PoolPage(self.next_pool_page),
                        len_pages: *len,
                        state: ExtentState::Written,
                    });
                    self.next_pool_page += len;
                    at += len + u64::from(*hole);
                }
                let update =
                    RangeUpdate { first: FilePage(*first), end: FilePage(at), extents: extents.clone() };
                let commit = DataCommit::of_ranges(ino, vec![update], *size);
                let expected = match model.node(ino).map(|node| node.kind) {
                    Ok(FileKind::File) => {
                        let data = &mut model.node_mut(ino).more;
                        let was_live = data.live_size != data.durable_size;
                        data.durable_size = *size;
                        // If the file had no live data, the commit sets its live size.
                        if !was_live {
                            data.live_size = *size;
                        }
                        data.pages.retain(|page, _| !(*first..at).contains(page));
                        for extent in &extents {
                            let pages = (0..extent.len_pages)
                                .map(|page| (extent.file_page.0 + page, extent.pool_page.0 + page));
                            data.pages.extend(pages);
                        }
                        Ok(())
                    }
                    Ok(_) => Err(Status::Invalid),
                    Err(_) => Ok(()),
                };
                (world.meta.commit_data(&[commit]), expected)
            }
            Step::Reap { ino } => {
                let ino = model.pick(*ino);
                let expected = match model.nodes.contains_key(&ino) && model.nlink(ino) > 0 {
                    true => Err(Status::Invalid),
                    false => Ok(()),
                };
                if expected.is_ok() {
                    model.nodes.remove(&ino);
                }
                (world.meta.reap(ino).map(|_| ()), expected)
            }
        };
        assert_eq!(real, expected, "{step:?}");
    }

    /// Compares the whole tree with the model.
    fn compare(&self, durable: bool) {
        let world = if durable { &World::on(self.world.store.clone()) } else { &self.world };
        assert_eq!(check(&*world.store, HASH_KEY).expect("records parse"), []);
        assert_eq!(world.meta.damage_count(), 0);
        assert_eq!(world.meta.inode_count(), self.model.nodes.len() as u64);
        let orphans: Vec<_> =
            self.model.nodes.keys().copied().filter(|ino| self.model.nlink(*ino) == 0).collect();
        assert_eq!(world.meta.orphans(), orphans);
        for ino in self.model.made.iter().filter(|ino| !self.model.nodes.contains_key(ino)) {
            assert_eq!(world.meta.attr(*ino), Err(Status::Stale));
        }
        for (ino, node) in &self.model.nodes {
            let attr = world.attr(*ino);
            let size = if durable { node.more.durable_size } else { node.more.live_size };
            assert_eq!(
                (attr.kind, attr.mode, attr.uid, attr.gid, attr.nlink, attr.size),
                (node.kind, node.mode, node.uid, node.gid, self.model.nlink(*ino), size),
                "inode {ino}"
            );
            if !durable {
                let times = (Time::Exactly(attr.mtime), Time::Exactly(attr.ctime));
                assert_eq!(times, (node.mtime, node.ctime), "inode {ino}");
            }
            if node.kind == FileKind::Directory {
                let names = node.entries.keys().map(|name| String::from_utf8_lossy(name).into_owned());
                assert_eq!(world.names(*ino), names.collect::<Vec<_>>());
                for (name, child) in &node.entries {
                    assert_eq!(world.meta.lookup(*ino, name).map(|attr| attr.ino), Ok(*child));
                }
            }
            for (name, value) in &node.xattrs {
                assert_eq!(world.meta.xattr(*ino, name).as_ref(), Ok(value));
            }
            let listed = world.meta.xattr_names(*ino).expect("names");
            assert_eq!(listed.iter().filter(|byte| **byte == 0).count(), node.xattrs.len());
            let extents = world.meta.extents(*ino).expect("extents");
            let pages: BTreeMap<u64, u64> = extents
                .iter()
                .flat_map(|extent| {
                    (0..extent.len_pages).map(|page| (extent.file_page.0 + page, extent.pool_page.0 + page))
                })
                .collect();
            assert_eq!(pages, node.more.pages, "inode {ino}");
            for pair in extents.windows(2) {
                let joined = pair[0].file_end() == pair[1].file_page
                    && pair[0].pool_page.0 + pair[0].len_pages == pair[1].pool_page.0
                    && pair[0].state == pair[1].state;
                assert!(!joined, "neighbours were not joined: {pair:?}");
            }
        }
    }
}

fn walk(store: Arc<dyn Store>, steps: &[Step]) {
    let mut pair = Pair::new(store);
    for (index, step) in steps.iter().enumerate() {
        pair.run(step);
        // A later step may hide what an earlier one broke, so the comparison is repeated often.
        if index % COMPARE_EVERY == 0 {
            pair.compare(false);
        }
    }
    pair.compare(false);
    pair.compare(true);
}

proptest! {

    #[test]
    fn memory_store_behaves_as_the_model(steps in prop::collection::vec(step(), 1..120)) {
        walk(Arc::new(MemoryStore::new()), &steps);
    }
}

proptest! {
    // A case on disk takes as long as ten in memory; `PROPTEST_CASES` scales both.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 10))]

    #[test]
    fn the_disk_store_behaves_as_the_model(steps in prop::collection::vec(step(), 1..200)) {
        let directory = tempfile::tempdir().expect("directory");
        let options = DiskOptions { cache_bytes: 4 << 20, reserve_bytes: 0, checkpoint_bytes: 2 << 10, ..DiskOptions::default() };
        let store = DiskStore::open(&directory.path().join("meta"), options).expect("open");
        walk(Arc::new(store), &steps);
    }
}
