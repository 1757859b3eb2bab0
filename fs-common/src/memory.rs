//! Shared memory: a mapped memfd that several threads and processes may touch at once.
//!
//! Owns the mapping. All access goes through copies and atomics that tolerate a concurrent writer: bytes may be torn,
//! which the protocols above detect (seqlocks, checksums), but nothing is undefined. No reference into the memory is
//! ever handed out. Beside it, the functions that keep the process's heap small. `pointed` is memory whose pages
//! are pointed at pages of other memory; `paged` is memory whose pages an RNIC looks up in a table.
//!
//! # Invariants
//! * The file behind a mapping is sealed against shrinking before it is mapped, so no access can fault. A log file
//!   (`map_persistent`) cannot be sealed: its opener has allocated its blocks and locked it.
//! * A mapping's address and length never change while a `SharedMemory` lives.
//!
//! # Failure
//! Out-of-range access is a broken internal invariant and asserts; callers check peer-given ranges first
//! (`contains`). A foreign descriptor that is not sealed or too small is an error.

#[cfg(feature = "model-check")]
mod again;
mod made;
/// Memory whose pages come and go, for an RNIC that looks each page up.
pub mod paged;
mod pointed;

pub use made::HUGE_PAGE;
pub use pointed::{PointError, PointedMemory};

use crate::sync::fence;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// In builds with debug assertions, memory that is lent again holds this in the place of its last user's bytes. It must never be sent or shown to
/// anybody: the tests that look at what peers are sent look for it.
pub const STALE: [u8; 16] = [0xdb; 16];

/// Overwrites memory whose last user's bytes nobody may see: with `STALE`, in builds with debug assertions only.
pub fn spoil(bytes: &mut [u8]) {
    if cfg!(debug_assertions) {
        bytes.fill(STALE[0]);
    }
}

/// A sealed, mapped memfd.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    /// The memory is a part of what `fd` opens, which no peer may have as a whole.
    is_part: bool,
    /// The pages show other memory from time to time: an RNIC must follow the mapping, and not keep pages.
    is_pointed: bool,
    /// Number of registrations with RNICs. They keep the pages that are there now, whatever happens to the mapping.
    pins: AtomicU32,
    /// The model checker's view of the memory.
    #[cfg(feature = "model-check")]
    pub modelled: crate::sync::Words,
}

/// See [`SharedMemory::pin`].
#[derive(Debug)]
pub struct Pinned(Arc<SharedMemory>);

impl std::ops::Deref for Pinned {
    type Target = Arc<SharedMemory>;

    fn deref(&self) -> &Arc<SharedMemory> {
        &self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::AcqRel);
    }
}

