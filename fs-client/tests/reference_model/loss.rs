//! The power goes with something unsynced, and the clients with it. What a server finds then: of the names a prefix of what
//! was done since the last sync, of each file a length that it had since then, and each byte as it was at some time since
//! then. Nothing else, and nothing of before.

use super::inside;
use super::model::{Model, Node};
use super::simulated::Simulated;
use super::site::Site;
use super::step::{How, Step};
use super::walk::{CALLER, Walk, list, name, read_all, status};
use super::world::{TheEnd, World};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{OpenHow, Volume};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::life::End;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const LOOK: OpenHow = OpenHow::READ;
/// What a lease and the write-back of what ended with it take.
const SETTLE_S: u64 = 60;

/// What is known of an inode but its contents and times.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    kind: FileKind,
    mode: u16,
    owner: (u32, u32),
    rdev: u32,
    nlink: u32,
    target: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    entries: BTreeMap<Vec<u8>, InodeNo>,
}

type Tree = BTreeMap<InodeNo, Seen>;

/// What has a name in a model.
fn expected(model: &Model) -> Tree {
    let seen = |ino: InodeNo, node: &Node| Seen {
        kind: node.kind,
        mode: node.mode,
        owner: (node.uid, node.gid),
        rdev: node.rdev,
        nlink: model.nlink(ino),
        target: node.target.clone(),
        xattrs: node.xattrs.clone(),
        entries: node.entries.clone(),
    };
    let all = model.nodes.iter().map(|(ino, node)| (*ino, seen(*ino, node)));
    all.filter(|(_, seen)| seen.nlink > 0).collect()
}

/// What has a name on the server, and the files' contents.
fn found(volume: &RemoteVolume) -> (Tree, BTreeMap<InodeNo, Vec<u8>>) {
    let (mut tree, mut contents) = (Tree::new(), BTreeMap::new());
    let mut todo = vec![InodeNo::ROOT];
    while let Some(ino) = todo.pop() {
        if tree.contains_key(&ino) {
            continue;
        }
        let attr = status(volume.get_attr(&CALLER, ino)).expect("what has a name is there");
        let listed = status(volume.list_xattr(&CALLER, ino)).expect("names");
        let names = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let value = |name: &[u8]| status(volume.get_xattr(&CALLER, ino, name)).expect("a value");
        let mut seen = Seen {
            kind: attr.kind,
            mode: attr.mode,
            owner: (attr.uid, attr.gid),
            rdev: attr.rdev,
            nlink: attr.nlink,
            target: Vec::new(),
            xattrs: names.map(|name| (name.to_vec(), value(name))).collect(),
            entries: BTreeMap::new(),
        };
        match attr.kind {
            FileKind::Directory => {
                seen.entries = list(volume, ino, 1000, true).expect("a listing");
                todo.extend(seen.entries.values());
            }
            FileKind::Symlink => seen.target = status(volume.read_link(&CALLER, ino)).expect("a target"),
            FileKind::File => {
                let open = status(volume.open(&CALLER, ino, LOOK)).expect("open");
                let bytes = read_all(volume, open.handle, 0, attr.size).expect("no page is rotten");
                assert_eq!(bytes.len() as u64, attr.size, "inode {ino}");
                volume.release(open.handle);
                contents.insert(ino, bytes);
            }
            _ => {}
        }
        tree.insert(ino, seen);
    }
    (tree, contents)
}

/// The model after each step since everything was synced, and what was synced since.
struct History {
    models: Vec<Model>,
    /// The first of them whose names may be found.
    names_from: usize,
    /// The same for the contents of files.
    contents_from: BTreeMap<InodeNo, usize>,
    /// The step that the end came in.
    under_way: Option<Step>,
    /// The file it was about.
    touched: Option<InodeNo>,
}

impl History {
    /// Walks `steps` until the end comes.
    fn walk(walk: &mut Walk<Simulated>, steps: &[(usize, Step)]) -> Self {
        let mut history = Self {
            models: vec![walk.model.clone()],
            names_from: 0,
            contents_from: BTreeMap::new(),
            under_way: None,
            touched: None,
        };
        for (client, step) in steps {
            if matches!(step, Step::Crash { .. } | Step::Restart | Step::Kill { .. }) {
                continue;
            }
            let (about, how) = about(walk, step);
            let ran = catch_unwind(AssertUnwindSafe(|| walk.run(*client, step)));
            match ran {
                Ok(()) => history.note(walk.model.clone(), step, about, how),
                Err(payload) if payload.is::<TheEnd>() => {
                    (history.under_way, history.touched) = (Some(step.clone()), about);
                    return history;
                }
                Err(payload) => resume_unwind(payload),
            }
        }
        history
    }

    fn note(&mut self, model: Model, step: &Step, about: Option<InodeNo>, how: Option<How>) {
        let now = self.models.len();
        self.models.push(model);
        let Some(ino) = about else { return };
        match step {
            Step::Fsync { .. } => {
                self.names_from = now;
                self.contents_from.insert(ino, now);
            }
            Step::Write { .. } if how.is_some_and(|how| how.sync && how.write) => {
                self.contents_from.insert(ino, now);
            }
            _ => {}
        }
    }

