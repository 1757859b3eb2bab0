//! `mount`, `umount` and `status`.

use crate::calling::{command, eventually, fails, hears, output, succeeds};
use crate::place::{Place, mount_pid, runs, signal, state_file, watchdog_of};
use cuttlefs_client::fuse::MountTable;
use rustix::process::Signal;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;

pub fn mount_and_umount() {
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

pub fn a_refused_connection_leaves_nothing() {
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

pub fn a_dead_mount_is_mounted_again() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let pid = mount_pid(mnt);
    signal(pid, Signal::KILL);
    eventually("the death", || !runs(pid));
    // A request that is under way at the death fails with ECONNABORTED, once.
    let error = || std::fs::metadata(mnt).expect_err("dead").raw_os_error();
    eventually("that nobody is behind it", || error() == Some(libc::ENOTCONN));
    succeeds(&["mount", "tcp://memory:1", mnt]);
    std::fs::write(place.mnt().join("f"), "alive").expect("write");
    succeeds(&["umount", mnt]);
}

pub fn a_watchdog_is_there_as_long_as_its_mount() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let pid = mount_pid(mnt);
    let watchdog = watchdog_of(pid).expect("a watchdog");
    let has =
        |descriptor: &str| std::fs::read_link(format!("/proc/{watchdog}/{descriptor}")).expect("a link");
    assert!(has("fd/1").ends_with("abort") && has("fd/2") == Path::new("/dev/null"));
    assert_eq!(has("cwd"), Path::new("/"));
    for descriptor in std::fs::read_dir(format!("/proc/{watchdog}/fd")).expect("descriptors").flatten() {
        let open = std::fs::read_link(descriptor.path()).unwrap_or_default();
        assert!(open != Path::new("/dev/fuse") && !open.starts_with(place.dir.path()), "{}", open.display());
    }
    let blocks_signals = || {
        let status = std::fs::read_to_string(format!("/proc/{watchdog}/status")).expect("its status");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).expect("signals");
        u64::from_str_radix(blocked, 16).expect("a number") != 0
    };
    eventually("that it blocks signals", blocks_signals);
    // As a service manager and a closed terminal do.
    for sent in [Signal::TERM, Signal::INT, Signal::HUP] {
        signal(watchdog, sent);
    }
    std::fs::write(place.mnt().join("f"), "served").expect("write");
    assert!(runs(watchdog));
    succeeds(&["umount", mnt]);
    eventually("the end of the watchdog", || !runs(watchdog));

    // A mount goes on without it.
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let (pid, watchdog) = (mount_pid(mnt), watchdog_of(mount_pid(mnt)).expect("a watchdog"));
    signal(watchdog, Signal::KILL);
    eventually("the death", || !runs(watchdog));
    std::fs::write(place.mnt().join("f"), "served").expect("write");
    succeeds(&["umount", mnt]);
    assert!(!runs(pid));
}

/// The process of an unmounted mount takes time to end, and must not take the next mount for its own.
pub fn a_place_is_mounted_again_at_once() {
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

pub fn foreground_ends_by_ctrl_c() {
    let place = Place::new();
    let mnt = &place.mnt_text();
    let mut child = command(&["mount", "tcp://memory:1", mnt, "--foreground"]).spawn().expect("spawn");
    place.wait_for_mount();
    std::fs::write(place.mnt().join("f"), "x").expect("write");
    signal(child.id() as i32, Signal::INT);
    assert!(child.wait().expect("wait").success());
    assert!(!place.is_mounted());

    // While the mount is busy the first signal is refused, and the second one forces the unmount.
    let mut command = command(&["mount", "tcp://memory:1", mnt, "--foreground"]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("spawn");
    let mut said = std::io::BufReader::new(child.stderr.take().expect("piped"));
    place.wait_for_mount();
    let open = std::fs::File::create(place.mnt().join("f")).expect("create");
    signal(child.id() as i32, Signal::INT);
    hears(&mut said, "press Ctrl-C again");
    assert!(place.is_mounted() && child.try_wait().expect("wait").is_none());
    signal(child.id() as i32, Signal::INT);
    assert!(child.wait().expect("wait").success());
    assert!(!place.is_mounted());
    drop(open);
}

pub fn a_remount_changes_flags() {
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

pub fn status_while_the_server_is_away() {
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
    signal(mount_pid(mnt), Signal::KILL);
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
