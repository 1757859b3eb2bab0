//! One TLS connection as bytes in and bytes out, without a socket.
//!
//! # Bounds
//! `incoming` holds arrived bytes that are no complete record yet: at most [`INCOMING_LEN`]. Decrypted bytes wait in `plain`, which is never longer,
//! because no input is read while some are left. The next writer takes `outgoing`.
//!
//! # Invariants
//! * Records leave in the order in which they were made: there is one `outgoing`, and a writer takes it first.
//! * `plain` is empty until the peer has proven its key.
//!
//! # Failure
//! Any error ends the connection; the alert for the peer is in `outgoing`.

use super::TlsConfigs;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{AlertDescription, Error};
use std::sync::Arc;

/// Most bytes that are read at a time: two of the longest records (16 KiB and 261 bytes, RFC 8446 section 5.2).
const INCOMING_LEN: usize = 33 * 1024;
/// Most bytes that are encrypted at a time: four records.
pub(in crate::rdma::soft::tcp) const SEALED_AT_ONCE: usize = 64 * 1024;
/// Bytes of a record beside its contents: header, kind, tag.
const RECORD_OVERHEAD: usize = 22;
/// Most contents of a record.
const RECORD_LEN: usize = 16 * 1024;

/// Why a connection ends, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::rdma::soft::tcp) enum TlsError {
    /// The server has no key of this name.
    #[error(
        "the server does not know this key (any more); give one that it has, or have it take this one, too: \
         cuttlefsd's --key FILE"
    )]
    UnknownKey,
    /// The server could not prove that it has the key.
    #[error(
        "what answers there has not the key this side has; it is another server, or pretends to be this one"
    )]
    WrongServer,
    /// The client could not prove that it has one of the keys.
    #[error("a client has none of this server's keys")]
    WrongClient,
    /// Another version.
    #[error("the peer speaks another version of the protocol; run the same release on both")]
    Version,
    /// The bytes are not TLS, or were damaged on the way.
    #[error("what the peer says is not what was agreed on, or was changed on its way ({0})")]
    Broken(String),
}

impl TlsError {
    fn of(error: &Error, side: &Side) -> Self {
        match (error, side) {
            (Error::AlertReceived(AlertDescription::AccessDenied), Side::Client(_))
            | (Error::AlertReceived(AlertDescription::CertificateUnknown), Side::Client(_)) => {
                Self::UnknownKey
            }
            (Error::InvalidCertificate(_), Side::Client(_)) => Self::WrongServer,
            (Error::InvalidCertificate(_) | Error::NoCertificatesPresented, Side::Server(_)) => {
                Self::WrongClient
            }
            (
                Error::AlertReceived(AlertDescription::NoApplicationProtocol) | Error::NoApplicationProtocol,
                _,
            ) => Self::Version,
            // The error of a server that has no key of that name.
            (Error::General(reason), Side::Server(_)) if reason.contains("no server certificate") => {
                Self::WrongClient
            }
            (error, _) => Self::Broken(error.to_string()),
        }
    }
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What rustls did with the bytes that it has.
enum Step {
    /// It can go on at once.
    Again,
    /// It needs more bytes of the peer.
    Waits,
    /// Both sides are proven, and no input is left.
    Ready,
    /// The peer has closed its side.
    Closed,
}

/// One TLS connection.
pub(in crate::rdma::soft::tcp) struct Records {
    side: Side,
    /// Allocated with the first bytes.
    incoming: Vec<u8>,
    incoming_len: usize,
    plain: Vec<u8>,
    plain_at: usize,
    outgoing: Vec<u8>,
    closed: bool,
    /// rustls is not asked again after its first error.
    failed: Option<TlsError>,
}

impl Records {
    /// The connecting side; its first words are in `outgoing`.
    pub(in crate::rdma::soft::tcp) fn client(configs: &TlsConfigs) -> Result<Self, TlsError> {
        let side = UnbufferedClientConnection::new(configs.client.clone(), configs.server_name());
        let side = side.map_err(|error| TlsError::Broken(error.to_string()))?;
        let mut records = Self::new(Side::Client(side));
        records.go_on()?;
        Ok(records)
    }

