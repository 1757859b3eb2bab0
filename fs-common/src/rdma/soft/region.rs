//! Registered memory of one protection domain.
//!
//! # How it works
//! A registration gets one random 32-bit key that serves as lkey and rkey. Work requests and peers name memory by it. Every use looks the key up
//! here, so a key that was never given out, or whose last handle is gone, names nothing.
//!
//! # Invariants
//! * Key 0 names nothing; no two live registrations share a key.
//! * A region's memory is accessed only under a [`Touch`] of the region. Deregistering waits for all touches; after it there are none, even if
//!   somebody found the region before (a posted receive, a request whose reply is still to come).

use super::shm::ShmQp;
use crate::ids::{Lkey, Rkey};
use crate::memory::SharedMemory;
use crate::memory::paged::PagedMemory;
use crate::persist::Persistence;
use crate::rdma::verbs::{Access, FlushReach, MemoryRegion, Sge, SgeList, WcStatus, WindowId};
use crate::world::{Random, SystemRandom};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Weak};

/// A live registration.
pub(super) struct Region {
    pub(super) key: u32,
    /// The memory; of a paged region its frames.
    pub(super) memory: Arc<SharedMemory>,
    /// Memory whose pages come and go: every READ and WRITE looks its pages up.
    pub(super) paged: Option<Arc<PagedMemory>>,
    pub(super) access: Access,
    pub(super) persistence: Option<Arc<dyn Persistence>>,
    /// Whether the region is registered. Read-locked while its memory is accessed. It is the last lock to take, and nothing waits while holding it.
    live: RwLock<bool>,
}

/// The region stays registered while this lives.
pub(super) struct Touch<'r> {
    _live: RwLockReadGuard<'r, bool>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("key", &self.key).field("access", &self.access).finish_non_exhaustive()
    }
}

impl Region {
    /// The right to access the memory; `None`: the region was deregistered.
    pub(super) fn touch(&self) -> Option<Touch<'_>> {
        // Recursive: a thread may copy from a region to itself while another thread waits to deregister it.
        let live = self.live.read_recursive();
        live.then_some(()).map(|()| Touch { _live: live })
    }

    /// Length in bytes, as peers see it.
    pub(super) fn len(&self) -> u64 {
        self.paged.as_ref().map_or(self.memory.len() as u64, |paged| paged.translated().len())
    }

    /// A peer's READ of a range that was checked.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
        match &self.paged {
            Some(paged) => {
                paged.translated().read(offset, out);
            }
            None => self.memory.read_as_rnic(offset as usize, out),
        }
    }

    /// A peer's WRITE to a range that was checked.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        match &self.paged {
            Some(paged) => {
                paged.translated().write(offset, bytes);
            }
            None => self.memory.write_word_last(offset as usize, bytes),
        }
    }

    /// Whether a peer has any right to the region.
    pub(super) fn is_remote(&self) -> bool {
        let Access { remote_read, remote_write, remote_atomic, remote_flush, .. } = self.access;
        remote_read || remote_write || remote_atomic || remote_flush
    }

    /// How ranges become persistent, for a peer that maps the region.
    pub(super) fn kind(&self) -> PersistenceKind {
        match &self.persistence {
            None => PersistenceKind::None,
            Some(domain) if domain.by_cache_lines() => PersistenceKind::CacheLines,
            Some(_) => PersistenceKind::AtTarget,
        }
    }
}

/// How ranges of a region become persistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistenceKind {
    /// They do not.
    None,
    /// By cache-line write-back of any CPU that maps it.
    CacheLines,
    /// The target has to do it.
    AtTarget,
}

