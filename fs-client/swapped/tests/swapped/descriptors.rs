//! Where descriptors are few: those of a program, and those of the swapper.

use super::{CROWD, TASK, USED, WORDS, crowd, ends_well, look, map, passes, put, word};
use cuttlefs_client::swap::wire::PAGE;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::AsFd;
use std::process::Command;

#[test]
fn a_program_that_has_all_its_files_open_can_fork() {
    let Some(figures) = passes("full") else { return };
    assert_eq!(figures.forks, CROWD, "{figures}");
}

#[test]
fn forks_wait_for_descriptors() {
    // In a process of its own, with a limit of its own.
    let status = Command::new(std::env::current_exe().expect("this program's file"))
        .args(["--exact", "task", "--nocapture", "--test-threads=1"])
        .env(TASK, "few")
        .status();
    assert!(status.expect("started").success());
}

/// Serves a program that forks more processes than there are descriptors for.
pub fn few() {
    let limit = Rlimit { current: Some(FEW_DESCRIPTORS), maximum: Some(FEW_DESCRIPTORS) };
    setrlimit(Resource::Nofile, limit).expect("lowered");
    let Some(figures) = passes("waits") else { return };
    assert_eq!(figures.forks, HELD as u64, "{figures}");
}

const FEW_DESCRIPTORS: u64 = 40;
/// Children that are there at once, if there are descriptors for all: two each.
const HELD: usize = 30;

/// Forks children that stay, until one of them has to wait. Another thread moves memory meanwhile. When the children may end, all have what they had.
pub fn waits_in_fork() {
    let (words, flags) = (USED * WORDS, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    let (region, target) = (map(USED) as usize, map(USED) as usize);
    put(region as *mut u64, 0..words, 50);
    let (parents, childrens) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let forked = std::sync::atomic::AtomicUsize::new(0);
    let forked = &forked;
    std::thread::scope(|scope| {
        let children = scope.spawn(|| {
            let fork = |_| {
                // SAFETY: the child looks at memory, waits, and ends by `_exit`.
                let pid = unsafe { libc::fork() };
                assert!(pid >= 0, "forked");
                if pid == 0 {
                    let mut there = 0u8;
                    // SAFETY: ends the child's copy of the parent's end; asks whether the region is where it was, and looks at it where it is.
                    unsafe {
                        libc::close(std::os::fd::AsRawFd::as_raw_fd(&parents));
                        let _ = std::io::Read::read(&mut &childrens, &mut [0]);
                        let is_there = libc::mincore(region as *mut libc::c_void, PAGE, &mut there) == 0;
                        let at = if is_there { region } else { target } as *const u64;
                        let is_right =
                            (0..words).step_by(WORDS).all(|index| at.add(index).read() == word(index, 50));
                        libc::_exit(i32::from(!is_right));
                    }
                }
                forked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                pid
            };
            (0..HELD).map(fork).collect::<Vec<libc::pid_t>>()
        });
        let count = || forked.load(std::sync::atomic::Ordering::Relaxed);
        let mut before = None;
        while before != Some(count()) {
            before = Some(count());
            std::thread::sleep(std::time::Duration::from_millis(500));
        }
        assert!(count() < HELD, "one waits");
        // SAFETY: both ranges were mapped here.
        let moved =
            unsafe { libc::syscall(libc::SYS_mremap, region, USED * PAGE, USED * PAGE, flags, target) };
        assert_eq!(moved, target as i64);
        parents.shutdown(std::net::Shutdown::Both).expect("the children may end");
        children.join().expect("all were forked").into_iter().for_each(ends_well);
    });
    look(target as *mut u64, 0..words, |index| word(index, 50));
}

/// Forks when no descriptor is free.
pub fn full() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(FEW_DESCRIPTORS), maximum }).expect("lowered");
    let mut all = Vec::new();
    while let Ok(another) = std::io::stdin().as_fd().try_clone_to_owned() {
        all.push(another);
    }
    crowd(CROWD, false);
    assert!(std::io::stdin().as_fd().try_clone_to_owned().is_err(), "none is free");
}
