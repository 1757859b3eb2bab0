//! The regions of both sides of a connection over shared memory. This side's are announced to the peer: an entry in a directory in shared memory, and
//! a descriptor over the socket. The peer's are mapped here when a request first names them.
//!
//! # Failure
//! A full socket keeps announcements for later, and the peer's requests wait for them up to [`ANNOUNCEMENT_WAIT`]. A peer's announcement that is wrong
//! is ignored: requests for that region are `RemoteAccess`.

use super::connection::{Sending, ShmQp};
use super::ring::DIRECTORY_LEN;
use super::wire::ShmMessage;
use crate::memory::SharedMemory;
use crate::memory::paged::{PagedMemory, Translated};
use crate::rdma::soft::fds;
use crate::rdma::soft::region::{PersistenceKind, Region};
use crate::rdma::soft::sys;
use crate::rdma::verbs::{Access, PagedAccess, WcStatus};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a request waits for the descriptor of a region that the peer's directory lists but whose
/// announcement did not fit its socket buffer yet. The peer sends it when it next polls.
const ANNOUNCEMENT_WAIT: Duration = Duration::from_secs(2);

/// The memory of a peer's region.
pub(super) enum PeerMemory {
    Whole(SharedMemory),
    /// Its pages come and go; this side's slot in its table, for WRITEs.
    Paged(Translated, usize),
}

impl PeerMemory {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Whole(memory) => memory.len() as u64,
            Self::Paged(memory, _) => memory.len(),
        }
    }

    /// The memory as a whole. Only READs and WRITEs have a right to paged memory.
    pub(super) fn whole(&self) -> Result<&SharedMemory, WcStatus> {
        match self {
            Self::Whole(memory) => Ok(memory),
            Self::Paged(..) => Err(WcStatus::RemoteInvalid),
        }
    }
}

/// A region of the peer, mapped here.
pub(super) struct PeerRegion {
    pub(super) memory: PeerMemory,
    pub(super) access: Access,
    pub(super) persistence: PersistenceKind,
    /// Offset of its entry in the peer's directory. It was checked when the region was announced.
    pub(super) directory_at: usize,
}

pub(super) struct Announcements {
    /// The key in each entry of this side's directory; 0: free.
    pub(super) directory: Vec<u32>,
    /// Announcements that the socket has not taken yet. Bounded by the directory.
    pub(super) pending: VecDeque<(Arc<Region>, u32)>,
}

impl ShmQp {
    /// Makes a region reachable for the peer. A full directory leaves it unreachable: `RemoteAccess` there.
    pub(in crate::rdma::soft) fn announce(&self, region: &Arc<Region>) {
        let mut announcements = self.announcements.lock();
        let Some(index) = announcements.directory.iter().position(|key| *key == 0) else {
            tracing::warn!(
                qp = self.core.number.0,
                "more than {DIRECTORY_LEN} regions; the peer cannot reach all"
            );
            return;
        };
        announcements.directory[index] = region.key;
        self.directory_word(index).store(region.key, Ordering::Release);
        announcements.pending.push_back((region.clone(), index as u32));
        self.send_announcements(&mut announcements);
    }

    /// Ends the peer's access to a region.
    pub(in crate::rdma::soft) fn withdraw(&self, key: u32) {
        let mut announcements = self.announcements.lock();
        announcements.pending.retain(|(region, _)| region.key != key);
        if let Some(index) = announcements.directory.iter().position(|known| *known == key) {
            self.directory_word(index).store(0, Ordering::Release);
            announcements.directory[index] = 0;
        }
    }

    fn directory_word(&self, index: usize) -> &std::sync::atomic::AtomicU32 {
        self.parts.memory.atomic_u32(self.parts.side.directory_at(index))
    }

