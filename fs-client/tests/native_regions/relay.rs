//! A relay between a session and its server, over `tcp` or `unix`, that can be told to hold a long change in its midst.

use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PacketHeader, PacketKind};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long the relay and its user wait for each other.
const PATIENCE: Duration = Duration::from_secs(60);
/// A change of a file with more bytes is a long one.
const LONG_BYTES: usize = 256 << 10;

/// What becomes of a change that is held.
pub enum Verdict {
    /// The rest of it comes.
    GoOn,
    /// The connection ends.
    Cut,
}

/// A change that is held: a part of it has gone to the server.
pub struct Held(Sender<Verdict>);

impl Held {
    pub fn end(self, verdict: Verdict) {
        self.0.send(verdict).expect("the relay waits");
    }
}

#[derive(Clone)]
enum Place {
    Tcp(String),
    Unix(PathBuf),
}

/// One side of a connection.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn connect(place: &Place) -> std::io::Result<Self> {
        match place {
            Place::Tcp(address) => TcpStream::connect(address).map(Self::Tcp),
            Place::Unix(path) => UnixStream::connect(path).map(Self::Unix),
        }
    }

    fn twin(&self) -> std::io::Result<Self> {
        match self {
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
        }
    }

    fn end(&self) {
        // It may have ended already.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }

    fn read_exact(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.read_exact(into),
            Self::Unix(stream) => stream.read_exact(into),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.write_all(bytes),
            Self::Unix(stream) => stream.write_all(bytes),
        }
    }
}

struct Shared {
    to: Place,
    /// The next long change is held, and handed to whoever armed this.
    armed: Mutex<Option<Sender<Held>>>,
    /// New connections end at once.
    is_closed: AtomicBool,
}

impl Shared {
    fn armed(&self) -> MutexGuard<'_, Option<Sender<Held>>> {
        self.armed.lock().expect("no panic")
    }
}

pub struct Relay {
    endpoint: Endpoint,
    shared: Arc<Shared>,
    _directory: tempfile::TempDir,
}

impl Relay {
    /// Before a server's endpoint. It works until the process ends.
    pub fn to(server: &Endpoint) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let url = server.to_string();
        let (to, path) = match url.split_once("://").expect("a scheme") {
            ("tcp", address) => (Place::Tcp(address.to_owned()), None),
            ("unix", path) => (Place::Unix(path.into()), Some(directory.path().join("relay"))),
            (scheme, _) => panic!("no relay for {scheme}"),
        };
        let shared = Arc::new(Shared { to, armed: Mutex::default(), is_closed: AtomicBool::new(false) });
        let accepting = shared.clone();
        let endpoint = match path {
            None => {
                let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
                let at = listener.local_addr().expect("an address");
                std::thread::spawn(move || {
                    listener.incoming().flatten().for_each(|client| accepting.serve(Stream::Tcp(client)));
                });
                format!("tcp://{at}")
            }
            Some(path) => {
                let listener = UnixListener::bind(&path).expect("listen");
                std::thread::spawn(move || {
                    listener.incoming().flatten().for_each(|client| accepting.serve(Stream::Unix(client)));
                });
                format!("unix://{}", path.display())
            }
        };
        let endpoint = endpoint.parse().expect("an endpoint");
        Self { endpoint, shared, _directory: directory }
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Holds the next long change of a file in its midst.
    pub fn arm(&self) -> Armed {
        let (give, held) = channel();
        *self.shared.armed() = Some(give);
        Armed(held)
    }

    /// Lets no connection through, or lets all through again.
    pub fn close(&self, is_closed: bool) {
        self.shared.is_closed.store(is_closed, Ordering::SeqCst);
    }
}

/// A change that is to come.
pub struct Armed(Receiver<Held>);

impl Armed {
    pub fn held(self) -> Held {
        self.0.recv_timeout(PATIENCE).expect("a long change comes")
    }
}

impl Shared {
    fn serve(self: &Arc<Self>, client: Stream) {
        if self.is_closed.load(Ordering::SeqCst) {
            return client.end();
        }
        let Ok(server) = Stream::connect(&self.to) else { return client.end() };
        let (Ok(client_twin), Ok(server_twin)) = (client.twin(), server.twin()) else { return };
        let shared = self.clone();
        std::thread::spawn(move || {
            let _ = shared.requests(client, server);
        });
        std::thread::spawn(move || {
            let _ = replies(server_twin, client_twin);
        });
    }

    /// Passes what the client sends, packet by packet, until one of the two ends.
    fn requests(&self, mut client: Stream, mut server: Stream) -> std::io::Result<()> {
        let result = loop {
            let mut header = [0; PACKET_HEADER_LEN];
            let mut pass = || {
                client.read_exact(&mut header)?;
                let parsed = PacketHeader::parse(&header).map_err(std::io::Error::other)?;
                let mut payload = vec![0; parsed.payload_len as usize];
                client.read_exact(&mut payload)?;
                server.write_all(&header)?;
                let is_change = matches!(parsed.kind, PacketKind::WriteFile | PacketKind::Append);
                let (first, rest) = payload.split_at(payload.len() / 2 + payload.len() / 10);
                server.write_all(first)?;
                let armed = if is_change && payload.len() > LONG_BYTES { self.armed().take() } else { None };
                if let Some(armed) = armed {
                    let (give, verdict) = channel();
                    armed.send(Held(give)).map_err(std::io::Error::other)?;
                    if let Ok(Verdict::Cut) | Err(_) = verdict.recv_timeout(PATIENCE) {
                        return Err(std::io::Error::other("cut"));
                    }
                }
                server.write_all(rest)
            };
            if let Err(error) = pass() {
                break Err(error);
            }
        };
        client.end();
        server.end();
        result
    }
}

/// Passes what the server sends.
fn replies(mut server: Stream, mut client: Stream) -> std::io::Result<()> {
    let mut bytes = vec![0; 64 << 10];
    let result = loop {
        match server.read(&mut bytes) {
            Ok(0) => break Ok(()),
            Ok(count) => {
                if let Err(error) = client.write_all(&bytes[..count]) {
                    break Err(error);
                }
            }
            Err(error) => break Err(error),
        }
    };
    client.end();
    server.end();
    result
}
