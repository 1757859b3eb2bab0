//! A power loss of the server and of all clients, with unsynced changes. The next server must find: of the names, the state after some step since the
//! last sync; of each file, a length that it had since then, and each byte as it was at some time since then. Nothing else, and nothing older.

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
/// Enough seconds for the end of a lease and for the write-back of the changes that follow from it.
const SETTLE_S: u64 = 60;

/// The state of an inode without its contents and times.
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

/// The inodes of a model that have a name.
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

/// The inodes on the server that have a name, and the contents of the files among them.
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

/// The model after each step since everything was synced, and which of these states later syncs have ruled out.
struct History {
    models: Vec<Model>,
    /// The index of the oldest model whose names may be found.
    names_from: usize,
    /// For each file the index of the oldest model whose contents of it may be found.
    contents_from: BTreeMap<InodeNo, usize>,
    /// The step in which the power was lost.
    under_way: Option<Step>,
    /// The file that this step is about.
    touched: Option<InodeNo>,
}

impl History {
    /// Walks `steps` until the power is lost.
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
            // The step under way may have taken effect or not, so everything that it may change is taken out of the comparison.
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

    /// Removes from `tree` what the step under way may change.
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
                // A directory's link count counts its subdirectories, so it may have changed, too.
                parent.nlink = 0;
            }
        }
        let made: BTreeSet<_> = model.made.iter().copied().collect();
        tree.retain(|ino, _| !inodes.contains(ino) && made.contains(ino));
    }

    /// Checks that the length, and each byte, is one that the file had since its last sync.
    fn check_contents(&self, ino: InodeNo, bytes: &[u8]) {
        let from = self.contents_from.get(&ino).copied().unwrap_or(0);
        let had: Vec<&[u8]> = self.models[from..]
            .iter()
            .filter_map(|model| Some(&*model.nodes.get(&ino)?.contents.bytes))
            .collect();
        if had.is_empty() {
            // The step under way made the file.
            return;
        }
        assert!(
            had.iter().any(|had| had.len() == bytes.len()),
            "inode {ino} has {} bytes and had {:?}",
            bytes.len(),
            had.iter().map(|had| had.len()).collect::<Vec<_>>()
        );
        for (at, byte) in bytes.iter().enumerate() {
            // Beyond an earlier end of the file the byte may be that of a hole.
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

/// The file that a step is about, and how it is open.
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

/// Syncs everything, then walks `steps` until everything loses power, at the event `end` or after the last step. Checks what the next server finds.
pub fn lose(mut walk: Walk<Simulated>, steps: &[(usize, Step)], end: End) -> World {
    walk.site.calm();
    walk.sync();
    // Hand no changes over from here on: a client may go on with a file that another client has not synced.
    walk.site.dies_unsynced = false;
    walk.site.world.end_after(end);
    let history = History::walk(&mut walk, steps);
    let world = walk.site.leave_world();
    world.begin_again();
    let volume = world.client();
    history.check(&volume);
    // The clients do not come back, so files that they had open and that have no name must be freed, and their space with them.
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