    /// The listening side.
    pub(in crate::rdma::soft::tcp) fn server(configs: &TlsConfigs) -> Result<Self, TlsError> {
        let side = UnbufferedServerConnection::new(configs.server.clone());
        side.map(|side| Self::new(Side::Server(side))).map_err(|error| TlsError::Broken(error.to_string()))
    }

    fn new(side: Side) -> Self {
        Self {
            side,
            incoming: Vec::new(),
            incoming_len: 0,
            plain: Vec::new(),
            plain_at: 0,
            outgoing: Vec::new(),
            closed: false,
            failed: None,
        }
    }

    /// Whether both sides have proven their keys.
    pub(in crate::rdma::soft::tcp) fn is_established(&self) -> bool {
        !match &self.side {
            Side::Client(client) => client.is_handshaking(),
            Side::Server(server) => server.is_handshaking(),
        }
    }

    /// At a server, after the handshake: the name of the peer's key.
    pub(in crate::rdma::soft::tcp) fn client_name(&self, configs: &TlsConfigs) -> Option<Arc<str>> {
        match &self.side {
            Side::Server(server) if self.is_established() => {
                configs.name_of_client(server.peer_certificates()?.first()?)
            }
            _ => None,
        }
    }

    /// Whether the peer has closed its side, and all its bytes were taken.
    pub(in crate::rdma::soft::tcp) fn is_closed(&self) -> bool {
        self.closed && !self.holds_plain()
    }

    /// Whether decrypted bytes wait to be taken.
    pub(in crate::rdma::soft::tcp) fn holds_plain(&self) -> bool {
        self.plain_at < self.plain.len()
    }

    /// Takes decrypted bytes; returns how many.
    pub(in crate::rdma::soft::tcp) fn take_plain(&mut self, into: &mut [u8]) -> usize {
        let waiting = &self.plain[self.plain_at..];
        let count = waiting.len().min(into.len());
        into[..count].copy_from_slice(&waiting[..count]);
        self.plain_at += count;
        if self.plain_at == self.plain.len() {
            self.plain.clear();
            self.plain_at = 0;
        }
        count
    }

    /// Room for bytes of the peer; the caller then tells `arrived` how many there are. Not while plain bytes wait.
    pub(in crate::rdma::soft::tcp) fn room(&mut self) -> &mut [u8] {
        assert!(!self.holds_plain(), "what was taken in before is taken out first");
        if self.incoming.is_empty() {
            self.incoming = vec![0; INCOMING_LEN];
        }
        &mut self.incoming[self.incoming_len..]
    }

    /// This number of bytes was put into `room`.
    pub(in crate::rdma::soft::tcp) fn arrived(&mut self, count: usize) -> Result<(), TlsError> {
        self.incoming_len += count;
        self.go_on()?;
        if self.incoming_len == self.incoming.len() {
            // Two complete records have come and none could be taken, so a handshake message is longer than both.
            return Err(TlsError::Broken("a message is longer than any of this protocol".to_owned()));
        }
        Ok(())
    }

