//! Work requests, and how they are posted to a connection's queue pair.

use super::ffi::ibv_wr_opcode as op;
use super::srq::receive_with;
use super::{Id, Mr, Mrs, Mw, Rights, ffi, made};
use crate::rdma::verbs::Sge;
use crate::rdma::verbs_provider::sys_flush::{self, Flush};
use std::ffi::c_int;
use std::io;
use std::marker::PhantomData;
use std::mem::{offset_of, size_of};
use std::ptr::null_mut;

// A range is an element as libibverbs knows it.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ffi::ibv_sge>());
    assert!(align_of::<Sge>() == align_of::<ffi::ibv_sge>());
    assert!(offset_of!(Sge, offset) == offset_of!(ffi::ibv_sge, addr));
    assert!(offset_of!(Sge, len) == offset_of!(ffi::ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ffi::ibv_sge, lkey));
};

/// These ranges as libibverbs' list of elements, which it reads and does not write. Of use while they are borrowed.
pub(super) fn elements_of(ranges: &[Sge]) -> *mut ffi::ibv_sge {
    ranges.as_ptr().cast::<ffi::ibv_sge>().cast_mut()
}

/// A range at the target.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Far {
    pub(in super::super) rkey: u32,
    pub(in super::super) offset: u64,
}

/// The lists of a post, whose memory the next post uses again. What they point to is of use during that post only.
#[derive(Default)]
pub(in super::super) struct Lists {
    /// All but FLUSHes, which `ibv_post_send` does not know.
    wrs: Vec<ffi::ibv_send_wr>,
    /// The elements of all requests that are copied, one behind the other.
    copied: Vec<ffi::ibv_sge>,
    flushes: Vec<PostedFlush>,
}

// SAFETY: between posts nobody follows the pointers in it: a new batch begins with empty lists.
unsafe impl Send for Lists {}

/// Send work requests of one post, as libibverbs takes them. Those that are not copied point at the local ranges that they were made of.
pub(in super::super) struct Batch<'b, 'r> {
    lists: &'b mut Lists,
    _ranges: PhantomData<&'r [Sge]>,
}

/// A FLUSH of a batch.
struct PostedFlush {
    /// How many of `Lists::wrs` are before it.
    behind: usize,
    wr_id: u64,
    flush: Flush,
    is_signaled: bool,
}

const INLINE: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;

impl<'b, 'r> Batch<'b, 'r> {
    /// An empty one.
    #[inline]
    pub(in super::super) fn of(lists: &'b mut Lists) -> Self {
        lists.wrs.clear();
        lists.copied.clear();
        lists.flushes.clear();
        Self { lists, _ranges: PhantomData }
    }

    #[inline]
    pub(in super::super) fn len(&self) -> usize {
        self.lists.wrs.len() + self.lists.flushes.len()
    }

    /// A request behind the others, which is there when its operation is told.
    #[inline]
    pub(in super::super) fn next(&mut self, wr_id: u64, local: &'r [Sge], signaled: bool) -> Next<'_, 'r> {
        Next { lists: self.lists, wr_id, local, signaled }
    }

    /// Has the post copy the bytes of the last request, a SEND or WRITE, from `regions`, if all of its local ranges are there: else the RNIC reads the ranges,
    /// and refuses the one without a region. They stay registered until the batch is posted.
    pub(in super::super) fn copy_last(&mut self, local: &[Sge], regions: &Mrs) {
        if self.copies(local, regions)
            && let Some(last) = self.lists.wrs.last_mut()
        {
            last.send_flags |= INLINE;
        }
    }

    /// Adds elements with the places of these ranges in this process's memory, if all of them have one. Returns whether they have.
    fn copies(&mut self, local: &[Sge], regions: &Mrs) -> bool {
        let copied = &mut self.lists.copied;
        let before = copied.len();
        for range in local {
            let Some(addr) = regions.get(&range.lkey.0).and_then(|region| region.mapped(range)) else {
                copied.truncate(before);
                return false;
            };
            copied.push(ffi::ibv_sge { addr, length: range.len, lkey: range.lkey.0 });
        }
        true
    }
}

