//! The `cuttlefs` command, end to end: real processes and real mounts, over an in-memory volume.
//!
//! This program has three parts: the tests; the command itself, if `CUTTLEFS_TEST_COMMAND` is set in its environment, with a backend that needs no
//! server, so that detached processes are this program again; and, with the arguments of `cuttlefsd`, a server that only starts and stops.

// Each test program uses a part of this module.
#[allow(dead_code)]
mod memory_volume;

use anyhow::bail;
use cuttlefs_client::cli::{Backend, NotThere, Trust, VolumeOptions, run_with};
use cuttlefs_client::file::volume::Volume;
use cuttlefs_client::fuse::MountTable;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::Endpoint;
use memory_volume::MemoryVolume;
use signal_hook::consts::SIGTERM;
use std::io::BufRead;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const COMMAND_VARIABLE: &str = "CUTTLEFS_TEST_COMMAND";
/// If this is set, the server fails to start.
const DIES_VARIABLE: &str = "CUTTLEFS_TEST_SERVER_DIES";
/// If this is set, the server never answers.
const SILENT_VARIABLE: &str = "CUTTLEFS_TEST_SERVER_IS_SILENT";
/// If this is set, the server is somebody else's.
const STRANGER_VARIABLE: &str = "CUTTLEFS_TEST_SERVER_IS_A_STRANGER";
/// If this is set, the server of every mount is away and has not taken all changes.
const STRANDS_VARIABLE: &str = "CUTTLEFS_TEST_MOUNT_STRANDS";
/// How long the end of a mount waits for its server, if no signal hurries it.
const LAST_SYNC_LIMIT: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    match arguments.get(1).and_then(|first| first.to_str()) {
        Some("format") => {
            fake_format(&arguments[2..].iter().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>())
        }
        Some("serve") => {
            fake_serve(&arguments[2..].iter().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>())
        }
        _ if std::env::var_os(COMMAND_VARIABLE).is_some() => run_with(&InMemory, arguments),
        _ => run_tests(&arguments[1..]),
    }
}

struct InMemory;

impl Backend for InMemory {
    fn connect_volume(&self, server: &Endpoint, options: &VolumeOptions) -> anyhow::Result<Arc<dyn Volume>> {
        match server {
            Endpoint::Tcp { host, .. } if host == "refuses" => bail!("{server} refuses"),
            Endpoint::Tcp { host, .. } if host == "away" => {
                return Err(NotThere(format!("cannot reach {server}: nobody listens there")).into());
            }
            Endpoint::Shm(path) if !path.exists() => {
                return Err(NotThere(format!("cannot reach {server}: no such socket")).into());
            }
            _ => {}
        }
        assert!(!options.label.is_empty() && options.threads > 0);
        let volume = MemoryVolume::new(InodeNo::ROOT);
        if matches!(server, Endpoint::Tcp { host, .. } if host == "stalls") {
            volume.stall_reads();
        }
        if matches!(server, Endpoint::Tcp { host, .. } if host == "vanishes") {
            volume.vanish();
        }
        if matches!(server, Endpoint::Tcp { host, .. } if host == "strands")
            || std::env::var_os(STRANDS_VARIABLE).is_some()
        {
            volume.strand();
        }
        Ok(Arc::new(volume))
    }

    fn server_status(&self, server: &Endpoint, _: &Trust) -> anyhow::Result<String> {
        match server {
            Endpoint::Shm(path) if !path.exists() => {
                Err(NotThere(format!("cannot reach {server}: no such socket")).into())
            }
            Endpoint::Shm(_) if std::env::var_os(STRANGER_VARIABLE).is_some() => {
                bail!("user 65534 listens at {server}")
            }
            Endpoint::Tcp { host, .. } if host == "leaves" || host == "strands" => {
                bail!("cannot reach {server}")
            }
            Endpoint::Shm(path) => {
                let pid = std::fs::read_to_string(path)?;
                Ok(format!("{{\"version\": \"test\", \"pid\": {pid}, \"pool\": {{\"free_pages\": 7}}}}"))
            }
            _ => Ok("{\"version\": \"test\", \"pool\": {\"free_pages\": 7}}".to_owned()),
        }
    }
}

fn argument<'a>(arguments: &'a [String], name: &str) -> &'a str {
    let at = arguments.iter().position(|argument| argument == name).expect(name);
    &arguments[at + 1]
}

fn fake_format(arguments: &[String]) -> ExitCode {
    let pool = Path::new(argument(arguments, "--pool"));
    if argument(arguments, "--size") == "1" {
        std::fs::write(pool.join("half"), "").expect("write");
        eprintln!("a pool needs more than a byte");
        return ExitCode::FAILURE;
    }
    let text = format!("[pool]\nsize = {}\n", argument(arguments, "--size"));
    std::fs::write(pool.join("cuttlefs.toml"), text).expect("write");
    ExitCode::SUCCESS
}