    pub(super) fn send_announcements(&self, announcements: &mut Announcements) {
        while let Some((region, index)) = announcements.pending.front() {
            if let Some(paged) = &region.paged {
                match self.announce_paged(region, paged, *index) {
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(error) => {
                        tracing::warn!(qp = self.core.number.0, %error, "paged memory could not be announced");
                    }
                    Ok(()) => {}
                }
                announcements.pending.pop_front();
                continue;
            }
            if region.memory.is_part() {
                tracing::warn!(
                    "memory that is a part of a device is not for peers that map it; use another link"
                );
                announcements.pending.pop_front();
                continue;
            }
            let message = ShmMessage::Announce {
                rkey: region.key,
                index: *index,
                access: region.access,
                memory_len: region.memory.len() as u64,
                persistence: region.kind(),
            };
            let writable = region.access.remote_write || region.access.remote_atomic;
            let sent = if writable {
                fds::send(&self.parts.socket, &message.encode(), &[region.memory.fd()])
            } else {
                sys::read_only_descriptor(region.memory.fd())
                    .and_then(|fd| fds::send(&self.parts.socket, &message.encode(), &[fd.as_fd()]))
            };
            match sent {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::debug!(qp = self.core.number.0, %error, "a region could not be announced");
                }
            }
            announcements.pending.pop_front();
        }
        self.unannounced.store(!announcements.pending.is_empty(), Ordering::Release);
    }

    /// Announces memory whose pages come and go. The peer gets a slot of its own, in which it notes what it writes.
    fn announce_paged(&self, region: &Region, paged: &PagedMemory, index: u32) -> std::io::Result<()> {
        let slot = paged.claim_slot(self.slot_owner()).ok_or_else(|| {
            std::io::Error::other("it has no more slots for peers that map it; connect over another link")
        })?;
        let (frames, table) = (paged.translated().frames(), paged.translated().table());
        let message = ShmMessage::AnnouncePaged {
            rkey: region.key,
            index,
            access: if region.access.remote_write { PagedAccess::ReadWrite } else { PagedAccess::Read },
            memory_len: region.len(),
            frames_len: frames.len() as u64,
            table_len: table.len() as u64,
            slot: slot as u32,
        };
        let sent = fds::send(&self.parts.socket, &message.encode(), &[frames.fd(), table.fd()]);
        if sent.is_err() {
            // The peer has not heard of it.
            paged.return_slot(slot);
        }
        sent
    }

    /// The name by which paged memory knows this connection's slots.
    pub(in crate::rdma::soft) fn slot_owner(&self) -> u64 {
        u64::from(self.core.number.0)
    }

    /// Takes announcements from the socket.
    fn take_announcements(&self, sending: &mut Sending) {
        let mut bytes = [0u8; 512];
        while let Ok(Some((len, descriptors))) = fds::receive::<2>(&self.parts.socket, &mut bytes) {
            let (rkey, index, access, persistence, mapped) = match ShmMessage::parse(&bytes[..len]) {
                Ok(ShmMessage::Announce { rkey, index, access, memory_len, persistence }) => {
                    let writable = access.remote_write || access.remote_atomic;
                    let mapped = self.map_whole(descriptors, memory_len, writable, persistence);
                    (rkey, index, access, persistence, mapped)
                }
                Ok(ShmMessage::AnnouncePaged {
                    rkey,
                    index,
                    access,
                    memory_len,
                    frames_len,
                    table_len,
                    slot,
                }) => {
                    let mapped = self
                        .map_paged(descriptors, memory_len, [frames_len, table_len])
                        .map(|memory| PeerMemory::Paged(memory, slot as usize));
                    (rkey, index, access.rights(), PersistenceKind::None, mapped)
                }
                _ => {
                    tracing::warn!(qp = self.core.number.0, "ignored a message that is no announcement");
                    continue;
                }
            };
            if index as usize >= DIRECTORY_LEN {
                tracing::warn!(qp = self.core.number.0, "ignored an announcement past the directory");
                continue;
            }
            let directory_at = self.parts.side.other().directory_at(index as usize);
            match mapped {
                Ok(memory) => {
                    let memory_words = &self.parts.memory;
                    sending.peers.retain(|key, known| {
                        memory_words.atomic_u32(known.directory_at).load(Ordering::Acquire) == *key
                    });
                    if sending.peers.len() < DIRECTORY_LEN {
                        sending.peers.insert(rkey, PeerRegion { memory, access, persistence, directory_at });
                    }
                }
                Err(error) => {
                    tracing::warn!(qp = self.core.number.0, %error, "cannot map a peer's region")
                }
            }
        }
    }

    fn map_whole(
        &self,
        descriptors: Vec<OwnedFd>,
        len: u64,
        writable: bool,
        persistence: PersistenceKind,
    ) -> std::io::Result<PeerMemory> {
        let [fd] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| incomplete())?;
        let len = usize::try_from(len).map_err(std::io::Error::other)?;
        self.map_region(fd, len, writable, persistence).map(PeerMemory::Whole)
    }

    fn map_paged(&self, descriptors: Vec<OwnedFd>, len: u64, lens: [u64; 2]) -> std::io::Result<Translated> {
        let [frames, table] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| incomplete())?;
        let map = |fd, len| {
            let len = usize::try_from(len).map_err(std::io::Error::other)?;
            SharedMemory::from_fd(fd, len, true)
        };
        Translated::over(map(frames, lens[0])?, map(table, lens[1])?, len)
    }

    pub(super) fn is_alive(&self, rkey: u32, region: &PeerRegion) -> bool {
        self.parts.memory.atomic_u32(region.directory_at).load(Ordering::Acquire) == rkey
    }

    /// Whether the peer's directory lists a key whose descriptor is not here yet.
    fn is_listed(&self, rkey: u32) -> bool {
        let side = self.parts.side.other();
        rkey != 0
            && (0..DIRECTORY_LEN).any(|index| {
                self.parts.memory.atomic_u32(side.directory_at(index)).load(Ordering::Acquire) == rkey
            })
    }

    /// Makes sure the peer's region is mapped if it can be. `false`: wait for its announcement.
    pub(super) fn prepare(&self, sending: &mut Sending, rkey: u32) -> bool {
        if sending.peers.get(&rkey).is_some_and(|region| self.is_alive(rkey, region)) {
            return true;
        }
        sending.peers.remove(&rkey);
        self.take_announcements(sending);
        if sending.peers.contains_key(&rkey) || !self.is_listed(rkey) {
            sending.waiting_since = None;
            return true;
        }
        let since = *sending.waiting_since.get_or_insert_with(Instant::now);
        let waited = since.elapsed() >= ANNOUNCEMENT_WAIT;
        if waited {
            sending.waiting_since = None;
        }
        waited
    }
}

fn incomplete() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, "an announcement lacks descriptors, or has too many")
}