    fn check(&self, volume: &RemoteVolume) {
        let (tree, contents) = found(volume);
        let last = self.models.len() - 1;
        let fits = (self.names_from..=last).rev().any(|index| {
            let mut wanted = expected(&self.models[index]);
            if index < last {
                return wanted == tree;
            }
            // Of the step under way there may be all or nothing; what it is about is not looked at.
            let mut tree_then = found(volume).0;
            self.mask(&self.models[index], &mut wanted);
            self.mask(&self.models[index], &mut tree_then);
            wanted == tree_then
        });
        assert!(
            fits,
            "the names are of no time since the last sync: {tree:#?}\nlast: {:#?}",
            expected(&self.models[last])
        );
        for (ino, bytes) in contents.iter().filter(|(ino, _)| Some(**ino) != self.touched) {
            self.check_contents(*ino, bytes);
        }
    }

    /// Takes out what the step under way may change.
    fn mask(&self, model: &Model, tree: &mut Tree) {
        let Some(step) = &self.under_way else { return };
        let mut names: Vec<(InodeNo, Vec<u8>)> = Vec::new();
        let mut inodes: BTreeSet<InodeNo> = self.touched.into_iter().collect();
        match *step {
            Step::Make { parent, name: index, .. }
            | Step::Create { parent, name: index, .. }
            | Step::Unlink { parent, name: index }
            | Step::Rmdir { parent, name: index } => names.push((model.pick(parent), name(index))),
            Step::Link { ino, parent, name: index } => {
                names.push((model.pick(parent), name(index)));
                inodes.insert(model.pick(ino));
            }
            Step::Rename { parent, name: index, new_parent, new_name, .. } => {
                names.push((model.pick(parent), name(index)));
                names.push((model.pick(new_parent), name(new_name)));
            }
            Step::SetAttr { ino, .. } | Step::SetXattr { ino, .. } | Step::RemoveXattr { ino, .. } => {
                inodes.insert(model.pick(ino));
            }
            _ => {}
        }
        for (parent, name) in names {
            inodes.extend(model.nodes.get(&parent).and_then(|node| node.entries.get(&name)).copied());
            if let Some(parent) = tree.get_mut(&parent) {
                inodes.extend(parent.entries.remove(&name));
                // Its count of directories.
                parent.nlink = 0;
            }
        }
        let made: BTreeSet<_> = model.made.iter().copied().collect();
        tree.retain(|ino, _| !inodes.contains(ino) && made.contains(ino));
    }

    /// Length and bytes are such as the file had since it was synced last.
    fn check_contents(&self, ino: InodeNo, bytes: &[u8]) {
        let from = self.contents_from.get(&ino).copied().unwrap_or(0);
        let had: Vec<&[u8]> = self.models[from..]
            .iter()
            .filter_map(|model| Some(&*model.nodes.get(&ino)?.contents.bytes))
            .collect();
        if had.is_empty() {
            // Made by the step under way.
            return;
        }
        assert!(
            had.iter().any(|had| had.len() == bytes.len()),
            "inode {ino} has {} bytes and had {:?}",
            bytes.len(),
            had.iter().map(|had| had.len()).collect::<Vec<_>>()
        );
        for (at, byte) in bytes.iter().enumerate() {
            // Past an end it had, it may have been a hole.
            let was = |had: &&[u8]| had.get(at).copied().unwrap_or(0) == *byte;
            assert!(
                had.iter().any(was),
                "inode {ino}: byte {at} (page {}) is {byte}, and was {:?}",
                at as u64 / PAGE_SIZE_U64,
                had.iter().map(|had| had.get(at).copied()).collect::<Vec<_>>()
            );
        }
    }
}

/// The file a step is about, and how it is open.
fn about(walk: &Walk<Simulated>, step: &Step) -> (Option<InodeNo>, Option<How>) {
    let handle = match *step {
        Step::Write { handle, .. } | Step::Allocate { handle, .. } | Step::Fsync { handle, .. } => handle,
        Step::Copy { to, .. } => to,
        Step::Truncate { ino, .. } | Step::Open { ino, .. } => return (Some(walk.model.pick(ino)), None),
        _ => return (None, None),
    };
    match walk.handle(handle) {
        Some(open) => (Some(open.ino), Some(open.how)),
        None => (None, None),
    }
}

/// Everything is synced; then `steps` are walked until everything loses power, with an event to come or at their end.
pub fn lose(mut walk: Walk<Simulated>, steps: &[(usize, Step)], end: End) -> World {
    walk.site.calm();
    walk.sync();
    // Nobody goes on with what another client had not synced.
    walk.site.dies_unsynced = false;
    walk.site.world.end_after(end);
    let history = History::walk(&mut walk, steps);
    let world = walk.site.leave_world();
    world.begin_again();
    let volume = world.client();
    history.check(&volume);
    // The clients of before do not come back: what they had open and has no name goes, and the space it had.
    for _ in 0..SETTLE_S {
        world.pass(std::time::Duration::from_secs(1));
        status(volume.get_attr(&CALLER, InodeNo::ROOT)).expect("it lives");
    }
    status(volume.session().sync_all(&CALLER)).expect("sync");
    let pool_pages = walk.model.pool_pages;
    inside::check(&world, pool_pages);
    let named = inside::check_records(&world, pool_pages);
    let space = status(volume.stat_fs(&CALLER)).expect("statfs");
    assert_eq!(space.free_pages, pool_pages - named, "free is what no extent names");
    history.check(&volume);
    world
}