fn fake_serve(arguments: &[String]) -> ExitCode {
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM]).expect("signals");
    let pool = Path::new(argument(arguments, "--pool"));
    let socket = argument(arguments, "--listen").strip_prefix("shm://").expect("shm first");
    if std::env::var_os(DIES_VARIABLE).is_some() {
        eprintln!("the device is on fire");
        return ExitCode::from(3);
    }
    std::fs::write(pool.join("pid"), std::process::id().to_string()).expect("write");
    if std::env::var_os(SILENT_VARIABLE).is_some() {
        signals.forever().next();
        std::fs::write(pool.join("stopped"), "").expect("write");
        return ExitCode::SUCCESS;
    }
    std::thread::sleep(Duration::from_millis(50));
    std::fs::write(socket, std::process::id().to_string()).expect("socket");
    signals.forever().next();
    std::fs::remove_file(socket).expect("socket");
    std::fs::write(pool.join("stopped"), "").expect("write");
    ExitCode::SUCCESS
}

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("mount_and_umount", mount_and_umount),
    ("a_refused_connection_leaves_nothing", a_refused_connection_leaves_nothing),
    ("a_dead_mount_is_mounted_again", a_dead_mount_is_mounted_again),
    ("a_place_is_mounted_again_at_once", a_place_is_mounted_again_at_once),
    ("a_mount_that_hangs_is_forced_off", a_mount_that_hangs_is_forced_off),
    ("umount_8_does_not_wait_for_the_server", umount_8_does_not_wait_for_the_server),
    ("a_hanging_mount_hangs_no_command", a_hanging_mount_hangs_no_command),
    ("benchmarks_are_another_program", benchmarks_are_another_program),
    ("unsynced_changes_are_not_thrown_away_silently", unsynced_changes_are_not_thrown_away_silently),
    ("a_mount_that_ends_says_what_is_lost", a_mount_that_ends_says_what_is_lost),
    ("copies_in_other_mount_namespaces_are_named", copies_in_other_mount_namespaces_are_named),
    ("foreground_ends_by_ctrl_c", foreground_ends_by_ctrl_c),
    ("mount_8_calls_the_helper", mount_8_calls_the_helper),
    ("mount_8_waits_for_the_server", mount_8_waits_for_the_server),
    ("a_remount_changes_flags", a_remount_changes_flags),
    ("status_while_the_server_is_away", status_while_the_server_is_away),
    ("up_and_down", up_and_down),
    ("up_in_the_foreground_stops_its_server", up_in_the_foreground_stops_its_server),
    ("up_starts_a_server_that_died_again", up_starts_a_server_that_died_again),
    ("a_signal_ends_a_start_and_its_server", a_signal_ends_a_start_and_its_server),
    ("down_ends_a_start", down_ends_a_start),
    ("an_error_that_stays_ends_a_start", an_error_that_stays_ends_a_start),
    ("a_server_that_dies_shows_its_log", a_server_that_dies_shows_its_log),
    ("down_stops_what_a_killed_mount_left", down_stops_what_a_killed_mount_left),
];

/// Runs the tests of an optional filter, with the options of cargo and nextest for test programs.
fn run_tests(arguments: &[std::ffi::OsString]) -> ExitCode {
    let has = |option: &str| arguments.iter().any(|argument| argument == option);
    if has("--ignored") {
        // No test is ignored.
        return ExitCode::SUCCESS;
    }
    if has("--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("NOT TESTED: root and /dev/fuse are needed");
        let required = std::env::var_os("CUTTLEFS_REQUIRE_FUSE").is_some();
        return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let filter =
        arguments.iter().filter_map(|argument| argument.to_str()).find(|text| !text.starts_with('-'));
    let is_meant = |name: &str| match filter {
        Some(filter) if has("--exact") => name == filter,
        Some(filter) => name.contains(filter),
        None => true,
    };
    let mut failed = 0;
    for (name, test) in TESTS.iter().filter(|(name, _)| is_meant(name)) {
        let ok = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        failed += usize::from(!ok);
    }
    println!("test result: {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A directory with a mount point and a pool. Dropping it unmounts the mount point.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().expect("temporary directory") };
        std::fs::create_dir(place.mnt()).expect("mkdir");
        place
    }

    fn mnt(&self) -> PathBuf {
        self.dir.path().canonicalize().expect("canonical").join("mnt")
    }

    fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    fn mnt_text(&self) -> String {
        self.mnt().to_str().expect("UTF-8").to_owned()
    }

    fn pool_text(&self) -> String {
        self.pool().to_str().expect("UTF-8").to_owned()
    }

    /// Waits until a mount in another process has answered the kernel: before that it is in the mount table, and cannot be unmounted in order.
    fn wait_for_mount(&self) {
        eventually("the mount", || self.is_mounted());
        std::fs::metadata(self.mnt()).expect("the root's attributes");
    }

    fn is_mounted(&self) -> bool {
        MountTable::read().expect("mounts").at(&self.mnt()).is_some()
    }

    fn server_pid(&self) -> i32 {
        std::fs::read_to_string(self.pool().join("pid")).expect("pid").parse().expect("a number")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH | rustix::mount::UnmountFlags::FORCE;
        let _ = rustix::mount::unmount(self.mnt(), flags);
    }
}

fn command(arguments: &[&str]) -> Command {
    let own = std::env::current_exe().expect("own path");
    let mut command = Command::new(&own);
    command.args(arguments).env(COMMAND_VARIABLE, "1").env("CUTTLEFSD", &own).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    command(arguments).output().expect("run")
}

#[track_caller]
fn succeeds(arguments: &[&str]) -> String {
    let output = output(arguments);
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

#[track_caller]
fn fails(arguments: &[&str]) -> String {
    let output = output(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} succeeded");
    assert!(text.starts_with("cuttlefs: ") || text.contains("\ncuttlefs: "), "{text}");
    text
}

#[track_caller]
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < LIMIT, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is gone, or all its threads are dead: the first thread may be dead long before the last one has closed the mount.
fn has_ended(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // "Z" is a zombie, "X" is dead.
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.starts_with(" Z") || rest.starts_with(" X"))
    })
}

fn runs(pid: i32) -> bool {
    !has_ended(pid)
}

/// Reads what a process says until it has said these words.
fn hears(said: &mut impl BufRead, words: &str) -> String {
    let mut all = String::new();
    while !all.contains(words) {
        assert!(said.read_line(&mut all).expect("read") > 0, "it ended without {words:?}: {all}");
    }
    all
}

