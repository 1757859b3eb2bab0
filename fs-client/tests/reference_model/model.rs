//! The model of a walk (`cuttlefs_reference`), and the notes that only walks of several clients need.

use cuttlefs_common::attr::{FileKind, Timestamp};
use cuttlefs_common::ids::InodeNo;
pub use cuttlefs_reference::Time;

/// The most clients of a walk.
pub const MOST_CLIENTS: usize = 4;
pub const UID: u32 = 1000;
pub const GID: u32 = 1000;

/// What a model notes of an inode for walks of several clients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Clients whose kernel has cached pages that another client has made stale.
    pub stale_for: [bool; MOST_CLIENTS],
    /// The change counters that clients were told last at an open.
    pub told: [Option<u64>; MOST_CLIENTS],
    /// Clients that have changed its contents since their last sync.
    pub unsynced_by: [bool; MOST_CLIENTS],
}

pub type Node = cuttlefs_reference::Node<Seen>;
pub type Model = cuttlefs_reference::Model<Seen>;

impl Seen {
    /// A client opens the file at this change counter. Returns whether the counter tells it that its cached pages may be stale, if they are.
    pub fn opened(&mut self, client: usize, change: u64) -> bool {
        let is_stale = std::mem::take(&mut self.stale_for[client]);
        let last = self.told[client];
        // Opens at the same time are answered in any order.
        self.told[client] = last.max(Some(change));
        !is_stale || last != Some(change)
    }
}

/// Effects of one client on others.
pub trait Clients {
    /// A client has changed the contents of the file.
    fn contents_changed(&mut self, ino: InodeNo, by: usize);
    /// Everything that a client has changed is durable.
    fn synced_by(&mut self, client: usize);
    /// The server was replaced. Clients may have made changes to files again, later than the first time, so any time is accepted for each file until
    /// the next look at it.
    fn written_again(&mut self);
    /// A server was lost that had changes in memory only; the next one does not know that there were any. Where a client was cut off before it could
    /// make such a change again, the file is as other clients saw it, so their cached pages may be good.
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