/// A request of a batch whose operation is not told yet. It is built where it stays: each operation is one step from the poster's request to the RNIC's.
pub(in super::super) struct Next<'b, 'r> {
    lists: &'b mut Lists,
    wr_id: u64,
    local: &'r [Sge],
    signaled: bool,
}

impl<'r> Next<'_, 'r> {
    #[inline(always)]
    fn push(self, opcode: ffi::ibv_wr_opcode::Type, set: impl FnOnce(&mut ffi::ibv_send_wr)) {
        // SAFETY: all zeros is a value of this plain structure.
        let mut wr: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.wr_id;
        wr.sg_list = elements_of(self.local);
        wr.num_sge = self.local.len() as c_int;
        wr.opcode = opcode;
        wr.send_flags = if self.signaled { ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        set(&mut wr);
        self.lists.wrs.push(wr);
    }

    #[inline]
    pub(in super::super) fn send(self) {
        self.push(op::IBV_WR_SEND, |_| {});
    }

    #[inline]
    pub(in super::super) fn send_imm(self, imm: u32) {
        self.push(op::IBV_WR_SEND_WITH_IMM, |wr| wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be());
    }

    #[inline]
    pub(in super::super) fn read(self, far: Far) {
        self.push(op::IBV_WR_RDMA_READ, |wr| wr.wr.rdma = rdma(far));
    }

    /// A READ into other ranges than the request names.
    #[inline]
    pub(in super::super) fn read_into(self, far: Far, local: &'r [Sge]) {
        Self { local, ..self }.read(far);
    }

    #[inline]
    pub(in super::super) fn write(self, far: Far) {
        self.push(op::IBV_WR_RDMA_WRITE, |wr| wr.wr.rdma = rdma(far));
    }

    #[inline]
    pub(in super::super) fn write_imm(self, far: Far, imm: u32) {
        self.push(op::IBV_WR_RDMA_WRITE_WITH_IMM, |wr| {
            wr.wr.rdma = rdma(far);
            wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
        });
    }

    #[inline]
    pub(in super::super) fn compare_swap(self, far: Far, expect: u64, swap: u64) {
        self.push(op::IBV_WR_ATOMIC_CMP_AND_SWP, |wr| wr.wr.atomic = atomic(far, expect, swap));
    }

    #[inline]
    pub(in super::super) fn fetch_add(self, far: Far, add: u64) {
        self.push(op::IBV_WR_ATOMIC_FETCH_AND_ADD, |wr| wr.wr.atomic = atomic(far, add, 0));
    }

    pub(in super::super) fn flush(self, flush: Flush) {
        let behind = self.lists.wrs.len();
        self.lists.flushes.push(PostedFlush { behind, wr_id: self.wr_id, flush, is_signaled: self.signaled });
    }

    /// Binds a window to these bytes of a region, with its new key.
    pub(in super::super) fn bind(
        self,
        (window, rkey): (&Mw, u32),
        (region, offset, len): (&Mr, u64, u64),
        rights: Rights,
    ) {
        self.push(op::IBV_WR_BIND_MW, |wr| {
            wr.bind_mw_tso_union.bind_mw = ffi::bind_mw_t {
                mw: window.raw.as_ptr(),
                rkey,
                bind_info: ffi::ibv_mw_bind_info {
                    mr: region.raw.as_ptr(),
                    addr: region.first_address + offset,
                    length: len,
                    mw_access_flags: rights.flags().0,
                },
            };
        });
    }

    pub(in super::super) fn invalidate(self, rkey: u32) {
        self.push(op::IBV_WR_LOCAL_INV, |wr| wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey);
    }
}

fn rdma(far: Far) -> ffi::rdma_t {
    ffi::rdma_t { remote_addr: far.offset, rkey: far.rkey }
}