fn state_in(file: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

/// The file in which the state of a mount is written down.
fn state_file(mountpoint: &str) -> PathBuf {
    let states = std::fs::read_dir("/run/cuttlefs").expect("runtime directory");
    let mut paths = states.flatten().map(|entry| entry.path());
    paths
        .find(|path| {
            path.extension().is_some_and(|extension| extension == "json")
                && state_in(path).is_some_and(|state| state["mountpoint"] == mountpoint)
        })
        .expect("a state file")
}

/// The process that serves a mount.
fn mount_pid(mountpoint: &str) -> i32 {
    let state = state_in(&state_file(mountpoint)).expect("a state");
    state["mount"]["pid"].as_i64().expect("a number") as i32
}

fn signal(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, signal).expect("signal");
}

fn mount_and_umount() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let text = succeeds(&["mount", "tcp://memory:1", mnt, "-o", "noatime,attr_cache=3"]);
    assert!(text.contains(&format!("tcp://memory:1 is mounted at {mnt}")), "{text}");
    let state = state_file(mnt);
    for file in [state.clone(), state.with_extension("log")] {
        let mode = file.metadata().expect("there").mode() & 0o777;
        assert_eq!(mode, 0o600, "{} says what is nobody else's business", file.display());
    }
    let table = MountTable::read().expect("mounts");
    assert_eq!(table.at(&place.mnt()).expect("mounted").source, "tcp://memory:1");
    assert!(fails(&["mount", "tcp://memory:1", mnt]).contains(&format!("cuttlefs umount {mnt}")));
    assert!(fails(&["down", mnt]).contains("cuttlefs umount"));

    assert!(succeeds(&["status", mnt, "--all"]).contains("free pages: 7"));
    let short = succeeds(&["status", mnt]);
    assert!(short.contains("problems    none known") && short.lines().count() < 20, "{short}");
    let json: serde_json::Value = serde_json::from_str(&succeeds(&["status", mnt, "--json"])).expect("JSON");
    assert_eq!(json["version"], "test");
    assert_eq!(json["mount"]["mountpoint"], *mnt, "the mount speaks for itself");
    assert_eq!(json["mount"]["pid"], mount_pid(mnt));
    assert_eq!(json["mount"]["onesided_reads"], 3, "with the volume's figures");

    let pid = mount_pid(mnt);
    let file = std::fs::File::create(place.mnt().join("f")).expect("create");
    let busy = fails(&["umount", mnt]);
    assert!(
        busy.contains(&format!("process {}", std::process::id())) && busy.contains("umount -f"),
        "{busy}"
    );
    drop(file);
    succeeds(&["umount", mnt]);
    assert!(!place.is_mounted() && !runs(pid), "umount waits for the process");
    assert!(fails(&["umount", mnt]).contains("nothing is mounted"));
    assert!(fails(&["status", mnt]).contains("not in a cuttlefs mount"));

    // An unmount by force while a file is open.
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let pid = mount_pid(mnt);
    let file = std::fs::File::create(place.mnt().join("f")).expect("create");
    succeeds(&["umount", "-f", mnt]);
    assert!(!place.is_mounted());
    drop(file);
    eventually("the end of the mount's process", || !runs(pid));
}

fn a_refused_connection_leaves_nothing() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    assert!(fails(&["mount", "tcp://away:1", mnt]).contains("nobody listens there"));
    assert!(!place.is_mounted());
    assert!(fails(&["mount", "tcp://memory:1", mnt, "-o", "bogus"]).contains("attr_cache=S"));
    assert!(fails(&["mount", "tcp://memory:1", &format!("{mnt}/none")]).contains("mkdir -p"));
    std::fs::write(place.mnt().join("f"), "").expect("write");
    assert!(fails(&["mount", "tcp://memory:1", mnt]).contains("-o nonempty"));
    succeeds(&["mount", "tcp://memory:1", mnt, "-o", "nonempty"]);
    succeeds(&["umount", mnt]);
}

fn a_dead_mount_is_mounted_again() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let pid = mount_pid(mnt);
    signal(pid, rustix::process::Signal::KILL);
    eventually("the death", || !runs(pid));
    // A request that is under way at the death fails with ECONNABORTED, once.
    let error = || std::fs::metadata(mnt).expect_err("dead").raw_os_error();
    eventually("that nobody is behind it", || error() == Some(libc::ENOTCONN));
    succeeds(&["mount", "tcp://memory:1", mnt]);
    std::fs::write(place.mnt().join("f"), "alive").expect("write");
    succeeds(&["umount", mnt]);
}

/// The process of an unmounted mount takes time to end, and must not take the next mount for its own.
fn a_place_is_mounted_again_at_once() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let mut before = Vec::new();
    for _ in 0..20 {
        succeeds(&["mount", "tcp://memory:1", mnt]);
        before.push(mount_pid(mnt));
        rustix::mount::unmount(place.mnt(), rustix::mount::UnmountFlags::empty()).expect("unmount");
    }
    succeeds(&["mount", "tcp://memory:1", mnt]);
    eventually("the end of all others", || !before.iter().any(|pid| runs(*pid)));
    let json: serde_json::Value = serde_json::from_str(&succeeds(&["status", mnt, "--json"])).expect("JSON");
    assert_eq!(json["mount"]["pid"], mount_pid(mnt));
    succeeds(&["umount", mnt]);
}

