//! When a client may look at a file or change it: what the other clients must have synced before.

use super::model::Node;
use super::site::Site;
use super::walk::{CALLER, Walk};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::Request;

impl<S: Site> Walk<S> {
    /// To be called before `client` looks at the file or changes it. Where a server may die with unsynced changes, syncs those that the other clients
    /// have made to the file: they could be lost, and the loss would show in what this client does.
    pub fn hand_over(&mut self, ino: InodeNo, client: usize) {
        if !self.site.dies_unsynced() {
            return;
        }
        let Some(node) = self.model.nodes.get(&ino) else { return };
        let unsynced = node.more.unsynced_by;
        for other in (0..self.site.clients()).filter(|other| *other != client && unsynced[*other]) {
            self.sync_client(other);
        }
    }

    /// As `hand_over`, for a client that cuts a file. If a server dies after the cut, space reserved beyond the new end stays if only unsynced writes
    /// had made the file longer (docs/recovery.md, "What is durable when"). So in that case this client's own writes are synced, too.
    pub fn hand_over_cut(&mut self, ino: InodeNo, client: usize, size: u64) {
        self.hand_over_synced_if(ino, client, |node| node.contents.reserves_past(size));
    }

    /// As `hand_over`, for a client that zeroes a range. If that leaves a page with nothing but zeros, the client brings back zeros after a server's
    /// death, and zeros need no page. So the client's writes that needed the page are synced, too.
    pub fn hand_over_zeroed(&mut self, ino: InodeNo, client: usize, offset: u64, end: u64) {
        self.hand_over_synced_if(ino, client, |node| node.contents.empties(offset, end));
    }

    /// As `hand_over`. Syncs the client's own writes as well, if a server may die with unsynced changes and `is_such` holds of the file.
    fn hand_over_synced_if(&mut self, ino: InodeNo, client: usize, is_such: impl Fn(&Node) -> bool) {
        let synced = self.site.dies_unsynced() && self.model.nodes.get(&ino).is_some_and(is_such);
        self.hand_over(ino, if synced { usize::MAX } else { client });
    }

    /// All clients send a heartbeat; those that must reclaim their files do.
    pub fn touch(&self) {
        (0..self.site.clients()).for_each(|index| self.touch_by(index));
    }

    pub fn touch_by(&self, client: usize) {
        let session = self.site.client(client).session();
        session.call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
    }
}
