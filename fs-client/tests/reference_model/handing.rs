//! Who may look at a file, or change it, and what others must have done before.

use super::model::Node;
use super::site::Site;
use super::step::How;
use super::walk::{CALLER, READ, Walk, open_how, status};
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{Request, SeekFor};

impl<S: Site> Walk<S> {
    /// A client is going to look at a file or to change it: what others have not synced of it is synced first, where a
    /// server's death in between would show, as it does between any two machines.
    pub fn hand_over(&mut self, ino: InodeNo, client: usize) {
        if !self.site.dies_unsynced() && !self.site.writes_early() {
            return;
        }
        let Some(node) = self.model.nodes.get(&ino) else { return };
        let unsynced = node.unsynced_by;
        for other in (0..self.site.clients()).filter(|other| *other != client && unsynced[*other]) {
            if self.site.dies_unsynced() {
                self.sync_client(other);
            } else {
                // As if it closed the file: it goes on when its early writes are executed.
                self.touch_by(other);
                self.model.synced_by(other);
                self.open_for_writing(ino, client);
            }
        }
    }

    /// The same of a client that cuts a file. Where a server dies with that, what is reserved past the new end stays if only
    /// unsynced writes had made the file longer (docs/ARCHITECTURE.md, "What is durable when"): so those are synced, too.
    pub fn hand_over_cut(&mut self, ino: InodeNo, client: usize, size: u64) {
        self.hand_over_synced_if(ino, client, |node| node.reserves_past(size));
    }

    /// The same of a client that zeroes a range. Where that leaves nothing but zeros of a page that stays, a client of a server
    /// that dies brings back zeros, which need no page: so what made it needed is synced, too.
    pub fn hand_over_zeroed(&mut self, ino: InodeNo, client: usize, offset: u64, end: u64) {
        self.hand_over_synced_if(ino, client, |node| node.empties(offset, end));
    }

    /// As `hand_over`; of such a file the client's own writes are synced, too, where a server may die with them.
    fn hand_over_synced_if(&mut self, ino: InodeNo, client: usize, is_such: impl Fn(&Node) -> bool) {
        let synced = self.site.dies_unsynced() && self.model.nodes.get(&ino).is_some_and(is_such);
        self.hand_over(ino, if synced { usize::MAX } else { client });
    }

    /// A server with a log has died. What the next one does again may leave a page without a byte that is not zero: such a page may be
    /// a hole now (docs/ARCHITECTURE.md, "What is durable when").
    pub fn see_which_zeros_are_holes(&mut self) {
        if !self.site.answers_are_durable() {
            return;
        }
        let zeros_of = |node: &Node| {
            let is_zero =
                |page: u64| node.read(page * PAGE_SIZE_U64, PAGE_SIZE_U64).iter().all(|byte| *byte == 0);
            let with_bytes = node.pages.iter().filter(|(_, has_bytes)| **has_bytes).map(|(page, _)| *page);
            with_bytes.filter(|page| page * PAGE_SIZE_U64 < node.size() && is_zero(*page)).collect::<Vec<_>>()
        };
        let zeros: Vec<_> = self.model.nodes.iter().map(|(ino, node)| (*ino, zeros_of(node))).collect();
        for (ino, pages) in zeros.into_iter().filter(|(_, pages)| !pages.is_empty()) {
            let Ok(open) = status(self.site.client(0).open(&CALLER, ino, open_how(READ))) else { continue };
            self.check_cache(0, ino, open.keep_cache);
            let volume = self.site.client(0);
            for page in pages {
                let offset = page * PAGE_SIZE_U64;
                if status(volume.seek(&CALLER, open.handle, offset, SeekFor::Data)) != Ok(offset) {
                    self.model.node_mut(ino).pages.remove(&page);
                }
            }
            volume.release(open.handle);
        }
    }

    /// What orders a client's early writes behind those of others that closed the file.
    fn open_for_writing(&mut self, ino: InodeNo, client: usize) {
        if self.model.nodes[&ino].kind == FileKind::File {
            let how = How { write: true, ..READ };
            let open = status(self.site.client(client).open(&CALLER, ino, open_how(how))).expect("open");
            self.check_cache(client, ino, open.keep_cache);
            self.site.client(client).release(open.handle);
        }
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