/// Spreads keys of regions, and numbers of queue pairs, as each work request looks one up. Only those are in a table that this side gave out: nobody can
/// choose some that fall together.
#[derive(Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    #[inline]
    fn write_u32(&mut self, key: u32) {
        self.write_u64(u64::from(key));
    }

    #[inline]
    fn write_u64(&mut self, key: u64) {
        // An odd number, the golden ratio of 64 bits: the table looks at the high bits, too.
        self.0 = (self.0 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// All registrations of one protection domain, and the connections to which they are announced.
#[derive(Default)]
pub(super) struct Registry {
    regions: RwLock<HashMap<u32, Arc<Region>, BuildHasherDefault<KeyHasher>>>,
    /// Shared-memory connections, to which regions are announced. Taken before any connection's own locks.
    connections: Mutex<Vec<Weak<ShmQp>>>,
    /// Exported windows, by `WindowId`.
    windows: RwLock<HashMap<u32, Arc<SharedMemory>>>,
}

impl Registry {
    /// Registers memory under a fresh key and announces it to connected peers.
    pub(super) fn insert(
        self: &Arc<Self>,
        memory: Arc<SharedMemory>,
        access: Access,
        persistence: Option<Arc<dyn Persistence>>,
    ) -> SoftRegion {
        self.add(memory, None, access, persistence)
    }

    /// As [`Self::insert`], for memory whose pages come and go.
    pub(super) fn insert_paged(self: &Arc<Self>, paged: Arc<PagedMemory>, access: Access) -> SoftRegion {
        self.add(paged.translated().frames().clone(), Some(paged), access, None)
    }

    fn add(
        self: &Arc<Self>,
        memory: Arc<SharedMemory>,
        paged: Option<Arc<PagedMemory>>,
        access: Access,
        persistence: Option<Arc<dyn Persistence>>,
    ) -> SoftRegion {
        let connections = self.connections.lock();
        let region = {
            let mut regions = self.regions.write();
            let key = loop {
                let key = SystemRandom.next_u64() as u32;
                if key != 0 && !regions.contains_key(&key) {
                    break key;
                }
            };
            let region =
                Arc::new(Region { key, memory, paged, access, persistence, live: RwLock::new(true) });
            regions.insert(key, region.clone());
            region
        };
        if region.is_remote() {
            for connection in connections.iter().filter_map(Weak::upgrade) {
                connection.announce(&region);
            }
        }
        SoftRegion { registry: self.clone(), region }
    }

    /// Exports a window to peers that connect from now on.
    pub(super) fn export(&self, id: WindowId, memory: Arc<SharedMemory>) {
        self.windows.write().insert(id as u32, memory);
    }

    /// The exported windows in `WindowId::ALL` order.
    pub(super) fn windows(&self) -> [Option<Arc<SharedMemory>>; 3] {
        let windows = self.windows.read();
        WindowId::ALL.map(|id| windows.get(&(id as u32)).cloned())
    }

    /// Adds a connection to which every region is announced, beginning with those that exist.
    pub(super) fn add_connection(&self, connection: &Arc<ShmQp>) {
        let mut connections = self.connections.lock();
        connections.retain(|known| known.strong_count() > 0);
        for region in self.regions.read().values().filter(|region| region.is_remote()) {
            connection.announce(region);
        }
        connections.push(Arc::downgrade(connection));
    }

    /// Whether any memory here is such that a peer may have a slot of it.
    pub(super) fn has_paged(&self) -> bool {
        self.regions.read().values().any(|region| region.paged.is_some())
    }

    /// Forgets a closed connection. `is_over`: its peer accesses no memory of this side any more.
    pub(super) fn remove_connection(&self, connection: &ShmQp, is_over: bool) {
        for paged in self.regions.read().values().filter_map(|region| region.paged.as_ref()) {
            paged.release_slots(connection.slot_owner(), is_over);
        }
        self.connections.lock().retain(|known| !std::ptr::eq(known.as_ptr(), connection));
    }

    /// The region of a key.
    pub(super) fn find(&self, key: u32) -> Option<Arc<Region>> {
        self.regions.read().get(&key).cloned()
    }

    /// Checks the local ranges of a request; `write` if the provider will write them.
    #[inline]
    pub(super) fn local(&self, ranges: &SgeList, write: bool) -> Result<Local, WcStatus> {
        let first = match ranges.as_slice() {
            [] => None,
            [only] => Some(self.local_range(*only, write)?),
            all => return self.several(all, write),
        };
        Ok(Local { first, more: Box::default() })
    }

    #[cold]
    fn several(&self, ranges: &[Sge], write: bool) -> Result<Local, WcStatus> {
        let mut all = ranges.iter().map(|range| self.local_range(*range, write));
        Ok(Local { first: all.next().transpose()?, more: all.collect::<Result<_, _>>()? })
    }

    #[inline]
    fn local_range(&self, sge: Sge, write: bool) -> Result<LocalRange, WcStatus> {
        let region = self.find(sge.lkey.0).ok_or(WcStatus::LocalProtection)?;
        // This side reaches paged memory by its own means.
        let allowed =
            region.paged.is_none() && (!write || (region.access.local_write && region.memory.is_writable()));
        if !allowed || !region.memory.contains(sge.offset, u64::from(sge.len)) {
            return Err(WcStatus::LocalProtection);
        }
        Ok(LocalRange { region, offset: sge.offset as usize, len: sge.len as usize })
    }

    /// Checks a peer's access to memory here.
    pub(super) fn remote(
        &self,
        key: u64,
        offset: u64,
        len: u64,
        need: Need,
    ) -> Result<Arc<Region>, WcStatus> {
        let key = u32::try_from(key).map_err(|_| WcStatus::RemoteAccess)?;
        let region = self.find(key).ok_or(WcStatus::RemoteAccess)?;
        need.check(region.access, region.len(), region.memory.is_writable(), offset, len)?;
        Ok(region)
    }
}

/// What a one-sided request does to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Read,
    Write,
    Atomic,
    Flush,
}

impl Need {
    /// Checks a key's rights, the range and the alignment. Every link checks them only here.
    pub(super) fn check(
        self,
        access: Access,
        region_len: u64,
        is_writable: bool,
        offset: u64,
        len: u64,
    ) -> Result<(), WcStatus> {
        let allowed = match self {
            Need::Read => access.remote_read,
            Need::Write => access.remote_write && is_writable && offset >= access.own_bytes,
            Need::Atomic => access.remote_atomic && is_writable && offset >= access.own_bytes,
            Need::Flush => access.remote_flush,
        };
        if !allowed || offset.checked_add(len).is_none_or(|end| end > region_len) {
            return Err(WcStatus::RemoteAccess);
        }
        if self == Need::Atomic && !offset.is_multiple_of(8) {
            return Err(WcStatus::RemoteInvalid);
        }
        Ok(())
    }
}

/// A checked local range. It keeps its region mapped, but not registered.
#[derive(Clone, Debug)]
struct LocalRange {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

/// The checked local ranges of a request, in order: one string of bytes. Nearly all requests have one range, and this is made, moved and dropped for
/// each of them, so more than one cost an allocation.
#[derive(Clone, Debug)]
pub(super) struct Local {
    first: Option<LocalRange>,
    more: Box<[LocalRange]>,
}

/// A range of memory that may be accessed while this lives.
pub(super) struct Piece<'r> {
    pub(super) memory: &'r SharedMemory,
    pub(super) offset: usize,
    pub(super) len: usize,
    /// `None`: memory of a test's own, which nobody deregisters.
    _touch: Option<Touch<'r>>,
}

/// The local ranges of a request, whose regions all stay registered while this lives.
pub(super) struct Held<'r> {
    first: Option<Piece<'r>>,
    more: Vec<Piece<'r>>,
}

