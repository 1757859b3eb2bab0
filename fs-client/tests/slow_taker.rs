//! A client that requests more than it reads: the server's reply buffers fill, and the client still gets all answers.

mod serving;

use cuttlefs_client::file::volume::{Caller, OpenHow, Volume};
use cuttlefs_common::ids::{InodeNo, SlotIndex, TraceId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion, QpConfig,
    QueuePair, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{
    HEADER_LEN, MAX_MESSAGE_BYTES, OpenBy, Reply, ReplyHeader, Request, RequestHeader, Rights, SessionSecret,
    Sink,
};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use serving::Serve;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const PATIENCE: Duration = Duration::from_secs(20);
const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// Fetches under way at once, each in a slot of its own. Together they have more bytes than a ring of the link.
const FETCHES: usize = 60;
const FETCH_LEN: usize = 16 * 1024;
const PAGE: usize = 4096;
/// Memory for the request and, after it, for the receive.
const MEMORY: usize = 2 * MESSAGE;

/// A queue pair that sends requests, and reads answers only when the test asks for them.
struct Raw {
    _device: Arc<SoftDevice>,
    cq: Arc<dyn CompletionQueue>,
    region: Arc<dyn MemoryRegion>,
    qp: Arc<dyn QueuePair>,
}

impl Raw {
    fn connect(endpoint: &Endpoint) -> Self {
        let device = SoftDevice::new(SoftOptions::default());
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(256).expect("cq");
        let memory = Arc::new(SharedMemory::new("raw", MEMORY).expect("memory"));
        let region = pd.register(memory, Access::ALL).expect("register");
        let qp = QpConfig::new(&cq, 128, 1);
        let receives = vec![receive(&*region)];
        let options = ConnectOptions { qp, receives, timeout: PATIENCE };
        let connected = pd.connect(endpoint, options).expect("connect");
        Self { _device: device, cq, region, qp: connected.qp }
    }

    fn send(&self, slot: u16, seq: u64, request: &Request<'_>) {
        let mut body = [0; 512];
        let len = request.encode(&mut body).expect("a short request");
        let header = RequestHeader {
            slot: SlotIndex(slot),
            seq,
            trace: TraceId(1),
            uid: 0,
            gid: 0,
            umask: 0,
            drops_privileges: false,
        };
        let memory = self.region.memory();
        memory.write(0, &header.encode(len as u32));
        memory.write(HEADER_LEN, &body[..len]);
        let local = self.region.sge(0, (HEADER_LEN + len) as u32);
        let send = SendWr { wr_id: WrId(1), op: SendOp::Send, local: local.into(), signaled: true };
        self.qp.post_send(&[send]).expect("post");
    }

    /// The next answer: its slot and its message.
    fn answer(&self) -> (u16, Vec<u8>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "no answer");
            self.cq.wait(Duration::from_millis(100));
            let mut out = Vec::new();
            if self.cq.poll(&mut out, 1) == 0 {
                continue;
            }
            assert_eq!(out[0].status, WcStatus::Success);
            if out[0].kind != CompletionKind::Recv {
                continue;
            }
            let mut message = vec![0; out[0].byte_len as usize];
            self.region.memory().read(MESSAGE, &mut message);
            self.qp.post_recv(&[receive(&*self.region)]).expect("post");
            let (header, _) = ReplyHeader::parse(&message).expect("a reply");
            assert_eq!(header.result, Ok(()));
            return (header.slot.0, message);
        }
    }
}

fn receive(region: &dyn MemoryRegion) -> RecvWr {
    RecvWr { wr_id: WrId(2), local: region.sge(MESSAGE as u64, MAX_MESSAGE_BYTES).into() }
}

#[test]
fn a_client_that_takes_no_replies_gets_all_of_them_later() {
    let directory = tempfile::tempdir().expect("directory");
    let dir = directory.path().join("pool");
    let format = FormatOptions { dir: dir.clone(), size: 16 << 20, ..FormatOptions::default() };
    serving::make_pool(&format, [3; 16]);
    let endpoint = Endpoint::Shm(directory.path().join("s"));
    let with = Serve {
        frames: 64,
        listen: vec![endpoint.clone()],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    let running = serving::serve(&dir, with).expect("start");

    let bytes: Vec<u8> = (0..FETCHES * FETCH_LEN).map(|at| (at * 31 + (at >> 9) * 7) as u8).collect();
    let volume = serving::connect(&endpoint, "writer", 1, false);
    let (attr, file) =
        volume.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, READ_WRITE).expect("create");
    for (index, part) in bytes.chunks(1 << 19).enumerate() {
        let written = volume.write(&CALLER, file.handle, (index << 19) as u64, part);
        assert_eq!(written, Ok(part.len() as u32));
    }

    let raw = Raw::connect(&endpoint);
    raw.send(0, 0, &Request::Attach { secret: SessionSecret([77; 16]), label: "raw", subtree: b"" });
    raw.answer();
    let rights = Rights { read: true, write: false };
    raw.send(0, 1, &Request::Open { ino: attr.ino, rights, truncate: false, by: OpenBy::Name { told: 0 } });
    let (_, message) = raw.answer();
    let Ok(Reply::Opened(opened)) = Reply::parse(&message[HEADER_LEN..]) else { panic!("not opened") };
    // Page 1 of each fetch is left out, so that the fetched pages do not lie in a row and must be moved together.
    let fetch = |index: usize| {
        let offset = (index * FETCH_LEN) as u64;
        let mut pages = PageSet::none_of_range(offset, FETCH_LEN);
        [0, 2, 3].into_iter().for_each(|page| pages.insert(page));
        Request::Fetch { filekey: opened.filekey, offset, len: FETCH_LEN as u32, pages, sink: Sink::Inline }
    };
    for index in 0..FETCHES {
        raw.send(index as u16 + 1, 1, &fetch(index));
    }
    // Until the buffers are full and a fetch finds no room in them.
    let aside = || running.server().counters.fetched_aside.load(Relaxed);
    let deadline = Instant::now() + PATIENCE;
    while aside() == 0 {
        assert!(Instant::now() < deadline, "the reply buffers are never full");
        std::thread::sleep(Duration::from_millis(1));
    }
    for answered in 0..FETCHES {
        let (slot, message) = raw.answer();
        let reply = Reply::parse(&message[HEADER_LEN..]);
        let Ok(Reply::Fetched { valid_len, inline }) = reply else { panic!("{reply:?}") };
        assert_eq!(valid_len as usize, FETCH_LEN);
        let whole = &bytes[(usize::from(slot) - 1) * FETCH_LEN..][..FETCH_LEN];
        let expected = [&whole[..PAGE], &whole[2 * PAGE..]].concat();
        assert!(inline == expected, "answer {answered}, slot {slot}");
    }
    raw.qp.close();
    volume.release(file.handle);
    volume.shut_down();
    running.stop();
}
