//! The model of a walk (`cuttlefs_reference`), and what only walks of several clients keep besides.

use cuttlefs_common::attr::{FileKind, Timestamp};
use cuttlefs_common::ids::InodeNo;
pub use cuttlefs_reference::Time;

/// Most clients of a walk.
pub const MOST_CLIENTS: usize = 4;
pub const UID: u32 = 1000;
pub const GID: u32 = 1000;

/// Of an inode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Clients whose kernel's pages somebody else made stale.
    pub stale_for: [bool; MOST_CLIENTS],
    /// Clients that have changed its contents since they synced.
    pub unsynced_by: [bool; MOST_CLIENTS],
}

pub type Node = cuttlefs_reference::Node<Seen>;
pub type Model = cuttlefs_reference::Model<Seen>;

/// What clients do to each other.
pub trait Clients {
    /// The contents changed by a client's doing.
    fn contents_changed(&mut self, ino: InodeNo, by: usize);
    /// All that a client has changed is durable.
    fn synced_by(&mut self, client: usize);
    /// The server was replaced: files may have been written again by clients, later than they were. What time they have now
    /// is looked at anew.
    fn written_again(&mut self);
    /// A server was lost that forgets what was not synced, also that there was something: where that is not written again, since
    /// it was being cut off, a file is again what a client saw.
    fn may_be_as_seen(&mut self);
}

impl Clients for Model {
    fn contents_changed(&mut self, ino: InodeNo, by: usize) {
        self.touch(ino);
        let node = self.node_mut(ino);
        for (client, stale) in node.more.stale_for.iter_mut().enumerate() {
            *stale |= client != by;
        }
        node.more.unsynced_by[by] = true;
    }

    fn synced_by(&mut self, client: usize) {
        self.nodes.values_mut().for_each(|node| node.more.unsynced_by[client] = false);
    }

    fn written_again(&mut self) {
        for node in self.nodes.values_mut().filter(|node| node.kind == FileKind::File) {
            for time in [&mut node.mtime, &mut node.ctime] {
                *time = Time::NotBefore(Timestamp { secs: i64::MIN, nanos: 0 });
            }
        }
    }

    fn may_be_as_seen(&mut self) {
        for node in self.nodes.values_mut().filter(|node| node.more.unsynced_by.contains(&true)) {
            node.more.stale_for = Default::default();
        }
    }
}
