//! A connection to a server's socket that sends any bytes. It never waits: bytes that cannot be sent now are sent later.

use cuttlefs_common::rdma::soft::tcp::packet::{
    PACKET_HEADER_LEN, PacketHeader, PacketKind, build, hello_payload, verify,
};
use rustix::fs::{Gid, Uid};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The most unsent bytes that a peer collects, while the server does not read, before it gives up.
const OUTGOING_MAX: usize = 4 << 20;
/// A pump stops reading when it has so many bytes.
const TAKEN_MAX: usize = 4 << 20;

/// A user's connection.
pub struct Wire {
    stream: UnixStream,
    pub uid: u32,
    sequence: u64,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    /// Nothing more is received.
    pub is_over: bool,
}

impl Wire {
    /// Connects as this user. A thread connects, because the server sees the credentials of the thread that connects.
    pub fn connect(path: &Path, uid: u32) -> Self {
        let path = path.to_owned();
        let connecting = std::thread::spawn(move || {
            rustix::thread::set_thread_groups(&[]).expect("no groups");
            let gid = Gid::from_raw(uid);
            rustix::thread::set_thread_res_gid(gid, gid, gid).expect("the group");
            let uid = Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).expect("the user");
            UnixStream::connect(path).expect("connect")
        });
        let stream = connecting.join().expect("a connection");
        stream.set_nonblocking(true).expect("does not wait");
        Self { stream, uid, sequence: 0, incoming: Vec::new(), outgoing: Vec::new(), is_over: false }
    }

    pub fn hello(&mut self) {
        self.put_bytes(&build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload()));
    }

    /// Sends a packet with the connection's next sequence number.
    pub fn put(&mut self, header: PacketHeader, payload: &[u8]) {
        self.sequence += 1;
        self.put_bytes(&build(PacketHeader { sequence: self.sequence, ..header }, payload));
    }

    /// Sends the beginning of a packet.
    pub fn put_part(&mut self, header: PacketHeader, payload: &[u8], len: usize) {
        self.sequence += 1;
        let packet = build(PacketHeader { sequence: self.sequence, ..header }, payload);
        self.put_bytes(&packet[..len.min(packet.len() - 1)]);
    }

    /// Sends these bytes as they are.
    pub fn put_bytes(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
        self.flush();
    }

    /// Closes the sending direction and goes on receiving.
    pub fn half_close(&mut self) {
        self.is_over |= self.stream.shutdown(std::net::Shutdown::Write).is_err();
    }

    fn flush(&mut self) {
        while !self.outgoing.is_empty() && !self.is_over {
            match self.stream.write(&self.outgoing) {
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The socket may still hold what the server sent before it closed, so go on reading.
                Err(_) => self.outgoing.clear(),
            }
        }
        self.is_over |= self.outgoing.len() > OUTGOING_MAX;
    }

    /// Sends and receives what is possible without waiting. Returns the packets that were received.
    ///
    /// # Panics
    /// The server sent something that is no packet.
    pub fn pump(&mut self) -> Vec<(PacketHeader, Vec<u8>)> {
        self.flush();
        let mut buffer = [0; 64 << 10];
        while !self.is_over && self.incoming.len() < TAKEN_MAX {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.is_over = true,
                Ok(len) => self.incoming.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.is_over = true,
            }
        }
        let mut packets = Vec::new();
        let mut at = 0;
        while let Some(header) = self.incoming[at..].first_chunk::<PACKET_HEADER_LEN>() {
            let header = PacketHeader::parse(header).expect("the server sends packets");
            let len = PACKET_HEADER_LEN + header.payload_len as usize;
            let Some(packet) = self.incoming.get(at..at + len) else { break };
            verify(packet).expect("the server's payloads are whole");
            packets.push((header, packet[PACKET_HEADER_LEN..].to_vec()));
            at += len;
        }
        self.incoming.drain(..at);
        packets
    }
}