#[cfg(test)]
impl<'r> Held<'r> {
    /// Pieces of a test's own memory, at these places.
    pub(super) fn of(memory: &'r SharedMemory, places: &[(usize, usize)]) -> Self {
        let piece =
            |(offset, len): &(usize, usize)| Piece { memory, offset: *offset, len: *len, _touch: None };
        Self { first: places.first().map(piece), more: places.iter().skip(1).map(piece).collect() }
    }
}

impl LocalRange {
    #[inline]
    fn hold(&self) -> Result<Piece<'_>, WcStatus> {
        let touch = self.region.touch().ok_or(WcStatus::LocalProtection)?;
        Ok(Piece { memory: &self.region.memory, offset: self.offset, len: self.len, _touch: Some(touch) })
    }
}

impl Local {
    /// Bytes of all of them.
    #[inline]
    pub(super) fn len(&self) -> usize {
        let first = self.first.as_ref().map_or(0, |range| range.len);
        first + self.more.iter().map(|range| range.len).sum::<usize>()
    }

    /// Whether it is room for the word that an atomic brings: one range of eight bytes.
    pub(super) fn is_word(&self) -> bool {
        self.len() == 8 && self.more.is_empty()
    }

    /// Gives the right to access the memory: all of it, or none.
    ///
    /// # Errors
    /// `LocalProtection`: a region was deregistered.
    #[inline]
    pub(super) fn hold(&self) -> Result<Held<'_>, WcStatus> {
        let first = match &self.first {
            Some(range) => Some(range.hold()?),
            None => None,
        };
        let more = if self.more.is_empty() { Vec::new() } else { self.hold_more()? };
        Ok(Held { first, more })
    }

    #[cold]
    fn hold_more(&self) -> Result<Vec<Piece<'_>>, WcStatus> {
        self.more.iter().map(LocalRange::hold).collect()
    }
}