fn a_mount_that_hangs_is_forced_off() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    succeeds(&["mount", "tcp://stalls:1", mnt]);
    let pid = mount_pid(mnt);
    let file = place.mnt().join("f");
    std::fs::write(&file, "never read").expect("write");
    // More readers than the mount has threads, so that the mount answers no request any more.
    let readers: Vec<_> = (0..20)
        .map(|_| {
            let file = file.clone();
            std::thread::spawn(move || std::fs::read(file))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    assert!(fails(&["umount", mnt]).contains("umount -f"));
    assert!(fails(&["mount", "tcp://memory:1", mnt]).contains("already"), "and does not hang");
    succeeds(&["umount", "-f", mnt]);
    assert!(!place.is_mounted() && !runs(pid));
    for reader in readers {
        assert!(reader.join().expect("reader").is_err());
    }
}

/// The command looks for `cuttlefs-bench` in `PATH`, passes on the arguments after `bench`, and returns its exit code.
fn benchmarks_are_another_program() {
    let directory = tempfile::tempdir().expect("directory");
    let program = directory.path().join("cuttlefs-bench");
    let bench = |arguments: &[&str]| command(arguments).env("PATH", directory.path()).output().expect("run");
    let missing = bench(&["bench", "mount", "/mnt"]);
    let text = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(missing.status.code() == Some(1) && text.contains("cargo build"), "{text}");
    std::fs::write(&program, "#!/bin/sh\necho \"$@\"\nexit 7\n").expect("write");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    for said in ["mount /mnt --size 1G", "--help", "rpc --help"] {
        let arguments: Vec<&str> = ["bench"].into_iter().chain(said.split(' ')).collect();
        let output = bench(&arguments);
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{said}\n"));
        assert_eq!(output.status.code(), Some(7));
    }
}

/// umount(8), which a machine's shutdown runs, looks at the root directory and at the free space. So do df and many others, again and again.
fn umount_8_does_not_wait_for_the_server() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    succeeds(&["mount", "tcp://vanishes:1", mnt]);
    let pid = mount_pid(mnt);
    let run = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        let (output, said) = ended_in_time(command);
        assert!(output.status.success(), "{program}: {said}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    for _ in 0..2 {
        assert_eq!(run("stat", &["-c", "%F", mnt]), "directory");
        let free: u64 = run("stat", &["-f", "-c", "%f", mnt]).parse().expect("a number");
        assert!(free > 0);
    }
    // Only the root is answered so. The first lookup below it was still answered by the server.
    assert!(!place.mnt().join("f").exists());
    let mut deeper = Command::new("stat").arg(place.mnt().join("g")).spawn().expect("spawn");
    // More requests than the mount has threads.
    let looks: Vec<_> = (0..40)
        .map(|_| Command::new("stat").arg(mnt).stdout(Stdio::null()).spawn().expect("spawn"))
        .collect();
    for mut look in looks {
        eventually("a look at the root", || look.try_wait().expect("wait").is_some());
    }
    assert!(deeper.try_wait().expect("wait").is_none());
    deeper.kill().expect("kill");
    deeper.wait().expect("its end");
    run("umount", &[mnt]);
    assert!(!place.is_mounted());
    eventually("the end of the mount's process", || !runs(pid));
}

/// The mount's process is stopped: whoever asks the kernel about the mount waits until the process goes on.
fn a_hanging_mount_hangs_no_command() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let pid = mount_pid(mnt);
    signal(pid, rustix::process::Signal::STOP);
    let deep = format!("{mnt}/a/b");
    let up = fails_in_time(&["up", mnt, "--pool", pool]);
    assert!(up.contains("already") && up.contains(&format!("cuttlefs umount {mnt}")), "{up}");
    fails_in_time(&["mount", "tcp://memory:1", mnt]);
    let inside = fails_in_time(&["up", &deep, "--pool", pool]);
    assert!(inside.contains("does not answer"), "{inside}");
    fails_in_time(&["down", mnt]);
    assert!(in_time(&["status", &deep]).0.status.success(), "a path in the mount is that of its server");
    // Without the state file this is like another user's mount, of whose process nothing is written down.
    let state = std::fs::read_dir("/run/cuttlefs").expect("runtime directory").flatten().find(|entry| {
        entry.path().extension().is_some_and(|extension| extension == "json")
            && std::fs::read_to_string(entry.path()).is_ok_and(|text| text.contains(&format!("\"{mnt}\"")))
    });
    std::fs::remove_file(state.expect("a state file").path()).expect("remove");
    let unknown = fails_in_time(&["up", mnt, "--pool", pool]);
    assert!(unknown.contains("umount -f"), "{unknown}");
    assert!(in_time(&["umount", "-f", mnt]).0.status.success());
    assert!(!place.is_mounted());
    signal(pid, rustix::process::Signal::CONT);
    eventually("the end of the mount's process", || !runs(pid));
}

/// Runs a command, and kills it if it hangs. Returns its output, and its standard error as text.
#[track_caller]
fn in_time(arguments: &[&str]) -> (Output, String) {
    ended_in_time(command(arguments))
}

#[track_caller]
fn ended_in_time(mut command: Command) -> (Output, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn");
    let started = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if started.elapsed() > LIMIT {
            child.kill().expect("kill");
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().expect("output");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, text)
}

#[track_caller]
fn fails_in_time(arguments: &[&str]) -> String {
    let (output, text) = in_time(arguments);
    assert!(!output.status.success(), "{arguments:?} succeeded");
    text
}