    /// Takes the bytes for the peer that were not sent yet: only handshakes and alerts leave some.
    pub(in crate::rdma::soft::tcp) fn take_outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outgoing)
    }

    /// Appends the encrypted form of these bytes to `wire`.
    pub(in crate::rdma::soft::tcp) fn seal(
        &mut self,
        plain: &[u8],
        wire: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        wire.append(&mut self.outgoing);
        // Records that rustls makes before the bytes, such as a change of keys, are sent before them.
        std::mem::swap(wire, &mut self.outgoing);
        let result = plain.chunks(SEALED_AT_ONCE).try_for_each(|part| self.run(Some(part)));
        std::mem::swap(wire, &mut self.outgoing);
        result
    }

    /// Whether rustls has made records that are not in `outgoing` yet.
    fn has_words(&self) -> bool {
        match &self.side {
            Side::Client(client) => client.wants_write(),
            Side::Server(server) => server.wants_write(),
        }
    }

    fn go_on(&mut self) -> Result<(), TlsError> {
        self.run(None)
    }

    /// Lets rustls go as far as it can, then encrypts these bytes.
    fn run(&mut self, to_seal: Option<&[u8]>) -> Result<(), TlsError> {
        if let Some(told) = &self.failed {
            return Err(told.clone());
        }
        loop {
            match self.step(to_seal) {
                Ok(Step::Again) => {}
                Ok(Step::Ready) => return Ok(()),
                Ok(Step::Waits) if to_seal.is_none() => return Ok(()),
                Ok(Step::Closed) if to_seal.is_none() => {
                    self.closed = true;
                    return Ok(());
                }
                Ok(Step::Waits | Step::Closed) => {
                    return Err(TlsError::Broken("the connection takes no bytes".to_owned()));
                }
                Err(error) => {
                    let told = TlsError::of(&error, &self.side);
                    // Gets the alert of the error. No input is decrypted for that.
                    while self.has_words() && matches!(self.step(None), Ok(Step::Again)) {}
                    self.failed = Some(told.clone());
                    return Err(told);
                }
            }
        }
    }

    fn step(&mut self, to_seal: Option<&[u8]>) -> Result<Step, Error> {
        let Self { side, incoming, incoming_len, plain, outgoing, .. } = self;
        let bytes = &mut incoming[..*incoming_len];
        let (discard, step) = match side {
            Side::Client(client) => act(client.process_tls_records(bytes), to_seal, plain, outgoing),
            Side::Server(server) => act(server.process_tls_records(bytes), to_seal, plain, outgoing),
        };
        incoming.copy_within(discard..*incoming_len, 0);
        *incoming_len -= discard;
        step
    }
}

/// Does what rustls asks for; returns how many incoming bytes are used up, and the next step.
fn act<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    to_seal: Option<&[u8]>,
    plain: &mut Vec<u8>,
    outgoing: &mut Vec<u8>,
) -> (usize, Result<Step, Error>) {
    let mut discard = status.discard;
    let step = match status.state {
        Err(error) => Err(error),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                None => break Ok(Step::Again),
                Some(Err(error)) => break Err(error),
                Some(Ok(record)) => {
                    discard += record.discard;
                    plain.extend_from_slice(record.payload);
                }
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let at = outgoing.len();
            if let Err(EncodeError::InsufficientSize(needs)) = data.encode(&mut []) {
                outgoing.resize(at + needs.required_size, 0);
            }
            match data.encode(&mut outgoing[at..]) {
                Ok(len) => {
                    outgoing.truncate(at + len);
                    Ok(Step::Again)
                }
                Err(error) => Err(Error::General(error.to_string())),
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // The records are in `outgoing`, before anything that is sent next.
            data.done();
            Ok(Step::Again)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match to_seal {
            None => Ok(Step::Ready),
            Some(bytes) => {
                let at = outgoing.len();
                let records = bytes.len().div_ceil(RECORD_LEN);
                outgoing.resize(at + bytes.len() + records * RECORD_OVERHEAD, 0);
                let mut sealed = traffic.encrypt(bytes, &mut outgoing[at..]);
                if let Err(EncryptError::InsufficientSize(needs)) = sealed {
                    // A change of keys is put before the bytes.
                    outgoing.resize(at + needs.required_size, 0);
                    sealed = traffic.encrypt(bytes, &mut outgoing[at..]);
                }
                outgoing.truncate(at + sealed.as_ref().copied().unwrap_or(0));
                sealed.map(|_| Step::Ready).map_err(|error| Error::General(error.to_string()))
            }
        },
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Waits),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Step::Closed),
        // Early data, which is not offered, and states of later versions of rustls.
        Ok(_) => Err(Error::General("a state that was not asked for".to_owned())),
    };
    (discard, step)
}

#[cfg(test)]
mod tests;
