//! Work requests, and how they are posted to a connection's queue pair.

use super::srq::receive_with;
use super::{Id, Mr, Mrs, Mw, Rights, ffi, made};
use crate::rdma::verbs::Sge;
use crate::rdma::verbs_provider::sys_flush::{self, Flush};
use smallvec::SmallVec;
use std::ffi::c_int;
use std::io;
use std::ptr::null_mut;

/// Requests of one post. Most posts are short, and these need no memory of the heap.
pub(in super::super) type Few<T> = SmallVec<[T; 4]>;

pub(super) fn raw_sge(range: &Sge) -> ffi::ibv_sge {
    ffi::ibv_sge { addr: range.offset, length: range.len, lkey: range.lkey.0 }
}

/// A range at the target.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Far {
    pub(in super::super) rkey: u32,
    pub(in super::super) offset: u64,
}

/// The operation of a posted request.
#[derive(Clone, Copy)]
pub(in super::super) enum What<'r> {
    Send,
    SendImm(u32),
    Read(Far),
    Write(Far),
    WriteImm(Far, u32),
    Flush(Flush),
    CompareSwap {
        far: Far,
        expect: u64,
        swap: u64,
    },
    FetchAdd {
        far: Far,
        add: u64,
    },
    /// Binds a window, with its new key.
    Bind {
        window: &'r Mw,
        rkey: u32,
        region: &'r Mr,
        offset: u64,
        len: u64,
        rights: Rights,
    },
    Invalidate {
        rkey: u32,
    },
}

/// A send work request.
#[derive(Clone, Copy)]
pub(in super::super) struct Posted<'r> {
    pub(in super::super) wr_id: u64,
    pub(in super::super) what: What<'r>,
    pub(in super::super) local: &'r [Sge],
    /// The regions, for a SEND or WRITE that the post copies from those of its local ranges. All of them must be there, or the RNIC reads the ranges, and
    /// refuses the one without a region.
    pub(in super::super) inline: Option<&'r Mrs>,
    pub(in super::super) signaled: bool,
}