fn unsynced_changes_are_not_thrown_away_silently() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    succeeds(&["mount", "tcp://strands:1", mnt]);
    let pid = mount_pid(mnt);
    let status = output(&["status", mnt, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON of the mount alone");
    assert_eq!(
        (&json["mount"]["server_is_away"], &json["mount"]["unsynced_bytes"]),
        (&true.into(), &5.into())
    );
    assert_eq!(json["mount"]["server_away_because"], "its key was taken away");
    let refused = fails(&["umount", mnt]);
    for words in [
        "stays mounted",
        "5 unsynced bytes in 2 files",
        "its key was taken away",
        "Bring the server or the network back",
    ] {
        assert!(refused.contains(words), "{refused}");
    }
    assert!(place.is_mounted() && runs(pid), "nothing was done");
    let said = succeeds(&["umount", "-f", mnt]);
    assert!(said.contains("giving up 5 unsynced bytes in 2 files, which may be lost"), "{said}");
    assert!(!place.is_mounted() && !runs(pid));

    // A mount of `up` says how to start its server again.
    let up = command(&["up", mnt, "--pool", pool]).env(STRANDS_VARIABLE, "1").output().expect("run");
    assert!(up.status.success(), "{up:?}");
    let refused = fails(&["down", mnt]);
    assert!(refused.contains(&format!("cuttlefs up {mnt} --pool {pool}")), "{refused}");
    assert!(refused.contains("cuttlefs down -f"), "{refused}");
    let said = succeeds(&["down", "-f", mnt]);
    assert!(said.contains("giving up") && !place.is_mounted(), "{said}");
}

/// An unmount by umount(8), or by a second signal, cannot be refused.
fn a_mount_that_ends_says_what_is_lost() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let foreground = || {
        let mut command = command(&["mount", "tcp://strands:1", mnt, "--foreground"]);
        let child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("spawn");
        place.wait_for_mount();
        child
    };
    // The first Ctrl-C is refused; the second one ends the mount.
    let mut child = foreground();
    let pid = child.id() as i32;
    signal(pid, rustix::process::Signal::INT);
    let mut said = std::io::BufReader::new(child.stderr.take().expect("piped"));
    hears(&mut said, "may be lost");
    assert!(place.is_mounted() && child.try_wait().expect("wait").is_none());
    signal(pid, rustix::process::Signal::INT);
    assert!(child.wait().expect("wait").success());
    // After umount(8) the process waits for the server until a signal ends it.
    let child = foreground();
    let pid = child.id() as i32;
    rustix::mount::unmount(place.mnt(), rustix::mount::UnmountFlags::empty()).expect("unmount");
    std::thread::sleep(Duration::from_millis(500));
    assert!(runs(pid), "it waits for the server");
    signal(pid, rustix::process::Signal::TERM);
    let began = Instant::now();
    let output = child.wait_with_output().expect("wait");
    assert!(began.elapsed() < LAST_SYNC_LIMIT, "and not any more");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("5 unsynced bytes in 2 files are lost"), "{said}");
    // Without a signal it gives up in the end.
    let child = foreground();
    rustix::mount::unmount(place.mnt(), rustix::mount::UnmountFlags::empty()).expect("unmount");
    let output = child.wait_with_output().expect("wait");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("5 unsynced bytes in 2 files are lost"), "{said}");
}

/// The kernel ends a mount with its last copy, and a new mount namespace begins with copies of all mounts.
fn copies_in_other_mount_namespaces_are_named() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let copy = || {
        let mut program = Command::new("unshare");
        let child =
            program.args(["-m", "--propagation", "private", "sleep", "600"]).spawn().expect("unshare");
        let pid = child.id();
        // `unshare` becomes the other program when the namespace is whole.
        eventually("the namespace", || {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
        });
        child
    };
    let end = |mut child: std::process::Child| {
        child.kill().expect("kill");
        child.wait().expect("its end");
    };
    for left_by_an_unmount in [true, false] {
        succeeds(&["mount", "tcp://memory:1", mnt]);
        let (pid, child) = (mount_pid(mnt), copy());
        if left_by_an_unmount {
            for _ in 0..2 {
                let said = fails(&["umount", mnt]);
                let named = format!("sleep (process {}) has it at {mnt}", child.id());
                assert!(said.contains(&named) && said.contains("cuttlefs umount -f"), "{said}");
                assert!(!place.is_mounted() && runs(pid));
            }
        }
        succeeds(&["umount", "-f", mnt]);
        assert!(!place.is_mounted() && !runs(pid), "with the copy in the other namespace");
        end(child);
    }
    // Without the copy the mount ends as always.
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let (pid, child) = (mount_pid(mnt), copy());
    fails(&["umount", mnt]);
    end(child);
    eventually("the end of the mount's process", || !runs(pid));
    assert!(fails(&["umount", mnt]).contains("nothing is mounted"));
}

fn foreground_ends_by_ctrl_c() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let mut child = command(&["mount", "tcp://memory:1", mnt, "--foreground"]).spawn().expect("spawn");
    place.wait_for_mount();
    std::fs::write(place.mnt().join("f"), "x").expect("write");
    signal(child.id() as i32, rustix::process::Signal::INT);
    assert!(child.wait().expect("wait").success());
    assert!(!place.is_mounted());

    // While the mount is busy the first signal is refused, and the second one forces the unmount.
    let mut command = command(&["mount", "tcp://memory:1", mnt, "--foreground"]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("spawn");
    let mut said = std::io::BufReader::new(child.stderr.take().expect("piped"));
    place.wait_for_mount();
    let open = std::fs::File::create(place.mnt().join("f")).expect("create");
    signal(child.id() as i32, rustix::process::Signal::INT);
    hears(&mut said, "press Ctrl-C again");
    assert!(place.is_mounted() && child.try_wait().expect("wait").is_none());
    signal(child.id() as i32, rustix::process::Signal::INT);
    assert!(child.wait().expect("wait").success());
    assert!(!place.is_mounted());
    drop(open);
}

