//! One file under every region policy in turn: a random walk that is compared with an array of bytes, threads that write into the same pages, and a
//! clean restart under the next policy, where the file must have the same bytes. Where the policy allows one-sided writes, half of the writes are
//! one-sided.

mod serving;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::world::{Random, SeededRandom};
use cuttlefs_server::fsck::{FsckError, FsckOptions, fsck};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::{Exposure, PolicyName, RegionPolicy, Technique};
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::{RunningServer, StartError};
use serving::Serve;
use std::path::Path;
use std::time::Duration;

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const APPEND: OpenHow = OpenHow { append: true, ..READ_WRITE };
const NAME: &[u8] = b"file";
/// Two data files, some 500 pages together.
const POOL_BYTES: u64 = 2 << 20;
/// Fewer frames than the file has pages, so that policies with frames run out of them.
const FRAMES: u64 = 24;
/// The largest size of the file.
const MOST_BYTES: u64 = 60 * 4096;
const STEPS: usize = 250;

fn format(directory: &Path) {
    let data = ["a", "b"].map(|name| directory.join(name)).to_vec();
    let dir = directory.join("pool");
    let options = FormatOptions { dir, size: POOL_BYTES, data, ..FormatOptions::default() };
    serving::make_pool(&options, [3; 16]);
}

fn serve(directory: &Path, policy: RegionPolicy, listen: &Endpoint) -> Result<RunningServer, StartError> {
    let with = Serve {
        frames: FRAMES,
        listen: vec![listen.clone()],
        policy,
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    serving::serve(&directory.join("pool"), with)
}

fn connect(endpoint: &Endpoint) -> RemoteVolume {
    serving::connect(endpoint, "policies", 4, false)
}

fn read(volume: &RemoteVolume, handle: Handle, offset: u64, len: u32) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    volume.read(&CALLER, handle, offset, len, &mut |got| bytes.extend_from_slice(got))?;
    Ok(bytes)
}

fn policies() -> Vec<RegionPolicy> {
    use Technique::{Hotspot, Tiering};
    let with = |techniques: &[Technique]| RegionPolicy::with(PolicyName::RpcDirect, techniques);
    let mut all: Vec<_> = PolicyName::ALL.into_iter().map(RegionPolicy::of).collect();
    all.push(with(&[Tiering]).expect("a policy"));
    all.push(with(&[Tiering, Hotspot]).expect("a policy"));
    all.push(RegionPolicy::of(PolicyName::Odp).with_hardware_times().expect("a policy"));
    all
}

/// A file, and the bytes that it must have.
struct Walk<'a> {
    /// The mount that changes the file, and another one that only reads it.
    volumes: [&'a RemoteVolume; 2],
    file: Handle,
    appending: Handle,
    looking: Handle,
    model: Vec<u8>,
    random: &'a SeededRandom,
    policy: String,
    /// Whether clients may write pages one-sidedly.
    is_exposed: bool,
}

