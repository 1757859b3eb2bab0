//! A panic in any thread of a mount's process, also in threads of the FUSE library, ends the process at once, and synced data are safe. But a log
//! that cannot be written ends nothing.

mod serving;

use cuttlefs_client::fuse::MountTable;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use rustix::fs::FlockOperation;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;
use serving::Serve;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Every place in a mount where `panic_ends::plant` can plant a panic.
const PLACES: [&str; 6] = ["fuse", "control", "closer", "syncer", "lock-ends", "figures"];
const PATIENCE: Duration = Duration::from_secs(60);

/// The program `cuttlefs mount`. Dropping it unmounts and ends the program.
struct Mount {
    child: Child,
    at: PathBuf,
}

impl Mount {
    fn start(server: &Endpoint, at: &Path, environment: &[(&str, &str)]) -> Self {
        Self::start_logging(server, at, environment, Stdio::inherit())
    }

    fn start_logging(server: &Endpoint, at: &Path, environment: &[(&str, &str)], log: Stdio) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_cuttlefs"))
            .args(["mount", &server.to_string(), at.to_str().expect("UTF-8"), "--foreground"])
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("it starts");
        let mount = Self { child, at: at.to_owned() };
        let since = Instant::now();
        while MountTable::read().expect("mounts").at(at).is_none() {
            assert!(since.elapsed() < PATIENCE, "it does not mount");
            std::thread::sleep(Duration::from_millis(10));
        }
        mount
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The mount and the process may have ended before.
        let _ = unmount(&self.at, UnmountFlags::DETACH);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Gives each kind of thread something to do, until a call fails because the mount has ended.
fn work(at: &Path, place: &str) -> std::io::Result<()> {
    // Each place has a file of its own: the lock of a mount that was killed is held until its lease ends.
    let path = at.join(format!("locked-{place}"));
    let holder = File::create(&path)?;
    rustix::fs::flock(&holder, FlockOperation::LockExclusive)?;
    let waiting = path.clone();
    // Waits for the lock, or until the mount has ended.
    std::thread::spawn(move || {
        File::open(waiting).map(|file| rustix::fs::flock(&file, FlockOperation::LockExclusive))
    });
    loop {
        std::fs::write(at.join("written"), "bytes")?;
        Command::new(env!("CARGO_BIN_EXE_cuttlefs"))
            .arg("status")
            .arg(at)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a mount can be made here, and panics can be planted.
fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can || !cfg!(debug_assertions) {
        println!("NOT TESTED: root, /dev/fuse and a build with debug assertions are needed");
        assert!(std::env::var_os("CUTTLEFS_REQUIRE_FUSE").is_none() || can, "CUTTLEFS_REQUIRE_FUSE is set");
        return false;
    }
    true
}

/// A server on a pool in this directory, its endpoint, and a directory to mount on.
fn serve_in(base: &Path) -> (RunningServer, Endpoint, PathBuf) {
    let pool = base.join("pool");
    if !pool.exists() {
        serving::make_pool(
            &FormatOptions { dir: pool.clone(), size: 16 << 20, ..FormatOptions::default() },
            [3; 16],
        );
    }
    let with = Serve {
        frames: 512,
        listen: vec![format!("unix://{}", base.join("socket").display()).parse().expect("an endpoint")],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    let running = serving::serve(&pool, with).expect("start");
    let endpoint = running.endpoints().remove(0);
    let at = base.join("mnt");
    std::fs::create_dir_all(&at).expect("mkdir");
    (running, endpoint, at)
}

/// The log is on a full disk, or is a pipe that nobody reads any more: the lines are lost, and the mount goes on.
#[test]
fn a_mount_whose_log_cannot_be_written_goes_on() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let base = directory.path().canonicalize().expect("canonical");
    let (running, endpoint, at) = serve_in(&base);
    let full = File::options().write(true).open("/dev/full").expect("a full device");
    // With this level the mount logs its requests, and that its server has gone.
    let mut mount = Mount::start_logging(&endpoint, &at, &[("CUTTLEFS_LOG", "debug")], full.into());
    std::fs::write(at.join("file"), "before").expect("written");
    running.stop();
    let (running, _, _) = serve_in(&base);
    assert_eq!(std::fs::read(at.join("file")).expect("read"), b"before");
    assert_eq!(mount.child.try_wait().expect("it is ours"), None, "the mount has ended");
    drop(mount);
    running.stop();
}

#[test]
fn a_panic_ends_a_mount_wherever_it_is() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let base = directory.path().canonicalize().expect("canonical");
    let (running, endpoint, at) = serve_in(&base);
    for place in PLACES {
        let now = base.join(format!("now-{place}"));
        let mut mount =
            Mount::start(&endpoint, &at, &[("CUTTLEFS_TEST_PANIC", &format!("{place}:{}", now.display()))]);
        let mut file = File::create(at.join("file")).expect("created");
        file.write_all(place.as_bytes()).expect("written");
        file.sync_all().expect("synced");
        std::fs::write(&now, "").expect("a file");
        let working = at.clone();
        // The worker ends with an error when the mount has ended.
        let worker = std::thread::spawn(move || {
            work(&working, place).map(|()| "without end").unwrap_or("the mount is gone")
        });
        let since = Instant::now();
        let status = loop {
            if let Some(status) = mount.child.try_wait().expect("it is ours") {
                break status;
            }
            assert!(since.elapsed() < PATIENCE, "{place}: the mount is still there");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "{place}: {status}");
        assert_eq!(worker.join().ok(), Some("the mount is gone"));
        drop(file);
        drop(mount);
        let again = Mount::start(&endpoint, &at, &[]);
        assert_eq!(std::fs::read(at.join("file")).expect("read"), place.as_bytes());
        drop(again);
    }
    running.stop();
}