fn mount_8_calls_the_helper() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let helper = place.dir.path().join("mount.fuse.cuttlefs");
    std::os::unix::fs::symlink(std::env::current_exe().expect("own path"), &helper).expect("symlink");
    let call = |arguments: &[&str]| {
        Command::new(&helper).args(arguments).env(COMMAND_VARIABLE, "1").output().expect("run")
    };
    // The arguments of mount(8): SPEC DIR [-sfnv] [-N namespace] [-o options] [-t type.subtype].
    let options = "rw,noatime,_netdev,x-systemd.automount";
    assert!(call(&["tcp://memory:1", mnt, "-f", "-o", options]).status.success());
    assert!(!place.is_mounted(), "fake");
    let output = call(&["tcp://memory:1", mnt, "-n", "-v", "-s", "-o", options, "-t", "fuse.cuttlefs"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(place.is_mounted());
    succeeds(&["umount", mnt]);
    // mount(8) prints nothing if it worked. The source is the words of fstab, by which `mount -a` finds it.
    let output = call(&["tcp://memory", mnt, "-o", options]);
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    let table = MountTable::read().expect("mounts");
    assert_eq!(table.at(&place.mnt()).expect("mounted").source, "tcp://memory");
    assert!(succeeds(&["status", mnt]).contains("tcp://memory:7950"));
    assert!(succeeds(&["status", mnt]).contains(&format!("cuttlefs status {mnt} --all")));
    succeeds(&["umount", mnt]);
    // mount.fuse3 knows only the name of the command.
    let by_libfuse = ["tcp://memory:1", mnt, "-o", "rw,dev,suid,noatime"];
    succeeds(&by_libfuse);
    assert!(place.is_mounted());
    succeeds(&["umount", mnt]);
    let refused = call(&["box", mnt, "-o", "ro"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("tcp://HOST:PORT"));
}

/// At boot the server may start after the mount, and mount(8) tries only once.
fn mount_8_waits_for_the_server() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let socket = place.dir.path().join("socket");
    let source = format!("shm://{}", socket.display());
    assert!(fails(&["mount", &source, mnt]).contains("no such socket"), "a person is told at once");
    let mut by_mount = command(&["mount-helper", &source, mnt, "-o", "rw,_netdev"]);
    let child = by_mount.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn");
    std::thread::sleep(Duration::from_secs(1));
    assert!(!place.is_mounted());
    std::fs::write(&socket, "1").expect("socket");
    let output = child.wait_with_output().expect("wait");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && place.is_mounted(), "{said}");
    assert!(said.contains("waiting up to 30 s") && said.contains("no such socket"), "{said}");
    succeeds(&["umount", mnt]);
    std::fs::remove_file(&socket).expect("remove");
    // The helper waits as long as the options say; after a refusal it does not try again.
    let gone = fails(&["mount-helper", &source, mnt, "-o", "retry=0"]);
    assert!(gone.contains("no such socket") && !gone.contains("waiting"), "{gone}");
    let gone = fails(&["mount", &source, mnt, "-o", "retry=0.5"]);
    assert!(gone.contains("waiting") && gone.contains("no such socket"), "{gone}");
    assert!(!fails(&["mount-helper", "tcp://refuses:1", mnt]).contains("waiting"));
    // A helper that was killed while it waited must not mount later.
    let mut by_mount = command(&["mount-helper", &source, mnt]);
    let mut child = by_mount.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("spawn");
    let mut line = String::new();
    std::io::BufReader::new(child.stderr.take().expect("piped")).read_line(&mut line).expect("read");
    assert!(line.contains("waiting"), "{line}");
    child.kill().expect("kill");
    child.wait().expect("its end");
    std::thread::sleep(Duration::from_secs(1));
    std::fs::write(&socket, "1").expect("socket");
    std::thread::sleep(Duration::from_secs(1));
    assert!(!place.is_mounted());
}

fn a_remount_changes_flags() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let refused = fails(&["mount", "tcp://memory:1", mnt, "-o", "remount,ro"]);
    assert!(refused.contains("is not mounted at"), "{refused}");
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let file = place.mnt().join("f");
    let options = || MountTable::read().expect("mounts").at(&place.mnt()).expect("mounted").options.clone();
    let open = std::fs::File::create(&file).expect("create");
    assert!(fails(&["mount", "tcp://memory:1", mnt, "-o", "remount,ro"]).contains("open for writing"));
    drop(open);
    // The kernel sends a close after close(2) has returned, so the remount may be refused for a moment.
    let given = "rw,user_id=0,group_id=0,default_permissions,allow_other,attr_cache=9,remount,ro";
    let remount = ["tcp://memory:1", mnt, "-o", given];
    eventually("the remount", || output(&remount).status.success());
    assert!(succeeds(&remount).contains("not changed by a remount: attr_cache=9"));
    assert!(options().starts_with("ro,nosuid,nodev"), "{}", options());
    let error = std::fs::write(&file, "x").expect_err("read-only");
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    succeeds(&["mount", "tcp://memory:1", mnt, "-o", "remount,rw"]);
    std::fs::write(&file, "x").expect("write");
    assert!(options().starts_with("rw,nosuid,nodev"), "{}", options());
    succeeds(&["umount", mnt]);
    // The options of the mount stay in force after a remount.
    succeeds(&["mount", "tcp://memory:1", mnt, "-o", "suid,dev"]);
    succeeds(&["mount", "tcp://memory:1", mnt, "-o", "remount,ro"]);
    assert!(options().starts_with("ro") && !options().contains("no"), "{}", options());
    succeeds(&["umount", mnt]);
}

