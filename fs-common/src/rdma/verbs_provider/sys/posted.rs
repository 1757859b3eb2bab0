//! Work requests, and how they are posted to a connection's queue pair.

use super::ffi::ibv_wr_opcode as op;
use super::srq::receive_with;
use super::{Id, Mr, Mrs, Mw, Rights, ffi, made};
use crate::rdma::verbs::{SendWr, Sge};
use crate::rdma::verbs_provider::regions::Regions;
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
    /// Places of requests, of which a post uses the first. A request sets what its operation needs, and the immediate, which has to be 0 where there is
    /// none. Anything else is left of those before: some libraries copy it, and no RNIC looks at it.
    wrs: Vec<ffi::ibv_send_wr>,
    /// The FLUSHes of a post, which `ibv_post_send` does not know. Their places among the requests have the operation [`FLUSH`].
    flushes: Vec<Flush>,
    /// The elements of all requests that are copied, one behind the other.
    copied: Vec<ffi::ibv_sge>,
}

// SAFETY: between posts nobody follows the pointers in it: a new batch begins without requests.
unsafe impl Send for Lists {}

/// Send work requests of one post, as libibverbs takes them. Those that are not copied point at the local ranges that they were made of.
pub(in super::super) struct Batch<'b, 'r> {
    /// Places for as many requests as there may be, of which the first `len` are used.
    wrs: &'b mut [ffi::ibv_send_wr],
    len: usize,
    /// Whether there are FLUSHes, or requests that should be copied.
    is_mixed: bool,
    flushes: &'b mut Vec<Flush>,
    copied: &'b mut Vec<ffi::ibv_sge>,
    _ranges: PhantomData<&'r [Sge]>,
}

const SIGNALED: u32 = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
const INLINE: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;
/// The operation of a FLUSH. No library has one of this number, and none gets to see it.
const FLUSH: ffi::ibv_wr_opcode::Type = ffi::ibv_wr_opcode::Type::MAX;

impl<'b, 'r> Batch<'b, 'r> {
    /// An empty one, for up to `most` requests.
    #[inline(always)]
    pub(in super::super) fn of(lists: &'b mut Lists, most: usize) -> Self {
        if lists.wrs.len() < most {
            lists.add_places(most);
        }
        let Lists { wrs, flushes, copied } = lists;
        debug_assert!(flushes.is_empty(), "the post before has taken its own");
        Self { wrs: &mut wrs[..most], len: 0, is_mixed: false, flushes, copied, _ranges: PhantomData }
    }

    #[inline]
    pub(in super::super) fn len(&self) -> usize {
        self.len
    }

    /// A request behind the others, which is one of them as soon as it has its operation.
    #[inline(always)]
    pub(in super::super) fn next(&mut self, wr_id: u64, local: &'r [Sge], signaled: bool) -> Next<'_, 'r> {
        let wr = &mut self.wrs[self.len];
        wr.wr_id = wr_id;
        wr.sg_list = elements_of(local);
        wr.num_sge = local.len() as c_int;
        wr.send_flags = if signaled { SIGNALED } else { 0 };
        // librxe refuses to bind a window otherwise (rdma-core 44, `validate_send_wr`).
        wr.imm_data_invalidated_rkey_union.imm_data = 0;
        let (len, is_mixed) = (&mut self.len, &mut self.is_mixed);
        Next { wr, len, is_mixed, flushes: self.flushes, _ranges: PhantomData }
    }
}

impl Lists {
    #[cold]
    fn add_places(&mut self, most: usize) {
        // SAFETY: all zeros is a value of this plain structure.
        self.wrs.resize_with(most, || unsafe { std::mem::zeroed() });
    }
}

/// A request that has no operation yet, and is none of its batch before it has. It is built where it stays: each operation is one step from the poster's
/// request to the RNIC's.
pub(in super::super) struct Next<'b, 'r> {
    wr: &'b mut ffi::ibv_send_wr,
    /// Of the batch.
    len: &'b mut usize,
    is_mixed: &'b mut bool,
    flushes: &'b mut Vec<Flush>,
    /// Of just this lifetime: other ranges that it is given live as long as the batch's.
    _ranges: PhantomData<&'b mut &'r [Sge]>,
}

