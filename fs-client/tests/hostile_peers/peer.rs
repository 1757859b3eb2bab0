//! A hostile peer. It builds its packets itself, so that it can break the protocol.

use cuttlefs_common::ids::{FileKey, InodeNo, Rkey, SlotIndex, TraceId};
use cuttlefs_common::rdma::soft::tcp::packet::{
    PACKET_HEADER_LEN, PacketHeader, PacketKind, build, hello_payload,
};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{
    HEADER_LEN, OpenBy, Payload, RemoteBuffer, Reply, ReplyHeader, Request, RequestHeader, Rights,
    SessionSecret, Sink,
};
use cuttlefs_common::status::Status;
use rustix::net::RecvFlags;
use rustix::process::Uid;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// The user of the hostile peers: neither root nor the server's user. Used only if this process may become another user.
const STRANGER: u32 = 61_234;
/// The longest time for an answer.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to a server's `unix://` endpoint.
pub struct Peer {
    stream: UnixStream,
    sequence: u64,
    /// The inode that its session sees as the root directory.
    root: Option<InodeNo>,
}

/// Runs `work` as the stranger if this process may. It runs in a thread of its own, because a socket has the credentials of the thread that connects
/// or listens.
fn as_stranger<T: Send + 'static>(path: &Path, work: impl FnOnce(&Path) -> T + Send + 'static) -> T {
    let path = path.to_owned();
    let working = std::thread::spawn(move || {
        if rustix::process::geteuid().is_root() {
            let stranger = Uid::from_raw(STRANGER);
            rustix::thread::set_thread_res_uid(stranger, stranger, stranger).expect("become a stranger");
        }
        work(&path)
    });
    working.join().expect("a stranger's work")
}

fn stream(path: &Path) -> UnixStream {
    let stream = as_stranger(path, |path| UnixStream::connect(path).expect("connect"));
    stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
    stream
}

/// A stranger who listens at the path of a server's socket.
pub struct Squat(UnixListener);

impl Squat {
    /// Listens at `path`, which must be free.
    pub fn listen(path: &Path) -> Self {
        Self(as_stranger(path, |path| UnixListener::bind(path).expect("a stranger may listen there")))
    }

    /// Accepts the next client and returns all that it sends before it closes the connection.
    pub fn hear(&self) -> Vec<u8> {
        let (mut stream, _) = self.0.accept().expect("somebody comes");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let mut said = Vec::new();
        stream.read_to_end(&mut said).expect("it goes again");
        said
    }
}

impl Peer {
    /// Connects and sends nothing.
    pub fn silent(path: &Path) -> Self {
        Self { stream: stream(path), sequence: 0, root: None }
    }