fn status_while_the_server_is_away() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    succeeds(&["mount", "tcp://leaves:1", mnt]);
    // A mount has two seconds to return its figures, which it can miss on a machine that stands still for a while.
    let mut json = serde_json::Value::Null;
    eventually("the figures", || {
        let output = output(&["status", mnt, "--json"]);
        assert!(!output.status.success(), "it says that the server is away");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains("cannot reach tcp://leaves:1"), "{error}");
        json = serde_json::from_slice(&output.stdout).expect("JSON of the mount alone");
        json["mount"]["error"].is_null()
    });
    assert_eq!(json["server_error"], "cannot reach tcp://leaves:1");
    let short = output(&["status", mnt]).stdout;
    let short = String::from_utf8_lossy(&short);
    assert!(short.contains("problems    the server does not answer: cannot reach"), "{short}");
    assert_eq!(json["mount"]["onesided_reads"], 3, "{json}");
    // A mount whose process has died has no figures. A dying process closes its files before it is dead.
    signal(mount_pid(mnt), rustix::process::Signal::KILL);
    let mut dead = String::new();
    eventually("the death", || {
        dead = fails(&["status", mnt]);
        dead.contains("has died")
    });
    assert!(dead.contains(&format!("cuttlefs umount {mnt}")), "{dead}");
    let short = output(&["status", mnt]).stdout;
    let short = String::from_utf8_lossy(&short);
    assert!(
        short.contains("the process behind the mount") && !short.contains("no process of yours"),
        "{short}"
    );
    succeeds(&["umount", mnt]);
}

fn up_and_down() {
    let place = Place::new();
    // `up` makes the mount point.
    std::fs::remove_dir(place.mnt()).expect("rmdir");
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    assert!(fails(&["down", mnt]).contains("nothing is up"));
    assert!(fails(&["up", mnt, "--pool", pool, "--size", "1"]).contains("more than a byte"));
    assert!(!place.mnt().exists() && !place.pool().exists(), "what came to nothing is taken away");
    std::fs::create_dir(place.pool()).expect("mkdir");
    assert!(fails(&["up", mnt, "--pool", pool, "--size", "1"]).contains("more than a byte"));
    assert!(!place.mnt().exists() && place.pool().join("half").exists(), "what was there before stays");
    let text = succeeds(&["up", mnt, "--pool", pool, "--size", "64M", "--memory", "16M", "-o", "noatime"]);
    assert!(
        text.contains("making a pool of 64M") && text.contains(&format!("cuttlefs down {mnt}")),
        "{text}"
    );
    std::fs::write(place.mnt().join("f"), "hello").expect("write");
    assert!(succeeds(&["status", mnt]).contains("version     test"), "by the mount's source");
    let twice = fails(&["up", mnt, "--pool", pool]);
    assert!(twice.contains("is up at") && twice.contains(&format!("cuttlefs down {mnt}")), "{twice}");
    // The same pool at another mount point: the server that answers is not the one that would be started.
    let other = place.dir.path().join("other");
    let refused = fails(&["up", other.to_str().expect("UTF-8"), "--pool", pool]);
    let server = place.server_pid();
    assert!(refused.contains(&format!("served already by process {server}")), "{refused}");
    assert!(refused.contains("cuttlefs mount shm://"), "{refused}");
    assert!(MountTable::read().expect("mounts").at(&other).is_none());
    let (server, mount) = (place.server_pid(), mount_pid(mnt));
    assert!(runs(server) && runs(mount));

    let open = std::fs::File::open(place.mnt().join("f")).expect("open");
    let busy = fails(&["down", mnt]);
    assert!(busy.contains("is in use") && busy.contains("cuttlefs down -f"), "{busy}");
    assert!(runs(server), "nothing is stopped while it is in use");
    drop(open);
    assert!(succeeds(&["down", mnt]).contains("is down"));
    assert!(!place.is_mounted() && !runs(server) && !runs(mount));
    assert!(place.pool().join("stopped").exists(), "asked, not killed");

    // `up` once more, on the existing pool. A plain umount(8) ends everything, too.
    let other_size = fails(&["up", mnt, "--pool", pool, "--size", "128M"]);
    assert!(other_size.contains("has 64M, and --size says 128M"), "{other_size}");
    let text = succeeds(&["up", mnt, "--pool", pool, "--size", "64M"]);
    assert!(!text.contains("making a pool"), "{text}");
    let server = place.server_pid();
    rustix::mount::unmount(place.mnt(), rustix::mount::UnmountFlags::empty()).expect("unmount");
    eventually("the end of the server", || !runs(server));
}

fn up_in_the_foreground_stops_its_server() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    let mut child = command(&["up", mnt, "--pool", pool, "--foreground"]).spawn().expect("spawn");
    place.wait_for_mount();
    let server = place.server_pid();
    signal(child.id() as i32, rustix::process::Signal::INT);
    assert!(child.wait().expect("wait").success());
    assert!(!place.is_mounted() && !runs(server));
}

const FOREGROUND: &[&str] = &["--foreground"];
const BACKGROUND: &[&str] = &[];

/// An `up` whose server never answers, and the server's process.
fn endless_start(place: &Place, more: &[&str]) -> (std::process::Child, i32) {
    let (mnt, pool) = (place.mnt_text(), place.pool_text());
    let _ = std::fs::remove_file(place.pool().join("pid"));
    let arguments: Vec<_> =
        ["up", mnt.as_str(), "--pool", pool.as_str()].iter().chain(more).copied().collect();
    let mut up = command(&arguments);
    let up = up.env(SILENT_VARIABLE, "1").stderr(Stdio::piped()).spawn().expect("spawn");
    let is_written =
        || std::fs::read_to_string(place.pool().join("pid")).is_ok_and(|pid| pid.parse::<i32>().is_ok());
    eventually("the start of the server", is_written);
    (up, place.server_pid())
}