impl<'r> Next<'_, 'r> {
    #[inline(always)]
    fn add(self, opcode: ffi::ibv_wr_opcode::Type, set: impl FnOnce(&mut ffi::ibv_send_wr)) {
        self.wr.opcode = opcode;
        set(self.wr);
        *self.is_mixed |= self.wr.send_flags & INLINE != 0;
        *self.len += 1;
    }

    /// Has the post copy the bytes of this request of the user, a SEND or WRITE, if they `are_few` and all of its local ranges are in known regions.
    #[inline(always)]
    pub(in super::super) fn copied_if(self, are_few: bool) -> Self {
        if are_few {
            self.wr.send_flags |= INLINE;
        }
        self
    }

    #[inline]
    pub(in super::super) fn send(self) {
        self.add(op::IBV_WR_SEND, |_| {});
    }

    #[inline]
    pub(in super::super) fn send_imm(self, imm: u32) {
        self.add(op::IBV_WR_SEND_WITH_IMM, |wr| wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be());
    }

    #[inline]
    pub(in super::super) fn read(self, far: Far) {
        self.add(op::IBV_WR_RDMA_READ, |wr| wr.wr.rdma = rdma(far));
    }

    /// A READ into other ranges than the request names.
    #[inline]
    pub(in super::super) fn read_into(self, far: Far, local: &'r [Sge]) {
        self.wr.sg_list = elements_of(local);
        self.wr.num_sge = local.len() as c_int;
        self.read(far)
    }

    #[inline]
    pub(in super::super) fn write(self, far: Far) {
        self.add(op::IBV_WR_RDMA_WRITE, |wr| wr.wr.rdma = rdma(far));
    }

    #[inline]
    pub(in super::super) fn write_imm(self, far: Far, imm: u32) {
        self.add(op::IBV_WR_RDMA_WRITE_WITH_IMM, |wr| {
            wr.wr.rdma = rdma(far);
            wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
        })
    }

    #[inline]
    pub(in super::super) fn compare_swap(self, far: Far, expect: u64, swap: u64) {
        self.add(op::IBV_WR_ATOMIC_CMP_AND_SWP, |wr| wr.wr.atomic = atomic(far, expect, swap));
    }

    #[inline]
    pub(in super::super) fn fetch_add(self, far: Far, add: u64) {
        self.add(op::IBV_WR_ATOMIC_FETCH_AND_ADD, |wr| wr.wr.atomic = atomic(far, add, 0));
    }

    #[inline]
    pub(in super::super) fn flush(self, flush: Flush) {
        self.flushes.push(flush);
        *self.is_mixed = true;
        self.add(FLUSH, |_| {});
    }

    /// Binds a window to these bytes of a region, with its new key.
    pub(in super::super) fn bind(
        self,
        (window, rkey): (&Mw, u32),
        (region, offset, len): (&Mr, u64, u64),
        rights: Rights,
    ) {
        self.add(op::IBV_WR_BIND_MW, |wr| {
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
        })
    }

    pub(in super::super) fn invalidate(self, rkey: u32) {
        self.add(op::IBV_WR_LOCAL_INV, |wr| wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey);
    }
}

fn rdma(far: Far) -> ffi::rdma_t {
    ffi::rdma_t { remote_addr: far.offset, rkey: far.rkey }
}

fn atomic(far: Far, compare_add: u64, swap: u64) -> ffi::atomic_t {
    ffi::atomic_t { remote_addr: far.offset, compare_add, swap, rkey: far.rkey }
}

