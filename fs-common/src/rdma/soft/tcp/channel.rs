//! Bytes over one socket, plain or encrypted with TLS. Nothing here blocks, except `Dialogue`.
//!
//! # Locks
//! `records` is the last of a connection's locks: it is taken under its receive lock (to open input) and under its send
//! lock (to seal output), and held over one system call that does not block.

use super::tls::{Records, TlsConfigs, TlsError};
use crate::breach::Breach;
use crate::rdma::soft::sys;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// First byte of a TLS handshake record, and of an alert. No packet begins with either.
pub(super) const TLS_FIRST_BYTES: [u8; 2] = [0x16, 0x15];

/// The result of receiving.
pub(super) enum Input {
    /// This number of bytes. `more`: further bytes may be there already.
    Bytes { count: usize, more: bool },
    /// Nothing for now.
    Nothing,
    /// The peer has closed its side.
    Closed,
}

/// A socket and its encryption.
pub(in crate::rdma::soft) struct Channel {
    socket: OwnedFd,
    /// `None`: not encrypted.
    records: Option<Box<Mutex<Records>>>,
}

impl Channel {
    /// A channel without encryption.
    pub(in crate::rdma::soft) fn plain(socket: OwnedFd) -> Self {
        Self { socket, records: None }
    }

    /// The listening side of TLS, after the client's first words.
    pub(super) fn tls_server(
        socket: OwnedFd,
        configs: &TlsConfigs,
        first_words: &[u8],
    ) -> Result<Self, Breach> {
        let mut records = Records::server(configs)?;
        records.room()[..first_words.len()].copy_from_slice(first_words);
        let arrived = records.arrived(first_words.len());
        let answer = records.take_outgoing();
        let channel = Self { socket, records: Some(Box::new(Mutex::new(records))) };
        channel.say(&answer);
        arrived.map(|()| channel).map_err(Breach::from)
    }

    /// The connecting side of TLS.
    fn tls_client(socket: OwnedFd, configs: &TlsConfigs) -> Result<Self, TlsError> {
        Ok(Self { socket, records: Some(Box::new(Mutex::new(Records::client(configs)?))) })
    }