impl Posted<'_> {
    /// Adds the elements of its local ranges. Returns whether the post copies them.
    fn add_elements(&self, to: &mut Few<ffi::ibv_sge>) -> bool {
        let first = to.len();
        to.extend(self.local.iter().map(raw_sge));
        let Some(regions) = self.inline else { return false };
        let mapped = |range: &Sge| regions.get(&range.lkey.0)?.mapped(range);
        let Some(addresses) = self.local.iter().map(mapped).collect::<Option<Few<u64>>>() else {
            return false;
        };
        for (element, address) in to[first..].iter_mut().zip(addresses) {
            element.addr = address;
        }
        true
    }

    /// The request, whose list of elements is still to be set.
    fn raw(&self, is_copied: bool) -> ffi::ibv_send_wr {
        use ffi::ibv_wr_opcode as op;
        // SAFETY: all zeros is a value of this plain structure.
        let mut wr: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.wr_id;
        wr.num_sge = self.local.len() as c_int;
        if self.signaled {
            wr.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if is_copied {
            wr.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let rdma = |far: Far| ffi::rdma_t { remote_addr: far.offset, rkey: far.rkey };
        let atomic = |far: Far, compare_add, swap| ffi::atomic_t {
            remote_addr: far.offset,
            compare_add,
            swap,
            rkey: far.rkey,
        };
        let mut imm = None;
        wr.opcode = match self.what {
            What::Send => op::IBV_WR_SEND,
            What::SendImm(value) => {
                imm = Some(value);
                op::IBV_WR_SEND_WITH_IMM
            }
            What::Read(far) => {
                wr.wr.rdma = rdma(far);
                op::IBV_WR_RDMA_READ
            }
            What::Write(far) => {
                wr.wr.rdma = rdma(far);
                op::IBV_WR_RDMA_WRITE
            }
            What::WriteImm(far, value) => {
                wr.wr.rdma = rdma(far);
                imm = Some(value);
                op::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            What::CompareSwap { far, expect, swap } => {
                wr.wr.atomic = atomic(far, expect, swap);
                op::IBV_WR_ATOMIC_CMP_AND_SWP
            }
            What::FetchAdd { far, add } => {
                wr.wr.atomic = atomic(far, add, 0);
                op::IBV_WR_ATOMIC_FETCH_AND_ADD
            }
            What::Flush(_) => unreachable!("`ibv_post_send` knows no FLUSH"),
            What::Bind { window, rkey, region, offset, len, rights } => {
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
                op::IBV_WR_BIND_MW
            }
            What::Invalidate { rkey } => {
                wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
                op::IBV_WR_LOCAL_INV
            }
        };
        if let Some(value) = imm {
            wr.imm_data_invalidated_rkey_union.imm_data = value.to_be();
        }
        wr
    }
}

impl Id {
    /// Posts a receive.
    pub(in super::super) fn post_receive(&self, wr_id: u64, local: &[Sge]) -> io::Result<()> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        // SAFETY: the queue pair is there; `receive_with` says the rest.
        receive_with(wr_id, local, |wr, bad| unsafe { ffi::ibv_post_recv((*self.raw.as_ptr()).qp, wr, bad) })
    }

    /// Posts send work requests, with one doorbell, and one more for each FLUSH among them. The error contains how many were posted. The caller holds
    /// a lock meanwhile.
    pub(in super::super) fn post_send(&self, requests: &[Posted]) -> Result<(), (usize, io::Error)> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        let is_flush = |request: &Posted| matches!(request.what, What::Flush(_));
        let mut posted = 0;
        for run in requests.chunk_by(|one, next| !is_flush(one) && !is_flush(next)) {
            let result = match run {
                [Posted { wr_id, what: What::Flush(flush), signaled, .. }] => {
                    // SAFETY: the identifier is there, and has its queue pair.
                    let qp = made(unsafe { (*self.raw.as_ptr()).qp });
                    // SAFETY: the queue pair stays; whoever posts a FLUSH has seen in the device's abilities that it can.
                    let post = |qp| unsafe { sys_flush::post(qp, *wr_id, *flush, *signaled) };
                    qp.and_then(post).map_err(|error| (0, error))
                }
                run => self.post_run(run),
            };
            result.map_err(|(done, error)| (posted + done, error))?;
            posted += run.len();
        }
        Ok(())
    }

    /// Posts requests that `ibv_post_send` supports.
    fn post_run(&self, requests: &[Posted]) -> Result<(), (usize, io::Error)> {
        let (mut sges, mut wrs) = (Few::new(), Few::<ffi::ibv_send_wr>::new());
        for request in requests {
            let is_copied = request.add_elements(&mut sges);
            wrs.push(request.raw(is_copied));
        }
        let (first, mut elements) = (wrs.as_mut_ptr(), sges.as_mut_ptr());
        for index in 0..wrs.len() {
            // SAFETY: inside of both lists, which do not move any more: the elements of all requests stand one behind the other.
            unsafe {
                let wr = first.add(index);
                (*wr).sg_list = elements;
                elements = elements.add((*wr).num_sge as usize);
                if index > 0 {
                    (*first.add(index - 1)).next = wr;
                }
            }
        }
        if wrs.is_empty() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the list and its elements outlive the call, which copies them. What they name is checked by
        // the RNIC, here and at the target; or, inline, is mapped memory whose region `requests` holds (`Posted::add_elements`). That the library's
        // copy can race with others is as `SharedMemory` allows.
        match unsafe { ffi::ibv_post_send((*self.raw.as_ptr()).qp, first, &mut bad) } {
            0 => Ok(()),
            error => {
                let posted = if bad.is_null() {
                    0
                } else {
                    // SAFETY: the library gives an element of the list.
                    usize::try_from(unsafe { bad.offset_from(first) }).unwrap_or(0)
                };
                Err((posted, io::Error::from_raw_os_error(error.abs())))
            }
        }
    }
}