fn atomic(far: Far, compare_add: u64, swap: u64) -> ffi::atomic_t {
    ffi::atomic_t { remote_addr: far.offset, compare_add, swap, rkey: far.rkey }
}

impl Id {
    /// Posts a receive.
    pub(in super::super) fn post_receive(&self, wr_id: u64, local: &[Sge]) -> io::Result<()> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        // SAFETY: the queue pair is there; `receive_with` says the rest.
        receive_with(wr_id, local, |wr, bad| unsafe { ffi::ibv_post_recv((*self.raw.as_ptr()).qp, wr, bad) })
    }

    /// Posts send work requests, with one doorbell, and one more for each FLUSH among them. The error contains how many were posted. The caller holds
    /// a lock meanwhile, and the regions of requests that are copied.
    #[inline(always)]
    pub(in super::super) fn post_send(&self, batch: Batch<'_, '_>) -> Result<(), (usize, io::Error)> {
        let Batch { lists, .. } = batch;
        if lists.copied.is_empty() && lists.flushes.is_empty() {
            return self.post_run(&mut lists.wrs);
        }
        self.post_runs(lists)
    }

    /// As `post_send`, of requests some of which are copied or are FLUSHes. Apart, so that a post of others stays short.
    #[inline(never)]
    fn post_runs(&self, lists: &mut Lists) -> Result<(), (usize, io::Error)> {
        let Lists { wrs, copied, flushes } = lists;
        let mut elements = copied.as_mut_ptr();
        for wr in wrs.iter_mut().filter(|wr| wr.send_flags & INLINE != 0) {
            wr.sg_list = elements;
            // SAFETY: inside of the list or at its end: the elements of requests that are copied stand one behind the other.
            elements = unsafe { elements.add(wr.num_sge as usize) };
        }
        let mut posted = 0;
        for (before, one) in flushes.iter().enumerate() {
            self.post_run(&mut wrs[posted..one.behind])
                .map_err(|(done, error)| (posted + before + done, error))?;
            posted = one.behind;
            // SAFETY: the identifier is there, and has its queue pair.
            let qp = made(unsafe { (*self.raw.as_ptr()).qp });
            // SAFETY: the queue pair stays; whoever posts a FLUSH has seen in the device's abilities that it can.
            let post = |qp| unsafe { sys_flush::post(qp, one.wr_id, one.flush, one.is_signaled) };
            qp.and_then(post).map_err(|error| (posted + before, error))?;
        }
        self.post_run(&mut wrs[posted..]).map_err(|(done, error)| (posted + flushes.len() + done, error))
    }

    /// Posts requests that `ibv_post_send` supports, whose lists of elements are set.
    #[inline(always)]
    fn post_run(&self, wrs: &mut [ffi::ibv_send_wr]) -> Result<(), (usize, io::Error)> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        let Some(last) = wrs.len().checked_sub(1) else { return Ok(()) };
        let first = wrs.as_mut_ptr();
        for index in 0..last {
            // SAFETY: inside of the list.
            unsafe { (*first.add(index)).next = first.add(index + 1) };
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the list and its elements (of the batch, or borrowed by it) outlive the call, which copies them. What they name is checked by
        // the RNIC, here and at the target; or, inline, is mapped memory whose region the caller holds (`Batch::copy_last`). That the library's
        // copy can race with others is as `SharedMemory` allows.
        match unsafe { ffi::ibv_post_send((*self.raw.as_ptr()).qp, first, &mut bad) } {
            0 => Ok(()),
            error => Err(refused(first, bad, error)),
        }
    }
}

/// How many requests of the list that begins with `first` were posted before `bad`, and why that one was not.
#[cold]
fn refused(first: *mut ffi::ibv_send_wr, bad: *mut ffi::ibv_send_wr, error: c_int) -> (usize, io::Error) {
    let posted = if bad.is_null() {
        0
    } else {
        // SAFETY: the library gives an element of the list.
        usize::try_from(unsafe { bad.offset_from(first) }).unwrap_or(0)
    };
    (posted, io::Error::from_raw_os_error(error.abs()))
}
