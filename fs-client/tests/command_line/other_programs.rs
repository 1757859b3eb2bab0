//! The command and other programs: it is the helper of mount(8), umount(8) ends its mounts, and it runs `cuttlefs-bench`.

use crate::calling::{COMMAND_VARIABLE, command, ended_in_time, eventually, fails, succeeds};
use crate::place::{Place, mount_pid, runs};
use cuttlefs_client::fuse::MountTable;
use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

pub fn mount_8_calls_the_helper() {
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
pub fn mount_8_waits_for_the_server() {
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

/// umount(8), which a machine's shutdown runs, looks at the root directory and at the free space. So do df and many others, again and again.
pub fn umount_8_does_not_wait_for_the_server() {
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

/// The command looks for `cuttlefs-bench` in `PATH`, passes on the arguments after `bench`, and returns its exit code.
pub fn benchmarks_are_another_program() {
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
