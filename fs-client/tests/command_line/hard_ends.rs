//! Mounts that do not end in order: they hang, others hold them, or their end loses something.

use crate::backend::STRANDS_VARIABLE;
use crate::calling::{
    COMMAND_VARIABLE, command, eventually, fails, fails_in_time, hears, in_time, output, succeeds,
};
use crate::place::{Place, mount_pid, runs, signal, waits_in_the_kernel, watchdog_of};
use rustix::fs::{SeekFrom, seek};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub fn a_mount_that_hangs_is_forced_off() {
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

/// The mount's process is stopped: whoever asks the kernel about the mount waits until the process goes on.
pub fn a_hanging_mount_hangs_no_command() {
    let place = Place::new();
    let (mnt, pool) = (&place.mnt_text(), &place.pool_text());
    succeeds(&["mount", "tcp://memory:1", mnt]);
    let pid = mount_pid(mnt);
    signal(pid, Signal::STOP);
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
    signal(pid, Signal::CONT);
    eventually("the end of the mount's process", || !runs(pid));
}

/// A thread of the mount waits in the kernel for pages that the mount itself is to bring. It keeps the device open, so the kernel alone would never end the
/// mount. SIGABRT dumps core, which waits for that thread while all others still have their descriptors.
pub fn a_mount_that_dies_while_the_kernel_waits_for_it_frees_programs() {
    for death in [Signal::KILL, Signal::ABORT] {
        let place = Place::new();
        let mnt = &place.mnt_text();
        succeeds(&["mount", "tcp://stalls:1", mnt]);
        let pid = mount_pid(mnt);
        let watchdog = watchdog_of(pid).expect("a watchdog");
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        prlimit(Pid::from_raw(pid), Resource::Core, none).expect("no core file");
        let path = place.mnt().join("f");
        std::fs::write(&path, "never read").expect("write");
        let file = std::fs::File::options().read(true).write(true).open(&path).expect("open");
        let reader = std::thread::spawn(move || std::fs::read(path));
        // Has what was stored through mappings written back, of which there is nothing, and pages forgotten.
        let seeker = std::thread::spawn(move || while seek(&file, SeekFrom::Data(0)).is_ok() {});
        eventually("the wait", || waits_in_the_kernel(pid, "cache-answers"));
        signal(pid, death);
        eventually("the end of the mount's process", || !runs(pid));
        assert!(reader.join().expect("a reader").is_err());
        seeker.join().expect("it ends with the mount");
        eventually("the end of the watchdog", || !runs(watchdog));
        succeeds(&["umount", mnt]);
    }
}

/// How long the end of a mount waits for its server, if no signal hurries it.
pub const LAST_SYNC_LIMIT: Duration = Duration::from_secs(30);

pub fn unsynced_changes_are_not_thrown_away_silently() {
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
pub fn a_mount_that_ends_says_what_is_lost() {
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
    signal(pid, Signal::INT);
    let mut said = std::io::BufReader::new(child.stderr.take().expect("piped"));
    hears(&mut said, "may be lost");
    assert!(place.is_mounted() && child.try_wait().expect("wait").is_none());
    signal(pid, Signal::INT);
    assert!(child.wait().expect("wait").success());
    // After umount(8) the process waits for the server until a signal ends it.
    let child = foreground();
    let pid = child.id() as i32;
    rustix::mount::unmount(place.mnt(), rustix::mount::UnmountFlags::empty()).expect("unmount");
    std::thread::sleep(Duration::from_millis(500));
    assert!(runs(pid), "it waits for the server");
    signal(pid, Signal::TERM);
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
pub fn copies_in_other_mount_namespaces_are_named() {
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

/// Without the mount table a mount point cannot be looked up. That is no missing mount point.
pub fn without_proc_commands_ask_for_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("a name");
    for command in ["umount", "status", "down", "remount"] {
        let arguments = match command {
            "remount" => vec!["mount", "tcp://memory:1", path, "-o", "remount"],
            command => vec![command, path],
        };
        let output = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-c", "umount -l /proc && exec \"$@\"", "sh"])
            .arg(std::env::current_exe().expect("this program's file"))
            .args(&arguments)
            .env(COMMAND_VARIABLE, "1")
            .output()
            .expect("unshare");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("is /proc mounted?"), "{arguments:?}: {said}");
        assert!(!said.contains("there is no"), "{arguments:?}: {said}");
    }
}
