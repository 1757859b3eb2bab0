//! Completion queues.

use super::{Context, ffi, made, unblock};
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::slice;

/// A completion of the RNIC, where the library has left it.
#[repr(transparent)]
pub(in super::super) struct Wc(ffi::ibv_wc);

impl Wc {
    #[inline]
    pub(in super::super) fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    #[inline]
    pub(in super::super) fn status(&self) -> u32 {
        self.0.status
    }

    /// The RNIC's number of the queue pair.
    #[inline]
    pub(in super::super) fn qp(&self) -> u32 {
        self.0.qp_num
    }

    /// Of one that did not fail.
    #[inline]
    pub(in super::super) fn byte_len(&self) -> u32 {
        self.0.byte_len
    }

    /// The immediate, if it consumed a receive and the peer sent one. Of one that did not fail.
    #[inline]
    pub(in super::super) fn imm(&self) -> Option<u32> {
        let has_imm = self.0.wc_flags & ffi::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        // SAFETY: both variants of the union are 32 bits wide.
        has_imm.then(|| u32::from_be(unsafe { self.0.imm_data_invalidated_rkey_union.imm_data }))
    }

    /// Of one that did not fail.
    #[inline]
    pub(in super::super) fn is_write_imm(&self) -> bool {
        self.0.opcode == ffi::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM
    }
}

/// A completion queue with its channel.
pub(in super::super) struct Cq {
    pub(super) raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
}

// SAFETY: libibverbs' calls may be made from any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

/// The most completions taken with one call.
pub(in super::super) const POLLED: usize = 16;

/// Room for [`POLLED`] completions.
pub(in super::super) const WC_ROOM: [MaybeUninit<Wc>; POLLED] = [const { MaybeUninit::uninit() }; POLLED];

impl Cq {
    pub(in super::super) fn new(context: Context, depth: u32) -> io::Result<Self> {
        // SAFETY: the context is open.
        let channel = made(unsafe { ffi::ibv_create_comp_channel(context.0.as_ptr()) })?;
        // SAFETY: as above; the channel was just made, and is destroyed after the queue.
        let queue = unsafe {
            ffi::ibv_create_cq(context.0.as_ptr(), depth as c_int, null_mut(), channel.as_ptr(), 0)
        };
        let raw = made(queue).inspect_err(|_| {
            // SAFETY: nothing uses the channel.
            unsafe { ffi::ibv_destroy_comp_channel(channel.as_ptr()) };
        })?;
        let queue = Self { raw, channel };
        // SAFETY: the channel is there; the field does not change.
        unblock(unsafe { (*channel.as_ptr()).fd })?;
        Ok(queue)
    }

    /// Readable when an armed queue has got a completion.
    pub(in super::super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel, and with it the descriptor, stays while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    /// Takes as many completions as there are, and are room for.
    #[inline]
    pub(in super::super) fn poll<'r>(&self, room: &'r mut [MaybeUninit<Wc>]) -> &'r [Wc] {
        // SAFETY: the queue is there; the library fills in no more entries than there is room for.
        let count = unsafe {
            ffi::ibv_poll_cq(self.raw.as_ptr(), room.len() as c_int, room.as_mut_ptr().cast::<ffi::ibv_wc>())
        };
        if count <= 0 {
            return &[];
        }
        let taken = &room[..count as usize];
        // SAFETY: the library has filled in as many as it says. Of a failed one it need not set more than number, status and queue pair (ibv_poll_cq(3)),
        // and nobody looks at more of it.
        unsafe { slice::from_raw_parts(taken.as_ptr().cast::<Wc>(), taken.len()) }
    }

    /// Makes room for this many completions. Those that wait stay.
    pub(in super::super) fn resize(&self, depth: u32) -> io::Result<()> {
        // SAFETY: the queue is there; the library takes its own lock against threads that poll.
        match unsafe { ffi::ibv_resize_cq(self.raw.as_ptr(), depth as c_int) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Asks for an event with the next completion.
    pub(in super::super) fn arm(&self) {
        // SAFETY: the queue is there. It cannot fail but for a broken argument.
        unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr(), 0) };
    }

    /// Takes all events.
    pub(in super::super) fn take_events(&self) {
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: queue and channel are there; the channel has no other queue, and each event is acknowledged at once.
        unsafe {
            while ffi::ibv_get_cq_event(self.channel.as_ptr(), &mut queue, &mut context) == 0 {
                ffi::ibv_ack_cq_events(self.raw.as_ptr(), 1);
            }
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold an `Arc` of it, so none is left; all events are acknowledged; the channel goes last.
        unsafe {
            ffi::ibv_destroy_cq(self.raw.as_ptr());
            ffi::ibv_destroy_comp_channel(self.channel.as_ptr());
        }
    }
}
