//! `up` and `down`: a mount with a server of its own.

use crate::backend::{DIES_VARIABLE, SILENT_VARIABLE, STRANGER_VARIABLE};
use crate::calling::{LIMIT, command, ended_in_time, eventually, fails, output, succeeds};
use crate::place::{Place, mount_pid, runs, signal, state_file, state_in, watchdog_of};
use cuttlefs_client::fuse::MountTable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::process::Stdio;

pub fn up_and_down() {
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

pub fn up_in_the_foreground_stops_its_server() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    let mut child = command(&["up", mnt, "--pool", pool, "--foreground"]).spawn().expect("spawn");
    place.wait_for_mount();
    let server = place.server_pid();
    // As a command leaves it that has started the server again.
    std::fs::write(state_file(mnt).with_extension("log"), "").expect("a file");
    let status = output(&["status", mnt, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert!(json["mount"]["pid"].is_number() && json["mount"]["log"].is_null(), "{json}");
    signal(child.id() as i32, rustix::process::Signal::INT);
    assert!(child.wait().expect("wait").success());
    assert!(!place.is_mounted() && !runs(server));
}

pub fn up_starts_a_server_that_died_again() {
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

pub fn a_server_that_dies_shows_its_log() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    let output = command(&["up", mnt, "--pool", pool]).env(DIES_VARIABLE, "1").output().expect("run");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("the device is on fire"), "{text}");
    assert!(!place.is_mounted() && place.mnt().exists(), "the mount point was there before");
    assert!(place.pool().join("cuttlefs.toml").exists(), "the pool is whole");
}

pub fn an_error_that_stays_ends_a_start() {
    let place = Place::new();
    let mut up = command(&["up", &place.mnt_text(), "--pool", &place.pool_text()]);
    up.env(STRANGER_VARIABLE, "1");
    let (output, said) = ended_in_time(up);
    assert!(!output.status.success() && said.contains("user 65534 listens"), "{said}");
    assert!(!runs(place.server_pid()) && !place.is_mounted());
}

pub fn down_stops_what_a_killed_mount_left() {
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

pub const FOREGROUND: &[&str] = &["--foreground"];
pub const BACKGROUND: &[&str] = &[];

/// An `up` whose server never answers, and the server's process.
pub fn endless_start(place: &Place, more: &[&str]) -> (std::process::Child, i32) {
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

pub fn a_signal_ends_a_start_and_its_server() {
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

pub fn down_ends_a_start() {
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

/// A shell's `9>lock` or `3>&1`: whoever waits for its end must not wait for the end of the mount.
pub fn what_a_shell_has_open_is_not_kept() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    for start in [["up", mnt, "--pool", pool].as_slice(), &["mount", "tcp://memory:1", mnt]] {
        // Programs that are started inherit both ends.
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        succeeds(start);
        assert!(watchdog_of(mount_pid(mnt)).is_some());
        drop(write);
        let limit = Timespec::try_from(LIMIT).expect("a time");
        let mut ends = [PollFd::new(&read, PollFlags::IN)];
        assert_eq!(poll(&mut ends, Some(&limit)), Ok(1), "{start:?} has left the pipe open");
        assert_eq!(ends[0].revents(), PollFlags::HUP);
        succeeds(&[if start[0] == "up" { "down" } else { "umount" }, mnt]);
    }
}