fn a_signal_ends_a_start_and_its_server() {
    let place = Place::new();
    std::fs::remove_dir(place.mnt()).expect("rmdir");
    for (more, sent) in [
        (FOREGROUND, rustix::process::Signal::INT),
        (FOREGROUND, rustix::process::Signal::TERM),
        (BACKGROUND, rustix::process::Signal::INT),
        (BACKGROUND, rustix::process::Signal::TERM),
        (BACKGROUND, rustix::process::Signal::KILL),
    ] {
        let (up, server) = endless_start(&place, more);
        signal(up.id() as i32, sent);
        let output = up.wait_with_output().expect("wait");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{more:?} {sent:?}: {said}");
        if sent == rustix::process::Signal::KILL {
            // Only the background process can end the server then.
            eventually("the end of the server", || !runs(server));
            continue;
        }
        assert!(said.contains("broken off while cuttlefsd started"), "{more:?} {sent:?}: {said}");
        assert!(!runs(server), "{more:?} {sent:?}");
        assert!(!place.mnt().exists(), "what was made for it is taken away");
    }
    assert!(place.pool().join("stopped").exists(), "asked, not killed");
}

fn down_ends_a_start() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    for more in [FOREGROUND, BACKGROUND] {
        let (up, server) = endless_start(&place, more);
        let another = fails(&["up", mnt, "--pool", pool]);
        assert!(another.contains("is starting there") && another.contains("cuttlefs down"), "{another}");
        assert!(succeeds(&["down", mnt]).contains("broken off"));
        assert!(!runs(server) && !up.wait_with_output().expect("wait").status.success());
        assert!(fails(&["down", mnt]).contains("nothing is up"));
    }
    // Nothing of it is in the way of the next one.
    succeeds(&["up", mnt, "--pool", pool]);
    succeeds(&["down", mnt]);
}

fn an_error_that_stays_ends_a_start() {
    let place = Place::new();
    let mut up = command(&["up", &place.mnt_text(), "--pool", &place.pool_text()]);
    up.env(STRANGER_VARIABLE, "1");
    let (output, said) = ended_in_time(up);
    assert!(!output.status.success() && said.contains("user 65534 listens"), "{said}");
    assert!(!runs(place.server_pid()) && !place.is_mounted());
}

fn up_starts_a_server_that_died_again() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    succeeds(&["up", mnt, "--pool", pool, "--memory", "24M"]);
    let mount = mount_pid(mnt);
    std::fs::write(place.mnt().join("f"), "stays").expect("write");
    let kill_server = || {
        let server = place.server_pid();
        signal(server, rustix::process::Signal::KILL);
        eventually("the death", || !runs(server));
        // Nothing answers at this socket any more. The socket of a real server would refuse connections.
        let state = state_in(&state_file(mnt)).expect("a state");
        let socket = state["source"].as_str().expect("text").strip_prefix("shm://").expect("shm");
        std::fs::remove_file(socket).expect("socket");
        server
    };
    let revive = |old: i32| {
        let said = succeeds(&["up", mnt, "--pool", pool]);
        let server = place.server_pid();
        assert!(said.contains(&format!("runs again (process {server}, --memory 24M)")), "{said}");
        assert!(server != old && runs(server) && mount_pid(mnt) == mount, "the mount is the same");
        server
    };
    let killed = kill_server();
    let other = fails(&["up", mnt, "--pool", place.dir.path().to_str().expect("UTF-8")]);
    assert!(other.contains("without its server") && other.contains(&format!("cuttlefs up {mnt}")), "{other}");
    assert!(fails(&["up", mnt, "--pool", pool, "--size", "1M"]).contains("--size says 1M"));
    let server = revive(killed);
    assert!(fails(&["up", mnt, "--pool", pool]).contains("is up at"));
    assert_eq!(std::fs::read(place.mnt().join("f")).expect("read"), b"stays");
    assert!(succeeds(&["down", mnt]).contains("is down"));
    assert!(!place.is_mounted() && !runs(server) && !runs(mount));
    assert!(place.pool().join("stopped").exists(), "asked, not killed");

    // If the mount ends in another way, the new server ends, too.
    succeeds(&["up", mnt, "--pool", pool]);
    let mount = mount_pid(mnt);
    signal(place.server_pid(), rustix::process::Signal::STOP);
    assert!(fails(&["up", mnt, "--pool", pool]).contains("is up at"), "a server that hangs has not died");
    let killed = kill_server();
    // The pool is written down, so `up` need not be told.
    succeeds(&["up", mnt]);
    let server = place.server_pid();
    assert!(server != killed && mount_pid(mnt) == mount);
    rustix::mount::unmount(place.mnt(), rustix::mount::UnmountFlags::empty()).expect("unmount");
    eventually("the end of the server", || !runs(server) && !runs(mount));
    assert!(fails(&["down", mnt]).contains("nothing is up"));
}

fn a_server_that_dies_shows_its_log() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    let output = command(&["up", mnt, "--pool", pool]).env(DIES_VARIABLE, "1").output().expect("run");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("the device is on fire"), "{text}");
    assert!(!place.is_mounted() && place.mnt().exists(), "the mount point was there before");
    assert!(place.pool().join("cuttlefs.toml").exists(), "the pool is whole");
}

fn down_stops_what_a_killed_mount_left() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    succeeds(&["up", mnt, "--pool", pool]);
    let (server, mount) = (place.server_pid(), mount_pid(mnt));
    signal(mount, rustix::process::Signal::KILL);
    eventually("the death", || !runs(mount));
    assert!(runs(server));
    // The threads of the mount's process end one by one, and until the last has ended the mount seems to be alive.
    eventually("the word of the server that is left", || {
        fails(&["up", mnt, "--pool", pool]).contains("earlier `up` still runs")
    });
    succeeds(&["down", mnt]);
    assert!(!runs(server) && !place.is_mounted());
}