impl<'a> Walk<'a> {
    fn begin(
        volumes: [&'a RemoteVolume; 2],
        ino: InodeNo,
        model: Vec<u8>,
        random: &'a SeededRandom,
        policy: String,
        is_exposed: bool,
    ) -> Self {
        let open = |volume: &RemoteVolume, how| volume.open(&CALLER, ino, how).expect("open").handle;
        let (file, appending) = (open(volumes[0], READ_WRITE), open(volumes[0], APPEND));
        let looking = open(volumes[1], OpenHow { write: false, ..READ_WRITE });
        Self { volumes, file, appending, looking, model, random, policy, is_exposed }
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.next_u64() % bound
    }

    /// A random range: in one case of four of whole pages, in another at most 300 bytes.
    fn range(&self) -> (u64, u64) {
        let (mut offset, mut len) = (self.below(MOST_BYTES), 1 + self.below(5 * 4096));
        match self.below(4) {
            0 => (offset, len) = (offset & !4095, len.next_multiple_of(4096)),
            1 => len = 1 + len % 300,
            _ => {}
        }
        (offset, len.min(MOST_BYTES - offset))
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset as usize + bytes.len();
        if self.model.len() < end {
            self.model.resize(end, 0);
        }
        self.model[offset as usize..end].copy_from_slice(bytes);
    }

    fn fill_zeros(&mut self, offset: u64, len: u64) {
        let size = self.model.len();
        let clip = |at: u64| (at as usize).min(size);
        self.model[clip(offset)..clip(offset + len)].fill(0);
    }

    fn check(&self, offset: u64, len: u64) {
        let clip = |at: u64| (at as usize).min(self.model.len());
        let expected = &self.model[clip(offset)..clip(offset + len)];
        for (volume, handle) in [(self.volumes[0], self.file), (self.volumes[1], self.looking)] {
            let got = read(volume, handle, offset, len as u32).expect("read");
            let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
            let context = (&self.policy, offset, len, wrong);
            assert_eq!(got.len(), expected.len(), "{context:?}");
            assert_eq!(wrong, None, "{context:?}");
        }
    }

    fn step(&mut self) {
        let (offset, len) = self.range();
        let volume = self.volumes[0];
        let bytes: Vec<u8> = (0..len).map(|index| (self.random.next_u64() ^ index) as u8).collect();
        match self.below(16) {
            0..=4 => {
                // A one-sided write is refused past the end of the file and where a page has no bytes. A refused one changes nothing.
                let one_sided = self.below(2) == 0
                    && volume.write_exposed(self.file, offset, &bytes).expect("the server is there");
                assert!(self.is_exposed || !one_sided, "{}", self.policy);
                assert!(!one_sided || offset + len <= self.model.len() as u64, "{}", self.policy);
                if !one_sided {
                    volume.write(&CALLER, self.file, offset, &bytes).expect("write");
                }
                self.put(offset, &bytes);
            }
            5 => {
                let end = self.model.len() as u64;
                if end + len <= MOST_BYTES {
                    volume.write(&CALLER, self.appending, 0, &bytes).expect("append");
                    self.put(end, &bytes);
                }
            }
            6 => {
                let size = if self.below(3) == 0 { self.below(4096) } else { offset };
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                let ino = volume.lookup(&CALLER, InodeNo::ROOT, NAME).expect("lookup").ino;
                volume.set_attr(&CALLER, ino, set).expect("truncate");
                self.model.resize(size as usize, 0);
            }
            7 => {
                volume.allocate(&CALLER, self.file, offset, len, Allocate::PunchHole).expect("punch");
                self.fill_zeros(offset, len);
            }
            8 => {
                let how = Allocate::ZeroRange { keep_size: true };
                volume.allocate(&CALLER, self.file, offset, len, how).expect("zero");
                self.fill_zeros(offset, len);
            }
            9 => {
                let how = Allocate::Reserve { keep_size: false };
                volume.allocate(&CALLER, self.file, offset, len, how).expect("reserve");
                let end = (offset + len) as usize;
                self.model.resize(self.model.len().max(end), 0);
            }
            10 => volume.fsync(&CALLER, self.file, false).expect("fsync"),
            _ => self.check(offset, len),
        }
    }

    /// Threads write into the same pages, each at places of its own, while another thread reads these pages.
    fn together(&mut self) {
        const WRITERS: u64 = 3;
        const PLACE: u64 = 100;
        const PLACES: u64 = 3 * 4096 / (WRITERS * PLACE);
        let start = vec![0xee; 3 * 4096];
        self.volumes[0].write(&CALLER, self.file, 0, &start).expect("write");
        self.put(0, &start);
        let place = |writer: u64, index: u64| (index * WRITERS + writer) * PLACE;
        let (volumes, file, looking, is_exposed) = (self.volumes, self.file, self.looking, self.is_exposed);
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                scope.spawn(move || {
                    for index in 0..PLACES {
                        let bytes = [writer as u8 + 1; PLACE as usize];
                        let at = place(writer, index);
                        if is_exposed && writer > 0 {
                            assert!(volumes[0].write_exposed(file, at, &bytes).expect("the server is there"));
                        } else {
                            volumes[0].write(&CALLER, file, at, &bytes).expect("write");
                        }
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..PLACES {
                    let got = read(volumes[1], looking, 0, 3 * 4096).expect("read");
                    assert!(got.len() == 3 * 4096 && got.iter().all(|byte| matches!(byte, 1..=3 | 0xee)));
                }
            });
        });
        for writer in 0..WRITERS {
            for index in 0..PLACES {
                self.put(place(writer, index), &[writer as u8 + 1; PLACE as usize]);
            }
        }
        self.check(0, MOST_BYTES);
    }

