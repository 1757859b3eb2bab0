//! Programs that are interrupted while they wait for a server that is away, on real mounts of the in-memory volume.
//!
//! The tests need root and `/dev/fuse`: see `mount_memory`.

// Each test program uses a part of this module.
#[allow(dead_code)]
mod memory_volume;

use cuttlefs_client::fuse::FuseSettings;
use memory_volume::mount::Mount;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::thread::JoinHandleExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a test waits for something that should happen at once, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn run(program: &str, path: &Path) -> Child {
    let mut command = Command::new(program);
    command.arg(path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect(program)
}

/// Kills a program, and waits until it has ended.
fn kill(mut child: Child) {
    child.kill().expect("kill");
    wait_for("a killed program ends", || child.try_wait().expect("wait").is_some());
}

fn figure(m: &Mount, name: &str) -> u64 {
    let figures = m.mounted().figures()();
    figures.iter().find(|(known, _)| *known == name).expect(name).1
}

#[test]
fn killed_programs_end_though_nobody_answers_them() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    // Many more programs than the mount has threads.
    let readers = 3 * FuseSettings::default().threads;
    for number in 0..readers {
        fs::write(m.path(&format!("f{number}")), b"bytes").expect("write");
    }
    for operation in ["read", "open", "lookup"] {
        let before = m.volume.calls(operation);
        m.volume.hold(Some(operation));
        let name = if operation == "lookup" { "missing" } else { "f" };
        // Each program reads a file of its own: reads of one page would be one request.
        let programs: Vec<Child> =
            (0..readers).map(|number| run("cat", &m.path(&format!("{name}{number}")))).collect();
        wait_for("requests arrive", || m.volume.calls(operation) > before);
        programs.into_iter().for_each(kill);
        m.volume.hold(None);
        assert_eq!(fs::read(m.path("f0")).expect("read"), b"bytes", "after killed {operation}s");
    }
    assert!(figure(&m, "fuse_interrupted") > 0);
    m.end();
}

#[test]
fn requests_are_taken_on_while_all_threads_wait() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let files = 2 * FuseSettings::default().threads;
    for number in 0..files {
        fs::write(m.path(&format!("f{number}")), b"bytes").expect("write");
    }
    let other = m.path("other");
    fs::create_dir(&other).expect("mkdir");
    m.volume.hold(Some("open"));
    let before = m.volume.calls("open");
    let programs: Vec<Child> = (0..files).map(|number| run("cat", &m.path(&format!("f{number}")))).collect();
    wait_for("all opens arrive", || m.volume.calls("open") - before == files as u64);
    assert!(figure(&m, "fuse_spare_requests") > 0);
    fs::create_dir(other.join("made meanwhile")).expect("what is not held is done");
    m.volume.hold(None);
    for mut program in programs {
        assert!(program.wait().expect("wait").success());
    }
    m.end();
}

#[test]
fn a_handled_signal_ends_a_direct_read_that_waits_long_and_no_other() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    fs::write(m.path("f"), b"bytes").expect("write");
    // SAFETY: the handler does nothing.
    unsafe { signal_hook::low_level::register(libc::SIGUSR1, || {}) }.expect("a handler");
    let read = |held: Option<&'static str>, path: &Path| {
        m.volume.hold(held);
        let path = path.to_owned();
        std::thread::spawn(move || {
            #[repr(align(4096))]
            struct Page([u8; 4096]);
            let mut page = Box::new(Page([0; 4096]));
            // A program that waits for a page of the page cache can only be killed, and does not notice other signals, as on any file system.
            let mut file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
            file.read(&mut page.0).map(|len| page.0[..len].to_vec())
        })
    };
    let signal = |thread: &std::thread::JoinHandle<_>| {
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
    };
    let before = m.volume.calls("read");
    let thread = read(Some("read"), &m.path("f"));
    wait_for("the read arrives", || m.volume.calls("read") > before);
    signal(&thread);
    wait_for("the read ends", || thread.is_finished());
    let error = thread.join().expect("joined").expect_err("interrupted");
    assert_eq!(error.raw_os_error(), Some(libc::EINTR));

    // The answer follows soon after the signal, so the program gets the answer, not EINTR.
    let before = m.volume.calls("read");
    let thread = read(Some("read"), &m.path("f"));
    wait_for("the read arrives", || m.volume.calls("read") > before);
    signal(&thread);
    std::thread::sleep(Duration::from_millis(100));
    m.volume.hold(None);
    assert_eq!(thread.join().expect("joined").expect("read"), b"bytes");
    m.end();
}

#[test]
fn a_file_that_was_opened_for_a_killed_program_is_closed() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    fs::write(m.path("f"), b"bytes").expect("write");
    for (operation, program, name) in [("open", "cat", "f"), ("create", "touch", "new")] {
        let (before, released) = (m.volume.calls(operation), m.volume.calls("release"));
        m.volume.hold(Some(operation));
        let program = run(program, &m.path(name));
        wait_for("the request arrives", || m.volume.calls(operation) > before);
        kill(program);
        m.volume.hold(None);
        // The request had been sent, so the open takes effect.
        wait_for("what was opened is closed", || m.volume.calls("release") > released);
        wait_for("nothing is open", || m.volume.open_handles() == 0);
    }
    // The kernel may report the end of the last program late, so the last create may still be under way.
    wait_for("the root and two files", || m.volume.inodes() == 3 && m.volume.open_handles() == 0);
    m.end();
}

#[test]
fn interrupts_in_a_loop_leave_nothing_behind() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    fs::write(m.path("f"), vec![1; 100_000]).expect("write");
    for round in 0..100 {
        // Each program is killed at some moment of its work, while the volume answers.
        let program = run("cat", &m.path("f"));
        std::thread::sleep(Duration::from_micros(round * 100));
        kill(program);
    }
    assert_eq!(fs::read(m.path("f")).expect("read").len(), 100_000);
    m.end();
}