    pub(in crate::rdma::soft) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.records.is_some()
    }

    /// At the listening side: the name of the key that the client has proven.
    pub(in crate::rdma::soft) fn client_name(&self, configs: &TlsConfigs) -> Option<Arc<str>> {
        self.records.as_ref()?.lock().client_name(configs)
    }

    /// Whether there are received bytes that the socket does not signal.
    pub(super) fn holds_input(&self) -> bool {
        self.records.as_ref().is_some_and(|records| records.lock().holds_plain())
    }

    /// Receives the peer's bytes. An error ends the connection, for that reason.
    pub(super) fn receive(&self, into: &mut [u8]) -> Result<Input, Breach> {
        let Some(records) = &self.records else {
            return Ok(match receive(&self.socket, into) {
                Ok(0) => Input::Closed,
                Ok(count) => Input::Bytes { count, more: count == into.len() },
                Err(Errno::AGAIN) => Input::Nothing,
                Err(_) => Input::Closed,
            });
        };
        let mut records = records.lock();
        let mut more = true;
        loop {
            if records.holds_plain() {
                let count = records.take_plain(into);
                return Ok(Input::Bytes { count, more: more || records.holds_plain() });
            }
            if records.is_closed() {
                return Ok(Input::Closed);
            }
            match self.take_in(&mut records)? {
                Input::Bytes { more: others, .. } => more = others,
                end => return Ok(end),
            }
        }
    }

    /// Receives once from the socket. The bytes may all be TLS's own.
    fn take_in(&self, records: &mut Records) -> Result<Input, Breach> {
        let room = records.room();
        let wanted = room.len();
        let count = match receive(&self.socket, room) {
            Ok(0) => return Ok(Input::Closed),
            Ok(count) => count,
            Err(Errno::AGAIN) => return Ok(Input::Nothing),
            Err(_) => return Ok(Input::Closed),
        };
        let was_established = records.is_established();
        let arrived = records.arrived(count);
        if !was_established || arrived.is_err() {
            self.say(&records.take_outgoing());
        }
        arrived?;
        Ok(Input::Bytes { count, more: count == wanted })
    }

    /// Sends the last bytes of a handshake or of a connection. They fit the socket's buffer, or the peer is gone.
    fn say(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let _ = rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    /// Appends the bytes that go over the socket for a packet to `wire`.
    pub(super) fn seal(&self, packet: &[u8], wire: &mut Vec<u8>) -> Result<(), Breach> {
        match &self.records {
            None => wire.extend_from_slice(packet),
            Some(records) => records.lock().seal(packet, wire)?,
        }
        Ok(())
    }

    /// Tells the peer why it may not connect, if it can read that. A peer whose TLS handshake failed knows already.
    pub(super) fn send_refusal(&self, packet: &[u8]) {
        if self.records.as_ref().is_none_or(|records| records.lock().is_established()) {
            // The peer may be gone, and nobody else needs the reason.
            let _ = self.send_first(packet);
        }
    }

    /// Sends a packet of a handshake. It fits the buffer of a new socket, or the peer is gone.
    pub(in crate::rdma::soft) fn send_first(&self, packet: &[u8]) -> io::Result<()> {
        let mut wire = Vec::new();
        self.seal(packet, &mut wire)?;
        let sent = rustix::net::send(&self.socket, &wire, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        if sent == wire.len() { Ok(()) } else { Err(io::Error::other("it did not fit the socket's buffer")) }
    }
}

pub(super) fn receive(socket: &OwnedFd, into: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::net::recv(socket, &mut *into, RecvFlags::DONTWAIT) {
            Ok((_, count)) => return Ok(count),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether the peer's first byte is one of TLS; `None`: it has sent nothing.
pub(in crate::rdma::soft) fn speaks_tls(socket: &OwnedFd) -> Result<Option<bool>, Errno> {
    let mut first = [0];
    match rustix::net::recv(socket, &mut first, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
        Ok((_, 0)) => Err(Errno::CONNRESET),
        Ok(_) => Ok(Some(TLS_FIRST_BYTES.contains(&first[0]))),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Why a dialogue ends.
pub(super) enum DialogueError {
    /// The socket failed.
    Io(io::Error),
    /// The peer sent nothing for too long.
    Late,
    /// The peer closed.
    Closed,
    /// TLS failed, for this reason.
    Tls(Breach),
    /// This side has a key, and the peer answers without encryption. Nothing that it says is believed, except a refusal.
    InPlain(Channel),
}

/// The messages of a connecting side before the connection is live: it waits for each answer until the deadline.
pub(super) struct Dialogue<'c> {
    channel: &'c Channel,
    deadline: Instant,
}

impl<'c> Dialogue<'c> {
    /// Opens the channel. With `configs` both sides prove their key in a TLS handshake.
    pub(super) fn open(
        socket: OwnedFd,
        configs: Option<&TlsConfigs>,
        deadline: Instant,
    ) -> Result<Channel, DialogueError> {
        let Some(configs) = configs else {
            return Ok(Channel::plain(socket));
        };
        let channel =
            Channel::tls_client(socket, configs).map_err(|error| DialogueError::Tls(error.into()))?;
        if let Some(records) = &channel.records {
            channel.say(&records.lock().take_outgoing());
            let dialogue = Dialogue::new(&channel, deadline);
            dialogue.wait()?;
            // Checked before rustls reads: a server without keys sends its refusal unencrypted.
            if speaks_tls(&channel.socket) == Ok(Some(false)) {
                return Err(DialogueError::InPlain(Channel::plain(channel.socket)));
            }
            loop {
                let mut records = records.lock();
                if records.is_established() {
                    break;
                }
                match channel.take_in(&mut records).map_err(DialogueError::Tls)? {
                    Input::Bytes { .. } => {}
                    Input::Nothing => dialogue.wait()?,
                    Input::Closed => return Err(DialogueError::Closed),
                }
            }
        }
        Ok(channel)
    }

    pub(super) fn new(channel: &'c Channel, deadline: Instant) -> Self {
        Self { channel, deadline }
    }

    fn wait(&self) -> Result<(), DialogueError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match sys::wait_readable(&self.channel.socket, left) {
            Ok(true) => Ok(()),
            Ok(false) => Err(DialogueError::Late),
            Err(error) => Err(DialogueError::Io(error)),
        }
    }

    /// Sends a packet.
    pub(super) fn say(&self, packet: &[u8]) -> Result<(), DialogueError> {
        self.channel.send_first(packet).map_err(DialogueError::Io)
    }

    /// Receives exactly `into.len()` bytes; what follows belongs to the connection.
    pub(super) fn hear(&self, into: &mut [u8]) -> Result<(), DialogueError> {
        let mut len = 0;
        while len < into.len() {
            match self.channel.receive(&mut into[len..]).map_err(DialogueError::Tls)? {
                Input::Bytes { count, .. } => len += count,
                Input::Closed => return Err(DialogueError::Closed),
                Input::Nothing => self.wait()?,
            }
        }
        Ok(())
    }
}