// SAFETY: the mapping is plain memory owned by this value; every access is an atomic or an opaque copy.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: concurrent access through `&self` is what the accessors are made for.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates zeroed memory of `len_bytes` (rounded up to a page), sealed against resizing.
    pub fn new(name: &str, len_bytes: usize) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let len = len_bytes.max(1).next_multiple_of(page);
        #[cfg(feature = "model-check")]
        if let Some((fd, base)) = again::take(len) {
            return Ok(Self::mapped(fd, base, len, true));
        }
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(fd, len, true)
    }

    /// Maps a descriptor a peer handed over. It must be sealed against shrinking and hold `len_bytes`.
    pub fn from_fd(fd: OwnedFd, len_bytes: usize, writable: bool) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the peer's memory is not sealed against shrinking",
            ));
        }
        let size = rustix::fs::fstat(&fd)?.st_size;
        if len_bytes == 0 || u64::try_from(size).unwrap_or(0) < len_bytes as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the peer's memory has {size} bytes where {len_bytes} were announced"),
            ));
        }
        Self::map(fd, len_bytes, writable)
    }

    /// Maps a part of a regular file, or of a device of persistent memory, for reading and writing: a log. It cannot be sealed, so the caller trusts
    /// everybody who can shorten it. With `sync` the mapping is `MAP_SYNC`, which the kernel grants for persistent memory only: a cache line that is
    /// written back there is durable, the file's metadata included. The kernel checks the bounds of a device.
    ///
    /// # Errors
    /// The file is not regular or shorter than that, or the kernel grants no `MAP_SYNC`.
    pub fn map_persistent(fd: OwnedFd, len_bytes: usize, offset: u64, sync: bool) -> io::Result<Self> {
        use rustix::fs::FileType;
        let stat = rustix::fs::fstat(&fd)?;
        let fits = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => offset
                .checked_add(len_bytes as u64)
                .is_some_and(|end| u64::try_from(stat.st_size).unwrap_or(0) >= end),
            FileType::CharacterDevice => true,
            _ => false,
        };
        if !fits || len_bytes == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("no regular file of {len_bytes} bytes"),
            ));
        }
        let flags = if sync { MapFlags::SHARED_VALIDATE | MapFlags::SYNC } else { MapFlags::SHARED };
        let mut memory = Self::map_as(fd, len_bytes, offset, true, flags)?;
        memory.is_part = offset > 0;
        Ok(memory)
    }

    fn map(fd: OwnedFd, len: usize, writable: bool) -> io::Result<Self> {
        Self::map_as(fd, len, 0, writable, MapFlags::SHARED)
    }

    fn map_as(fd: OwnedFd, len: usize, offset: u64, writable: bool, flags: MapFlags) -> io::Result<Self> {
        let mut prot = ProtFlags::READ;
        if writable {
            prot |= ProtFlags::WRITE;
        }
        let base = made::map_file(&fd, len, offset, prot, flags)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        Ok(Self::mapped(fd, base, len, writable))
    }

    fn mapped(fd: OwnedFd, base: NonNull<u8>, len: usize, writable: bool) -> Self {
        Self {
            fd,
            base,
            len,
            writable,
            is_part: false,
            is_pointed: false,
            pins: AtomicU32::new(0),
            #[cfg(feature = "model-check")]
            modelled: crate::sync::Words::default(),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true; here because clippy wants a pair.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this mapping may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether the pages show other memory from time to time ([`PointedMemory`]).
    pub fn is_pointed(&self) -> bool {
        self.is_pointed
    }

    /// The memfd, to hand to a peer. The memfd of pointed memory does not show the same bytes.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether the descriptor opens more than this memory, so that no link can map it: the part of a device that a log has.
    pub fn is_part(&self) -> bool {
        self.is_part
    }

    /// A second mapping of the same memory without write permission.
    pub fn read_only_view(&self) -> io::Result<Self> {
        Self::map(self.fd.try_clone()?, self.len, false)
    }

    /// First address, for device registration (`ibv_reg_mr`, io_uring fixed buffers). The memory may change
    /// under any reader; never make a reference from it.
    pub fn base_address(&self) -> NonNull<u8> {
        self.base
    }

    /// Keeps the pages that are there now as long as the returned value lives, because an RNIC reads and writes them.
    pub fn pin(self: &Arc<Self>) -> Pinned {
        self.pins.fetch_add(1, Ordering::AcqRel);
        Pinned(self.clone())
    }

    /// Gives the whole pages of a range back to the system; they read as zeros from then on. Pinned memory stays unchanged: otherwise the processor
    /// would see new pages, and the RNIC the old ones.
    ///
    /// # Errors
    /// The system cannot take the memory back; nothing is lost.
    pub fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(self.contains(offset as u64, len as u64), "discard outside of the memory");
        let page = rustix::param::page_size();
        let (start, end) = (offset.next_multiple_of(page), (offset + len) / page * page);
        if start >= end || self.is_part || self.pins.load(Ordering::Acquire) > 0 {
            return Ok(());
        }
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.fd, how, start as u64, (end - start) as u64)?)
    }

    /// Whether `[offset, offset + len)` lies inside. Use it on every range a peer names.
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len as u64)
    }

    /// Copies bytes out. A concurrent writer can tear them.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(self.contains(offset as u64, out.len() as u64), "read past shared memory");
        #[cfg(feature = "model-check")]
        if self.modelled.read(offset, out) {
            return;
        }
        // SAFETY: the source range was just checked; `out` is exclusively ours; the copy is opaque to the
        // compiler, so a racing writer yields torn bytes, not undefined behaviour.
        unsafe { racing_copy(self.base.as_ptr().add(offset), out.as_mut_ptr(), out.len()) }
    }

    /// Reads as an RNIC does for a READ: aligned words of eight bytes are not torn in a range of at most [`Self::WHOLE_WORDS_MAX`] bytes, and later
    /// reads find nothing older than this one. Longer ranges can be torn anywhere.
    pub fn read_as_rnic(&self, offset: usize, out: &mut [u8]) {
        assert!(self.contains(offset as u64, out.len() as u64), "read past shared memory");
        if out.len() <= Self::WHOLE_WORDS_MAX && offset.is_multiple_of(8) {
            let (words, rest) = out.as_chunks_mut::<8>();
            let words_len = words.len() * 8;
            self.load_words(offset, words);
            self.read(offset + words_len, rest);
        } else {
            self.read(offset, out);
        }
        fence(Ordering::Acquire);
    }

    /// Loads each word once. Asserts that they are aligned and inside.
    fn load_words(&self, offset: usize, words: &mut [[u8; 8]]) {
        #[cfg(feature = "model-check")]
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.load_u64_relaxed(offset + index * 8).to_ne_bytes();
        }
        #[cfg(not(feature = "model-check"))]
        {
            assert!(self.contains(offset as u64, words.len() as u64 * 8) && offset.is_multiple_of(8));
            // SAFETY: in range and aligned, mapped for as long as `&self`; small relaxed loads, as in `load_u64_relaxed`.
            let of = unsafe {
                std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast::<AtomicU64>(), words.len())
            };
            for (word, of) in words.iter_mut().zip(of) {
                *word = of.load(Ordering::Relaxed).to_ne_bytes();
            }
        }
    }

    /// Copies to other memory, reading as [`Self::read_as_rnic`] does.
    pub fn copy_as_rnic(&self, offset: usize, to: &SharedMemory, to_offset: usize, len: usize) {
        if len > Self::WHOLE_WORDS_MAX {
            self.copy_to(offset, to, to_offset, len);
            return fence(Ordering::Acquire);
        }
        let mut bytes = [0; Self::WHOLE_WORDS_MAX];
        self.read_as_rnic(offset, &mut bytes[..len]);
        to.write(to_offset, &bytes[..len]);
    }

    /// Longest range in which [`Self::read_as_rnic`] does not tear aligned words: the entries of 64 pages.
    pub const WHOLE_WORDS_MAX: usize = 512;

    /// Copies bytes in. A concurrent reader can see them torn.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(self.writable, "write to a read-only mapping");
        assert!(self.contains(offset as u64, bytes.len() as u64), "write past shared memory");
        #[cfg(feature = "model-check")]
        if self.modelled.write(offset, bytes) {
            return;
        }
        // SAFETY: the target range was just checked and is mapped writable; see `read` for races.
        unsafe { racing_copy(bytes.as_ptr(), self.base.as_ptr().add(offset), bytes.len()) }
    }

    /// As `write`, but if the range ends with an aligned word, that is stored after all other bytes ([`before_last_word`]), in one store. A reader that
    /// loads that word with acquire and finds it then finds the others, too. A string copy alone promises no order among its stores (Intel SDM volume 1,
    /// 7.3.9.3).
    pub fn write_word_last(&self, offset: usize, bytes: &[u8]) {
        assert!(self.writable, "write to a read-only mapping");
        assert!(self.contains(offset as u64, bytes.len() as u64), "write past shared memory");
        let (before, last) = bytes.split_at(before_last_word(offset as u64, bytes.len()));
        self.write(offset, before);
        if let Ok(word) = last.try_into() {
            self.store_u64(offset + before.len(), u64::from_ne_bytes(word), Ordering::Release);
        }
    }

    /// `copy_to` with the order of `write_word_last`.
    pub fn copy_to_word_last(&self, offset: usize, to: &SharedMemory, to_offset: usize, len: usize) {
        assert!(to.writable, "write to a read-only mapping");
        let before = before_last_word(to_offset as u64, len);
        self.copy_to(offset, to, to_offset, before);
        if before < len {
            let mut word = [0; 8];
            self.read(offset + before, &mut word);
            to.atomic_u64(to_offset + before).store(u64::from_ne_bytes(word), Ordering::Release);
        }
    }

    /// Writes the cache lines of the range back to the memory behind them, and fences: persistent memory is durable when this returns.
    pub fn write_back(&self, offset: usize, len: usize) {
        assert!(self.contains(offset as u64, len as u64), "write-back past shared memory");
        // SAFETY: the range was just checked and stays mapped while `self` lives.
        unsafe { crate::persist::cache_lines::write_back(self.base.as_ptr().add(offset), len) }
    }

    /// Copies between two shared memories (or within one, if the ranges do not overlap).
    pub fn copy_to(&self, offset: usize, to: &SharedMemory, to_offset: usize, len: usize) {
        assert!(to.writable, "write to a read-only mapping");
        assert!(self.contains(offset as u64, len as u64), "read past shared memory");
        assert!(to.contains(to_offset as u64, len as u64), "write past shared memory");
        // SAFETY: both ranges were just checked; see `read` for races.
        unsafe {
            racing_copy(self.base.as_ptr().add(offset), to.base.as_ptr().add(to_offset), len);
        }
    }

    /// Spoils a range, as [`spoil`] does.
    pub fn spoil(&self, offset: usize, len: usize) {
        if cfg!(debug_assertions) {
            self.fill(offset, len, STALE[0]);
        }
    }

    /// Fills a range with one byte.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(self.writable, "write to a read-only mapping");
        assert!(self.contains(offset as u64, len as u64), "fill past shared memory");
        // SAFETY: the range was just checked and is mapped writable; see `read` for races.
        unsafe { racing_fill(self.base.as_ptr().add(offset), byte, len) }
    }

    /// The `u64` at `offset` as an atomic. Asserts that it is aligned and inside, and that the mapping may be written. For read-only mappings there
    /// is `load_u64`.
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(self.writable, "an atomic in a read-only mapping");
        assert!(self.contains(offset as u64, 8) && offset.is_multiple_of(8), "misplaced u64");
        // SAFETY: in range, aligned, mapped writable, lives as long as `&self`; atomics may be shared with other processes.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Stores a `u64`. Asserts as `atomic_u64` does.
    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        #[cfg(feature = "model-check")]
        if let Some(word) = self.modelled.at(offset) {
            return word.store(value, order);
        }
        self.atomic_u64(offset).store(value, order);
    }

    /// Stores a `u64`, and fences: of two threads that store so and then load what the other has stored, one finds the other's (Dekker). Asserts as
    /// `atomic_u64` does.
    pub fn store_u64_fenced(&self, offset: usize, value: u64) {
        // On this processor an exchange is a fence, and costs less than a store with an `mfence` behind it.
        #[cfg(all(target_arch = "x86_64", not(feature = "model-check")))]
        {
            self.atomic_u64(offset).swap(value, Ordering::SeqCst);
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
        #[cfg(not(all(target_arch = "x86_64", not(feature = "model-check"))))]
        {
            self.store_u64(offset, value, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    /// Stores a `u64` and returns the one before. Asserts as `atomic_u64` does.
    pub fn swap_u64(&self, offset: usize, value: u64) -> u64 {
        #[cfg(feature = "model-check")]
        if let Some(word) = self.modelled.at(offset) {
            return word.swap(value, Ordering::AcqRel);
        }
        self.atomic_u64(offset).swap(value, Ordering::AcqRel)
    }

    /// Stores a `u64` if `expect` is there. Asserts as `atomic_u64` does.
    ///
    /// # Errors
    /// Another value is there: this one.
    pub fn compare_exchange_u64(&self, offset: usize, expect: u64, value: u64) -> Result<u64, u64> {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        #[cfg(feature = "model-check")]
        if let Some(word) = self.modelled.at(offset) {
            return word.compare_exchange(expect, value, success, failure);
        }
        self.atomic_u64(offset).compare_exchange(expect, value, success, failure)
    }

    /// As [`Self::compare_exchange_u64`], and fences, as [`Self::store_u64_fenced`] does.
    ///
    /// # Errors
    /// Another value is there: this one.
    pub fn compare_exchange_u64_fenced(&self, offset: usize, expect: u64, value: u64) -> Result<u64, u64> {
        #[cfg(all(target_arch = "x86_64", not(feature = "model-check")))]
        {
            let word = self.atomic_u64(offset);
            let found = word.compare_exchange(expect, value, Ordering::SeqCst, Ordering::Acquire);
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
            found
        }
        #[cfg(not(all(target_arch = "x86_64", not(feature = "model-check"))))]
        {
            let found = self.compare_exchange_u64(offset, expect, value);
            fence(Ordering::SeqCst);
            found
        }
    }

    /// The `u32` at `offset` as an atomic. Asserts as `atomic_u64` does.
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        assert!(self.writable, "an atomic in a read-only mapping");
        assert!(self.contains(offset as u64, 4) && offset.is_multiple_of(4), "misplaced u32");
        // SAFETY: as for `atomic_u64`.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The byte at `offset` as an atomic. Asserts as `atomic_u64` does.
    pub fn atomic_u8(&self, offset: usize) -> &AtomicU8 {
        assert!(self.writable, "an atomic in a read-only mapping");
        assert!(self.contains(offset as u64, 1), "misplaced u8");
        // SAFETY: as for `atomic_u64`.
        unsafe { AtomicU8::from_ptr(self.base.as_ptr().add(offset)) }
    }

    /// Loads a `u64` of any mapping with acquire ordering.
    pub fn load_u64(&self, offset: usize) -> u64 {
        let value = self.load_u64_relaxed(offset);
        fence(Ordering::Acquire);
        value
    }

    /// Loads a `u64` of any mapping with no ordering. Asserts that it is aligned and inside.
    pub fn load_u64_relaxed(&self, offset: usize) -> u64 {
        assert!(self.contains(offset as u64, 8) && offset.is_multiple_of(8), "misplaced u64");
        #[cfg(feature = "model-check")]
        if let Some(word) = self.modelled.at(offset) {
            return word.load(Ordering::Relaxed);
        }
        // SAFETY: in range, aligned, and mapped for as long as `&self`. The mapping may be read-only: of atomic accesses only small
        // relaxed loads are defined there (`std::sync::atomic`, "Atomic accesses to read-only memory"), and this is one.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }.load(Ordering::Relaxed)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A model maps nobody else's memory for writing, so this is what `new` made.
        #[cfg(feature = "model-check")]
        if self.writable
            && !self.is_part
            && !self.is_pointed
            && let Ok(fd) = self.fd.try_clone()
        {
            return again::leave(fd, self.base, self.len);
        }
        // SAFETY: base and len are of the one mapping this value owns; nothing borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Bytes of a WRITE of `len` bytes to `offset` that are stored before its last word; all, if it does not end with an aligned word.
pub(crate) fn before_last_word(offset: u64, len: usize) -> usize {
    let ends_with_one = len >= 8 && (offset + len as u64).is_multiple_of(8);
    if ends_with_one { len - 8 } else { len }
}

/// Copies `len` bytes where either side may be written by someone else meanwhile.
///
/// # Safety
/// Both ranges are valid for `len` bytes and do not overlap.
#[cfg(target_arch = "x86_64")]
pub unsafe fn racing_copy(from: *const u8, to: *mut u8, len: usize) {
    if len <= SHORT_COPY_MAX {
        // SAFETY: the caller's promise.
        return unsafe { racing_copy_short(from, to, len) };
    }
    // `rep movsb` (ERMS) runs at memory speed for pages and is opaque to the compiler, which therefore
    // cannot assume that the bytes hold still.
    // SAFETY: the caller gives valid ranges; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Up to so many bytes are copied by single loads and stores: one to eight nanoseconds, where `rep movsb` takes 13 to 20 to begin.
#[cfg(target_arch = "x86_64")]
const SHORT_COPY_MAX: usize = 256;

/// `racing_copy` of few bytes. The last load and store begin as much before the end as they are long, and may copy bytes a second time.
///
/// # Safety
/// As for `racing_copy`.
#[cfg(target_arch = "x86_64")]
unsafe fn racing_copy_short(from: *const u8, to: *mut u8, len: usize) {
    /// Copies as many bytes as a register has. Opaque to the compiler, as in `racing_copy`.
    macro_rules! copy {
        ($load:literal, $store:literal, $class:ident, $from:expr, $to:expr) => {
            std::arch::asm!(
                $load, $store, bytes = out($class) _, from = in(reg) $from, to = in(reg) $to,
                options(nostack, preserves_flags)
            )
        };
    }
    // SAFETY: each copy is of bytes that lie whole in the two ranges, which the caller gives.
    unsafe {
        match len {
            16.. => {
                for at in (0..len - 16).step_by(16).chain([len - 16]) {
                    copy!(
                        "movdqu {bytes}, [{from}]",
                        "movdqu [{to}], {bytes}",
                        xmm_reg,
                        from.add(at),
                        to.add(at)
                    );
                }
            }
            8.. => {
                for at in [0, len - 8] {
                    copy!("mov {bytes}, [{from}]", "mov [{to}], {bytes}", reg, from.add(at), to.add(at));
                }
            }
            4.. => {
                for at in [0, len - 4] {
                    copy!("mov {bytes:e}, [{from}]", "mov [{to}], {bytes:e}", reg, from.add(at), to.add(at));
                }
            }
            _ => {
                for at in 0..len {
                    copy!("mov {bytes}, [{from}]", "mov [{to}], {bytes}", reg_byte, from.add(at), to.add(at));
                }
            }
        }
    }
}

/// Copies `len` bytes where either side may be written by someone else meanwhile.
///
/// # Safety
/// Both ranges are valid for `len` bytes and do not overlap.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn racing_copy(from: *const u8, to: *mut u8, len: usize) {
    for index in 0..len {
        // SAFETY: in range by the caller's promise. Relaxed atomics of a byte: a race is defined, and `from` may be read-only.
        unsafe {
            let byte = AtomicU8::from_ptr(from.add(index).cast_mut()).load(Ordering::Relaxed);
            AtomicU8::from_ptr(to.add(index)).store(byte, Ordering::Relaxed);
        }
    }
}

/// Fills `len` bytes that someone else may read or write meanwhile.
///
/// # Safety
/// The range is valid for `len` bytes.
unsafe fn racing_fill(to: *mut u8, byte: u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller gives a valid range; the direction flag is clear by the ABI. Opaque to the compiler, as in `racing_copy`.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            in("al") byte,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for index in 0..len {
        // SAFETY: in range by the caller's promise; a relaxed atomic, so that a race is defined.
        unsafe { AtomicU8::from_ptr(to.add(index)) }.store(byte, Ordering::Relaxed);
    }
}

/// Heaps that malloc may have. Threads take turns with them; with more heaps each would keep the memory that its threads once needed.
const HEAPS: libc::c_int = 2;

/// Keeps the process's heap small. Call it before there are threads.
pub fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes a setting of malloc's, and no other thread allocates yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}

/// Gives unused memory of the heap back to the system.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim takes malloc's own locks; it may be called by any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_views_share() {
        let memory = SharedMemory::new("test", 10_000).expect("memfd");
        assert_eq!(memory.len() % rustix::param::page_size(), 0);
        memory.write(4090, b"across a page");
        let view = memory.read_only_view().expect("view");
        let mut out = [0u8; 13];
        view.read(4090, &mut out);
        assert_eq!(&out, b"across a page");
        memory.atomic_u64(16).store(7, Ordering::Release);
        assert_eq!((view.load_u64(16), view.load_u64_relaxed(16)), (7, 7));
    }

    #[test]
    fn atomics_that_can_be_stored_to_are_of_writable_mappings_only() {
        let view = SharedMemory::new("test", 4096).and_then(|memory| memory.read_only_view()).expect("view");
        let is_refused =
            |touch: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(touch)).is_err();
        assert!(is_refused(&|| {
            view.atomic_u64(0);
        }));
        assert!(is_refused(&|| {
            view.atomic_u32(0);
        }));
        assert!(is_refused(&|| {
            view.atomic_u8(0);
        }));
        assert!(is_refused(&|| view.fill(0, 1, 1)));
    }

    #[test]
    fn a_fill_fills_its_range_and_no_more() {
        let memory = SharedMemory::new("test", 4096).expect("memfd");
        for (offset, len) in [(0, 0), (0, 1), (7, 64), (100, 3001), (4095, 1)] {
            memory.fill(0, 4096, 1);
            memory.fill(offset, len, 9);
            let mut out = vec![0; 4096];
            memory.read(0, &mut out);
            let filled = |at: &usize| (offset..offset + len).contains(at);
            assert!((0..4096).all(|at| out[at] == if filled(&at) { 9 } else { 1 }), "{offset} {len}");
        }
    }

    #[test]
    fn discarded_pages_are_zeros_and_others_stay() {
        let page = rustix::param::page_size();
        let memory = SharedMemory::new("test", 4 * page).expect("memfd");
        memory.fill(0, 4 * page, 7);
        memory.discard(page - 1, 2 * page + 2).expect("discard");
        memory.discard(3 * page, 10).expect("less than a page");
        let mut out = vec![0u8; 4 * page];
        memory.read(0, &mut out);
        assert!(out[..page].iter().chain(&out[3 * page..]).all(|byte| *byte == 7));
        assert!(out[page..3 * page].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn pinned_pages_stay() {
        let memory = Arc::new(SharedMemory::new("test", 4096).expect("memfd"));
        memory.fill(0, 4096, 7);
        let (first, second) = (memory.pin(), memory.pin());
        drop(first);
        memory.discard(0, 4096).expect("discard");
        let mut out = [0u8; 4096];
        memory.read(0, &mut out);
        assert_eq!(out, [7; 4096]);
        drop(second);
        memory.discard(0, 4096).expect("discard");
        memory.read(0, &mut out);
        assert_eq!(out, [0; 4096]);
    }

    #[test]
    fn ranges_are_checked_without_overflow() {
        let memory = SharedMemory::new("test", 4096).expect("memfd");
        assert!(memory.contains(4096, 0));
        assert!(!memory.contains(4096, 1));
        assert!(!memory.contains(u64::MAX, 2));
    }

    #[test]
    fn the_last_word_is_where_the_whole_ends_and_nowhere_else() {
        for (offset, len, first) in
            [(0, 16, 8), (0, 8, 0), (3, 13, 5), (0, 7, 7), (1, 7, 7), (0, 15, 15), (8, 0, 0)]
        {
            assert_eq!(before_last_word(offset, len), first, "{len} bytes at {offset}");
        }
    }

    #[test]
    fn the_last_word_is_stored_last_and_nothing_is_lost() {
        let memory = SharedMemory::new("test", 4096).expect("memfd");
        let source = SharedMemory::new("test", 4096).expect("memfd");
        let bytes: Vec<u8> = (1..=100).collect();
        source.write(0, &bytes);
        for (offset, len) in [(0, 8), (8, 16), (16, 7), (24, 72), (5, 100), (3, 21)] {
            memory.fill(0, 4096, 0);
            memory.write_word_last(offset, &bytes[..len]);
            source.copy_to_word_last(0, &memory, 2048 + offset, len);
            for at in [offset, 2048 + offset] {
                let mut out = vec![0; len + 1];
                memory.read(at, &mut out);
                assert_eq!((&out[..len], out[len]), (&bytes[..len], 0));
            }
        }
    }

    #[test]
    fn copies_of_every_length_are_whole_and_no_longer() {
        let bytes: Vec<u8> = (0..600u32).map(|at| (at * 7 + 1) as u8 | 1).collect();
        let memory = SharedMemory::new("lengths", 4096).expect("memfd");
        for len in 0..bytes.len() {
            let offset = 100 + len % 17;
            memory.fill(0, 2048, 0);
            memory.write(offset, &bytes[..len]);
            let mut out = vec![9; len + 2];
            memory.read(offset - 1, &mut out);
            assert!(out[0] == 0 && out[1..=len] == bytes[..len] && out[len + 1] == 0, "{len}");
        }
    }

    #[test]
    fn unsealed_or_short_foreign_memory_is_refused() {
        let fd = rustix::fs::memfd_create("foreign", MemfdFlags::ALLOW_SEALING).expect("memfd");
        rustix::fs::ftruncate(&fd, 4096).expect("size");
        assert!(SharedMemory::from_fd(fd.try_clone().expect("dup"), 4096, true).is_err());
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).expect("seal");
        assert!(SharedMemory::from_fd(fd.try_clone().expect("dup"), 8192, true).is_err());
        assert!(SharedMemory::from_fd(fd, 4096, true).is_ok());
    }
}
