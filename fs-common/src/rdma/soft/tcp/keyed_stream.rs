//! A byte stream with TLS, for tests and tools that write packets by hand.

use super::channel::{Channel, Dialogue, DialogueError, Input};
use super::tls::TlsConfigs;
use crate::cluster_key::ClusterKeys;
use crate::rdma::soft::sys;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A connection whose two sides have proven a common key.
pub struct KeyedStream {
    channel: Channel,
    patience: Duration,
}

impl KeyedStream {
    /// Proves the first of `keys` over `stream`.
    ///
    /// # Errors
    /// The two have no common key, or the connection failed.
    pub fn open(stream: TcpStream, keys: &ClusterKeys, patience: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + patience;
        let opened = Dialogue::open(OwnedFd::from(stream), Some(&TlsConfigs::new(keys)), deadline);
        let channel = opened.map_err(|error| match error {
            DialogueError::Io(error) => error,
            DialogueError::Late => io::ErrorKind::TimedOut.into(),
            DialogueError::Closed => io::ErrorKind::UnexpectedEof.into(),
            DialogueError::Tls(reason) => reason.into(),
            DialogueError::InPlain(_) => io::Error::other("the peer speaks in plain"),
        })?;
        Ok(Self { channel, patience })
    }

    /// Sets the longest time that a read or a write may take.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }
}

/// One thread may read while another writes.
impl Read for &KeyedStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.channel.receive(into)? {
                Input::Bytes { count, .. } => return Ok(count),
                Input::Closed => return Ok(0),
                Input::Nothing if sys::wait_readable(self.channel.socket(), self.patience)? => {}
                Input::Nothing => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
}

impl Write for &KeyedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut wire = Vec::new();
        self.channel.seal(bytes, &mut wire)?;
        let mut sent = 0;
        while sent < wire.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(self.channel.socket(), &wire[sent..], flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let mut fds = [PollFd::new(self.channel.socket(), PollFlags::OUT)];
                    if rustix::event::poll(&mut fds, Some(&sys::timespec(self.patience)))? == 0 {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for KeyedStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }
}

impl Write for KeyedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