    /// Connects and says hello; `None` if the server refuses.
    pub fn welcomed(path: &Path) -> Option<Self> {
        let mut peer = Self::silent(path);
        peer.write(&build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload()));
        let (header, _) = peer.packet()?;
        (header.kind == PacketKind::Welcome).then_some(peer)
    }

    /// Connects and attaches a session.
    pub fn attached(path: &Path, client: u128) -> Self {
        let mut peer = Self::welcomed(path).expect("welcomed");
        assert_eq!(peer.attach(client, "hostile"), Ok(()));
        peer
    }

    pub fn attach(&mut self, client: u128, label: &str) -> Result<(), Status> {
        self.send(
            0,
            0,
            &Request::Attach { secret: SessionSecret(client.to_le_bytes()), label, subtree: b"" },
        );
        let (header, body) = self.answer().expect("an answer");
        if let Ok(Reply::Attached(attached)) = Reply::parse(&body) {
            self.root = Some(attached.root);
        }
        header.result
    }

    /// The inode number of a file in the root directory, in this session: another user's numbers would be of no use.
    pub fn look_up(&mut self, name: &[u8]) -> InodeNo {
        let parent = self.root.expect("it has a session");
        self.send(0, 1, &Request::Lookup { parent, name });
        let (header, body) = self.answer().expect("an answer");
        assert_eq!(header.result, Ok(()));
        let Ok(Reply::Attr(attr)) = Reply::parse(&body) else { panic!("not found") };
        attr.ino
    }

    /// Opens a file of the root by its name.
    pub fn open(&mut self, name: &[u8]) -> FileKey {
        let ino = self.look_up(name);
        let rights = Rights { read: true, write: true };
        self.send(0, 2, &Request::Open { ino, rights, truncate: false, by: OpenBy::Name { told: 0 } });
        let (header, body) = self.answer().expect("an answer");
        assert_eq!(header.result, Ok(()));
        let Ok(Reply::Opened(opened)) = Reply::parse(&body) else { panic!("not opened") };
        opened.filekey
    }

    pub fn write(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => panic!("{error}"),
            _ => {}
        }
    }

    /// Sends a packet with the connection's next sequence number.
    pub fn put(&mut self, header: PacketHeader, payload: &[u8]) {
        self.sequence += 1;
        self.write(&build(PacketHeader { sequence: self.sequence, ..header }, payload));
    }

    pub fn send(&mut self, slot: u16, seq: u64, request: &Request<'_>) {
        let mut body = vec![0; 60_000];
        let len = request.encode(&mut body).expect("fits");
        let header = RequestHeader {
            slot: SlotIndex(slot),
            seq,
            trace: TraceId(1),
            uid: 0,
            gid: 0,
            umask: 0,
            drops_privileges: false,
        };
        let message = [&header.encode(len as u32)[..], &body[..len]].concat();
        self.put(PacketHeader::new(PacketKind::Send, 0), &message);
    }

    /// The server's next packet; `None` after it has closed the connection.
    pub fn packet(&mut self) -> Option<(PacketHeader, Vec<u8>)> {
        let mut header = [0; PACKET_HEADER_LEN];
        self.stream.read_exact(&mut header).ok()?;
        let header = PacketHeader::parse(&header).expect("a packet");
        let mut payload = vec![0; header.payload_len as usize];
        self.stream.read_exact(&mut payload).ok()?;
        Some((header, payload))
    }

    /// The server's next message. Requests for the peer's memory before it are not answered.
    pub fn answer(&mut self) -> Option<(ReplyHeader, Vec<u8>)> {
        loop {
            let (header, payload) = self.packet()?;
            if header.kind == PacketKind::Send {
                let (reply, _) = ReplyHeader::parse(&payload).expect("a reply");
                return Some((reply, payload[HEADER_LEN..].to_vec()));
            }
        }
    }

    /// Whether the server has sent something that this peer has not read.
    pub fn has_answer(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&self.stream, &mut [0], flags).is_ok()
    }

    /// Reads this many packets, and acknowledges the WRITEs among them.
    pub fn acknowledge(&mut self, writes: usize) {
        for _ in 0..writes {
            let Some((header, _)) = self.packet() else { return };
            if header.kind == PacketKind::Write && header.ack {
                self.write(&build(PacketHeader::new(PacketKind::WriteAck, header.sequence), b""));
            }
        }
    }

    /// Waits until the server has closed the connection.
    pub fn wait_for_end(&mut self) {
        while self.packet().is_some() {}
    }
}

/// A write of 1 MiB whose bytes the server must pull.
pub fn pulled_write(filekey: FileKey) -> Request<'static> {
    let buffer = RemoteBuffer { rkey: Rkey(1234), offset: 0, len: 1 << 20 };
    Request::Write { filekey, offset: 0, append: false, payload: Payload::Pull(buffer) }
}

/// A fetch of every other page of 1 MiB, for which the server must send 128 WRITEs, one after the other.
pub fn pushed_fetch(filekey: FileKey) -> Request<'static> {
    let len = 1 << 20;
    let mut pages = PageSet::none_of_range(0, len);
    (0..len / 4096).step_by(2).for_each(|page| pages.insert(page));
    let buffer = RemoteBuffer { rkey: Rkey(1234), offset: 0, len: len as u32 };
    Request::Fetch { filekey, offset: 0, len: len as u32, pages, sink: Sink::Push(buffer) }
}