impl<'r> Held<'r> {
    /// The piece, if there is one and no other.
    #[inline]
    pub(super) fn only(&self) -> Option<&Piece<'r>> {
        self.first.as_ref().filter(|_| self.more.is_empty())
    }

    /// The pieces of the string, in order.
    #[inline]
    pub(super) fn pieces(&self) -> impl Iterator<Item = &Piece<'r>> {
        self.first.iter().chain(&self.more)
    }

    /// Bytes of all of them.
    pub(super) fn len(&self) -> usize {
        self.pieces().map(|piece| piece.len).sum()
    }

    /// Copies the bytes from `from` on out, which must be there.
    pub(super) fn read_from(&self, from: usize, out: &mut [u8]) {
        assert!(from + out.len() <= self.len(), "checked against the local ranges before");
        let (mut skipped, mut rest) = (from, out);
        for piece in self.pieces() {
            if skipped >= piece.len {
                skipped -= piece.len;
                continue;
            }
            let (part, behind) = rest.split_at_mut(rest.len().min(piece.len - skipped));
            piece.memory.read(piece.offset + skipped, part);
            (skipped, rest) = (0, behind);
        }
    }

    /// Copies the whole string out; `out` has its length.
    pub(super) fn read(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len(), "local ranges are read whole");
        self.read_from(0, out);
    }

    /// Copies bytes to the start of the string, into which they must fit.
    pub(super) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len(), "checked against the local ranges before");
        let mut rest = bytes;
        for piece in self.pieces() {
            let (part, behind) = rest.split_at(rest.len().min(piece.len));
            piece.memory.write(piece.offset, part);
            rest = behind;
        }
    }
}

/// The handle of a registration; deregisters when dropped.
pub(super) struct SoftRegion {
    registry: Arc<Registry>,
    region: Arc<Region>,
}

impl MemoryRegion for SoftRegion {
    fn lkey(&self) -> Lkey {
        Lkey(self.region.key)
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.region.key)
    }

    fn flush_reach(&self) -> FlushReach {
        FlushReach::of(self.region.access, self.region.persistence.is_some())
    }

    fn memory(&self) -> &Arc<SharedMemory> {
        &self.region.memory
    }
}

impl Drop for SoftRegion {
    fn drop(&mut self) {
        self.registry.regions.write().remove(&self.region.key);
        // Waits for copies that are under way.
        *self.region.live.write() = false;
        if self.region.is_remote() {
            for connection in self.registry.connections.lock().iter().filter_map(Weak::upgrade) {
                connection.withdraw(self.region.key);
            }
        }
    }
}