/// Adds elements with the places of these ranges in this process's memory, if all of them have one. Returns whether they have.
fn add_copies(copied: &mut Vec<ffi::ibv_sge>, local: &[Sge], regions: &Mrs) -> bool {
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

impl Id {
    /// Posts a receive.
    pub(in super::super) fn post_receive(&self, wr_id: u64, local: &[Sge]) -> io::Result<()> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        // SAFETY: the queue pair is there; `receive_with` says the rest.
        receive_with(wr_id, local, |wr, bad| unsafe { ffi::ibv_post_recv((*self.raw.as_ptr()).qp, wr, bad) })
    }

    /// Posts send work requests, with one doorbell, and one more for each FLUSH among them. Those of the user are made of `requests`, one after the
    /// other; the bytes of those that should be copied are looked for in `regions`. The error contains how many were posted. The caller holds a lock
    /// meanwhile.
    #[inline(always)]
    pub(in super::super) fn post_send(
        &self,
        batch: Batch<'_, '_>,
        requests: &[SendWr],
        regions: &Regions,
    ) -> Result<(), (usize, io::Error)> {
        let wrs = &mut batch.wrs[..batch.len];
        if batch.is_mixed {
            return self.post_mixed(wrs, (batch.flushes, batch.copied), requests, regions);
        }
        self.post_run(wrs)
    }

    /// As `post_send`, of requests some of which should be copied or are FLUSHes. Apart, so that a post of others stays short.
    #[inline(never)]
    fn post_mixed(
        &self,
        wrs: &mut [ffi::ibv_send_wr],
        (flushes, copied): (&mut Vec<Flush>, &mut Vec<ffi::ibv_sge>),
        requests: &[SendWr],
        regions: &Regions,
    ) -> Result<(), (usize, io::Error)> {
        // They stay registered until the bytes are copied.
        let regions = regions.read();
        copied.clear();
        for (wr, request) in wrs.iter_mut().zip(requests) {
            if wr.send_flags & INLINE != 0 && !add_copies(copied, request.local.as_slice(), &regions) {
                // The RNIC reads the ranges, and refuses the one without a region.
                wr.send_flags &= !INLINE;
            }
        }
        let mut elements = copied.as_mut_slice();
        for wr in wrs.iter_mut().filter(|wr| wr.send_flags & INLINE != 0) {
            let (own, others) = elements.split_at_mut(wr.num_sge as usize);
            wr.sg_list = own.as_mut_ptr();
            elements = others;
        }
        let mut posted = 0;
        for flush in flushes.drain(..) {
            let others = wrs[posted..].iter().take_while(|wr| wr.opcode != FLUSH).count();
            self.post_run(&mut wrs[posted..posted + others])
                .map_err(|(done, error)| (posted + done, error))?;
            posted += others;
            let wr = &wrs[posted];
            // SAFETY: the identifier is there, and has its queue pair.
            let qp = made(unsafe { (*self.raw.as_ptr()).qp });
            // SAFETY: the queue pair stays; whoever posts a FLUSH has seen in the device's abilities that it can.
            let post = |qp| unsafe { sys_flush::post(qp, wr.wr_id, flush, wr.send_flags & SIGNALED != 0) };
            qp.and_then(post).map_err(|error| (posted, error))?;
            posted += 1;
        }
        self.post_run(&mut wrs[posted..]).map_err(|(done, error)| (posted + done, error))
    }

    /// Posts requests that `ibv_post_send` supports, whose lists of elements are set.
    #[inline(always)]
    fn post_run(&self, wrs: &mut [ffi::ibv_send_wr]) -> Result<(), (usize, io::Error)> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        let Some((last, others)) = wrs.split_last_mut() else { return Ok(()) };
        last.next = null_mut();
        let mut first: *mut ffi::ibv_send_wr = last;
        for wr in others.iter_mut().rev() {
            wr.next = first;
            first = wr;
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the list and its elements (of the batch, or borrowed by it) outlive the call, which copies them. What they name
        // is checked by the RNIC, here and at the target; or, inline, is mapped memory whose region `post_mixed` holds. That the library's copy can race
        // with others is as `SharedMemory` allows.
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
