//! Packets with descriptors beside them, over Unix sockets.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Most descriptors in one packet: a welcome with all windows has seven.
pub(super) const MAX_DESCRIPTORS: usize = 8;

/// Sends one packet without blocking.
pub(super) fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one packet"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::Error::other("the packet was cut")) }
}

/// Takes one packet without blocking: its length and descriptors. `None`: the peer closed. A packet with more than `MOST` descriptors is an error,
/// and all of them are closed.
pub(super) fn receive<const MOST: usize>(
    socket: &OwnedFd,
    bytes: &mut [u8],
) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(socket.as_fd(), &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let descriptors: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || descriptors.len() > MOST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a packet is longer than any of this protocol",
        ));
    }
    if message.bytes == 0 {
        return Ok(None);
    }
    Ok(Some((message.bytes, descriptors)))
}
