//! Who may look at a file, or change it, and what others must have done before.

use super::model::Node;
use super::site::Site;
use super::walk::{CALLER, Walk};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::Request;

impl<S: Site> Walk<S> {
    /// A client is going to look at a file or to change it: what others have not synced of it is synced first, where a
    /// server's death in between would show, as it does between any two machines.
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

    /// The same of a client that cuts a file. Where a server dies with that, what is reserved past the new end stays if only
    /// unsynced writes had made the file longer (docs/recovery.md, "What is durable when"): so those are synced, too.
    pub fn hand_over_cut(&mut self, ino: InodeNo, client: usize, size: u64) {
        self.hand_over_synced_if(ino, client, |node| node.contents.reserves_past(size));
    }

    /// The same of a client that zeroes a range. Where that leaves nothing but zeros of a page that stays, a client of a server
    /// that dies brings back zeros, which need no page: so what made it needed is synced, too.
    pub fn hand_over_zeroed(&mut self, ino: InodeNo, client: usize, offset: u64, end: u64) {
        self.hand_over_synced_if(ino, client, |node| node.contents.empties(offset, end));
    }

    /// As `hand_over`; of such a file the client's own writes are synced, too, where a server may die with them.
    fn hand_over_synced_if(&mut self, ino: InodeNo, client: usize, is_such: impl Fn(&Node) -> bool) {
        let synced = self.site.dies_unsynced() && self.model.nodes.get(&ino).is_some_and(is_such);
        self.hand_over(ino, if synced { usize::MAX } else { client });
    }

    /// All clients say that they live, and reclaim their files if they must.
    pub fn touch(&self) {
        (0..self.site.clients()).for_each(|index| self.touch_by(index));
    }

    pub fn touch_by(&self, client: usize) {
        let session = self.site.client(client).session();
        session.call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
    }
}