    fn end(self) -> Vec<u8> {
        self.check(0, MOST_BYTES);
        for handle in [self.file, self.appending] {
            self.volumes[0].release(handle);
        }
        self.volumes[1].release(self.looking);
        self.model
    }
}

/// Checks that fsck finds nothing wrong with the pool, and that each page matches its checksum.
fn is_clean(directory: &Path) {
    let options = FsckOptions {
        pool: directory.join("pool"),
        repair: false,
        checksums: true,
        accept_rotten: false,
        scratch: Some(directory.to_owned()),
    };
    // The NIC's thread holds the pool for a moment after the server has stopped.
    let report = (0..100).find_map(|_| match fsck(&options, &mut |_, _, _| {}) {
        Err(FsckError::Pool(_)) => {
            std::thread::sleep(Duration::from_millis(100));
            None
        }
        looked => Some(looked.expect("fsck looks")),
    });
    let report = report.expect("the pool is let go");
    assert_eq!(report.exit_code(), 0, "{:?}", report.lines());
}

fn every_policy_keeps_the_bytes(scheme: &str) {
    let directory = tempfile::tempdir().expect("directory");
    format(directory.path());
    let mut endpoint: Endpoint = match scheme {
        "tcp" => "tcp://127.0.0.1:0".to_owned(),
        _ => format!("{scheme}://{}", directory.path().join("socket").display()),
    }
    .parse()
    .expect("an endpoint");
    let random = SeededRandom::new(7);
    let mut model = Vec::new();
    let mut ino = None;
    // A client that lives through all restarts and takes over each server's policy.
    let mut veteran: Option<RemoteVolume> = None;
    let faults_here = |policy: &RegionPolicy| policy.exposure == Exposure::Faulting;
    for policy in policies().into_iter().filter(|policy| scheme != "shm" || !faults_here(policy)) {
        let running = serve(directory.path(), policy, &endpoint).expect("start");
        endpoint = running.endpoints().remove(0);
        let veteran = veteran.get_or_insert_with(|| connect(&endpoint));
        let newcomer = connect(&endpoint);
        let ino = *ino.get_or_insert_with(|| {
            let made = veteran.create(&CALLER, InodeNo::ROOT, NAME, 0o644, true, READ_WRITE).expect("create");
            veteran.release(made.1.handle);
            made.0.ino
        });
        let over_nic = scheme != "shm" && matches!(policy.exposure, Exposure::Pinned | Exposure::Faulting);
        let mut walk = Walk::begin([veteran, &newcomer], ino, model, &random, policy.to_string(), over_nic);
        walk.check(0, MOST_BYTES);
        for _ in 0..STEPS {
            walk.step();
        }
        walk.together();
        model = walk.end();
        let figures = running.server().files.pages().figures();
        let counts = figures.counts;
        assert_eq!(figures.leaked_frames, 0);
        assert_eq!(running.server().meta.damage_count(), 0);
        match policy.exposure {
            Exposure::Magic => {}
            Exposure::Pinned => assert_eq!((counts.target_magic, counts.evicted), (0, 0)),
            Exposure::Faulting => assert_eq!(counts.target_magic, 0),
            Exposure::Hidden => assert_eq!((counts.target_hits, counts.target_magic), (0, 0)),
        }
        assert!(!over_nic || counts.target_hits > 0, "{policy}: reads are one-sided");
        assert_eq!(counts.target_writes > 0, over_nic, "{policy}: writes are one-sided");
        if !policy.uses_frames() {
            assert_eq!((figures.free_frames, counts.promoted), (figures.frames, 0), "{policy}");
        }
        newcomer.shut_down();
        running.stop();
        is_clean(directory.path());
    }
    if let Some(veteran) = veteran {
        veteran.shut_down();
    }
}

#[test]
fn every_policy_keeps_the_bytes_over_tcp() {
    every_policy_keeps_the_bytes("tcp");
}

#[test]
fn every_policy_but_odp_keeps_the_bytes_over_shared_memory() {
    every_policy_keeps_the_bytes("shm");
}

#[test]
fn odp_is_refused_where_no_nic_could_fault() {
    let directory = tempfile::tempdir().expect("directory");
    format(directory.path());
    let endpoint = format!("shm://{}", directory.path().join("socket").display()).parse().expect("endpoint");
    let error = serve(directory.path(), RegionPolicy::of(PolicyName::Odp), &endpoint).err().expect("refused");
    assert!(error.to_string().contains("listen on tcp://"), "{error}");
}
