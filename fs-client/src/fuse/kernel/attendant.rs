//! The attendant: it looks after callers that do not want to wait, and after a session whose threads all wait.
//!
//! # Interrupts
//! The kernel tells of a signal once, whatever it is: a child that ended, a stop, SIGKILL. The program cannot handle it until its system call
//! ends; that takes a reply, also for a program that is being killed. The attendant's action ([`judge`]):
//!
//! | signal | request | |
//! | --- | --- | --- |
//! | ends the process | any | EINTR at once, which the program does not see |
//! | will be handled | wait for a lock | the wait is given up at once, if the server has said that there is one |
//! | will be handled | READ, OPEN, FSYNC | EINTR when the request has lasted [`PATIENCE`] longer: a repeated call does nothing twice |
//! | will be handled | WRITE, CREATE, SETATTR, FALLOCATE | EINTR after that, if nothing was sent to the server yet |
//! | will be handled | any other | goes on: POSIX knows no EINTR of it |
//! | cannot be seen (another process namespace) | any | as one that ends the process, after `PATIENCE` |
//! | stops, is ignored, went to another thread | any | goes on |
//!
//! `/proc/THREAD/status` shows which case it is. The kernel does not report a second signal, so an interrupted request is checked again each
//! [`LOOK_PERIOD`] until it is answered. Other requests are never checked.
//!
//! The thread of a request that was ended goes on until it may stop (`transport::interrupt`). Its answer is dropped, and a file or lock that the
//! answer hands over is given back.
//!
//! # When all threads wait
//! Then no thread would read the next interrupt. So after [`STUCK_PERIOD`] in which no message was read, a spare reader reads on, and gives each
//! request a thread of its own: at most [`SPARE_THREADS_MAX`] threads, with at most [`SPARE_BYTES_MAX`] bytes. Further requests wait in the kernel,
//! where SIGKILL ends them.

use super::abi::opcode;
use super::dispatch::{self, Header, Kind};
use super::filesystem::Filesystem;
use super::requests::{Attention, Connection, Pending};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long after its signal a request may last before its caller gets EINTR. Signals are common (timers, children), and so are slow disks; EINTR is
/// meant for servers that are away.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often interrupted requests are checked.
const LOOK_PERIOD: Duration = Duration::from_millis(50);
/// Checks take at most one part of this many of the time.
const LOOK_SHARE: u32 = 20;
/// How long no thread reads a message before the spare reader does.
const STUCK_PERIOD: Duration = Duration::from_millis(20);
/// How long the attendant goes on checking whether all threads wait, after they last did.
const WATCH: Duration = Duration::from_secs(1);
/// The most spare threads, with one request each.
const SPARE_THREADS_MAX: usize = 256;
/// The most bytes of their requests, most of which are those of writes.
const SPARE_BYTES_MAX: usize = 32 << 20;

/// Signals that stop a process unless it handles them.
const STOP_SIGNALS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Signals that do nothing unless a process handles them. The kernel keeps one that the thread it was sent to blocks just then.
const IDLE_SIGNALS: [i32; 4] = [libc::SIGCHLD, libc::SIGURG, libc::SIGWINCH, libc::SIGCONT];

/// What a caller that got a signal is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    /// The caller ends.
    Ends,
    /// The caller handles a signal.
    Handles,
    /// The caller need not return from its system call.
    Waits,
    /// This process cannot see the caller.
    Unseen,
}

/// The action for an interrupted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The request goes on.
    GoesOn,
    /// The request gives up what can still be given up.
    GiveUp,
    /// The caller gets EINTR now.
    End,
}

fn judge(operation: u32, caller: Caller, waited: Duration) -> Verdict {
    let patient = waited < PATIENCE;
    match (caller, operation) {
        (Caller::Ends, _) => Verdict::End,
        (Caller::Waits, _) => Verdict::GoesOn,
        (Caller::Handles | Caller::Unseen, opcode::SETLKW) => Verdict::GiveUp,
        _ if patient => Verdict::GoesOn,
        (Caller::Unseen, _)
        | (Caller::Handles, opcode::READ | opcode::OPEN | opcode::FSYNC | opcode::FSYNCDIR) => Verdict::End,
        (Caller::Handles, opcode::WRITE | opcode::CREATE | opcode::SETATTR | opcode::FALLOCATE) => {
            Verdict::GiveUp
        }
        (Caller::Handles, _) => Verdict::GoesOn,
    }
}

fn look_at(thread: u32) -> Caller {
    if thread == 0 {
        return Caller::Unseen;
    }
    match std::fs::read_to_string(format!("/proc/{thread}/status")) {
        Ok(status) => caller_with(&status),
        Err(_) => Caller::Unseen,
    }
}

/// What a thread with this status is about to do. The kernel turns each signal that ends a process into SIGKILL.
fn caller_with(status: &str) -> Caller {
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        u64::from_str_radix(line.trim_start_matches(':').trim(), 16).ok()
    };
    let (Some(own), Some(shared), Some(blocked), Some(ignored), Some(caught)) =
        (set("SigPnd"), set("ShdPnd"), set("SigBlk"), set("SigIgn"), set("SigCgt"))
    else {
        return Caller::Unseen;
    };
    let bit = |signal: i32| 1u64 << (signal - 1);
    let others = STOP_SIGNALS.iter().chain(&IDLE_SIGNALS).fold(0, |all, signal| all | bit(*signal)) & !caught;
    let pending = (own | shared) & !ignored & !others;
    if pending & bit(libc::SIGKILL) != 0 {
        Caller::Ends
    } else if pending & !blocked != 0 {
        // A signal that dumps core ends the process, too, but the thread itself does that.
        if pending & !blocked & !caught != 0 { Caller::Ends } else { Caller::Handles }
    } else {
        Caller::Waits
    }
}

/// Starts the attendant and the spare reader.
pub(super) fn start<F: Filesystem>(
    connection: &Arc<Connection>,
    file_system: &Arc<F>,
    buffer_len: usize,
) -> io::Result<()> {
    let (c, f) = (connection.clone(), file_system.clone());
    std::thread::Builder::new().name("fuse-attendant".to_owned()).spawn(move || attend(&c, &*f))?;
    let (c, f) = (connection.clone(), file_system.clone());
    std::thread::Builder::new()
        .name("fuse-spare".to_owned())
        .spawn(move || read_while_stuck(&c, &f, buffer_len))?;
    Ok(())
}

fn attend<F: Filesystem>(connection: &Connection, file_system: &F) {
    let mut taken_before = None;
    let mut watched_since = Instant::now();
    let mut looked = Instant::now();
    let mut look_pause = Duration::ZERO;
    loop {
        let (none_idle, taken) = connection.progress();
        if none_idle {
            watched_since = Instant::now();
        }
        let mut attention = connection.attention.lock();
        if attention.has_ended {
            return;
        }
        let is_stuck = none_idle && taken_before == Some(taken);
        taken_before = Some(taken);
        if is_stuck && !attention.is_stuck {
            attention.is_stuck = true;
            connection.spare.notify_all();
        }
        if attention.interrupted.is_empty() {
            if watched_since.elapsed() < WATCH {
                connection.attend.wait_for(&mut attention, STUCK_PERIOD);
                continue;
            }
            connection.attendant_sleeps.store(true, Ordering::SeqCst);
            if !connection.progress().0 {
                connection.attend.wait(&mut attention);
            }
            connection.attendant_sleeps.store(false, Ordering::SeqCst);
            watched_since = Instant::now();
            look_pause = Duration::ZERO;
            continue;
        }
        if looked.elapsed() < look_pause {
            connection.attend.wait_for(&mut attention, STUCK_PERIOD);
            continue;
        }
        attention.interrupted.retain(|(pending, _)| !pending.is_answered());
        let interrupted = attention.interrupted.clone();
        drop(attention);
        looked = Instant::now();
        look_at_each(connection, file_system, &interrupted);
        look_pause = LOOK_PERIOD.max(looked.elapsed() * LOOK_SHARE);
    }
}

fn look_at_each<F: Filesystem>(
    connection: &Connection,
    file_system: &F,
    interrupted: &[(Arc<Pending>, Instant)],
) {
    let mut is_lock_given_up = false;
    for (pending, since) in interrupted {
        let verdict = judge(pending.opcode, look_at(pending.thread), since.elapsed());
        match verdict {
            Verdict::GoesOn => continue,
            Verdict::GiveUp => pending.interrupt(),
            Verdict::End => connection.end_interrupted(pending),
        }
        is_lock_given_up |= pending.opcode == opcode::SETLKW;
    }
    if is_lock_given_up {
        file_system.lock_waits_interrupted();
    }
}

fn read_while_stuck<F: Filesystem>(connection: &Arc<Connection>, file_system: &Arc<F>, buffer_len: usize) {
    loop {
        let mut attention = connection.attention.lock();
        while !attention.has_ended && !may_read(&attention) {
            connection.spare.wait(&mut attention);
        }
        if attention.has_ended {
            return;
        }
        drop(attention);
        // Allocated only while all threads wait.
        let mut buffer = vec![0; buffer_len];
        while read_one(connection, file_system, &mut buffer) {}
    }
}

/// Whether the spare reader must read, and there is room for a request.
fn may_read(attention: &Attention) -> bool {
    let has_room = attention.spare_threads < SPARE_THREADS_MAX && attention.spare_bytes < SPARE_BYTES_MAX;
    attention.is_stuck && has_room
}

/// Reads one message, and gives a request a thread. `false`: another thread reads, or no spare thread is left.
fn read_one<F: Filesystem>(connection: &Arc<Connection>, file_system: &Arc<F>, buffer: &mut [u8]) -> bool {
    let Some(len) = connection.receive(buffer) else {
        connection.end();
        return false;
    };
    let message = &buffer[..len];
    match Header::parse(message).map(|(header, _)| dispatch::kind_of(&header)) {
        Ok(Kind::Request) => {
            connection.spare_requests.fetch_add(1, Ordering::Relaxed);
            let (c, f, copy) = (connection.clone(), file_system.clone(), message.to_vec());
            {
                let mut attention = connection.attention.lock();
                attention.spare_threads += 1;
                attention.spare_bytes += len;
            }
            let handle = move || {
                dispatch::handle(&c, &*f, &copy);
                let mut attention = c.attention.lock();
                attention.spare_threads -= 1;
                attention.spare_bytes -= len;
                c.spare.notify_all();
            };
            if let Err(error) = std::thread::Builder::new().name("fuse-request".to_owned()).spawn(handle) {
                tracing::error!(%error, "a thread for a request could not be started");
                let mut attention = connection.attention.lock();
                attention.spare_threads -= 1;
                attention.spare_bytes -= len;
                drop(attention);
                let header = Header::parse(message).map(|(header, _)| header);
                if let Ok(Header { opcode, unique, .. }) = header {
                    connection.answer(&connection.note(unique, opcode, 0), libc::ENOMEM, &[]);
                }
            }
        }
        // These kinds of messages do not wait.
        _ => {
            if !dispatch::handle(connection, &**file_system, message) {
                connection.end();
                return false;
            }
        }
    }
    let mut attention = connection.attention.lock();
    if !connection.progress().0 {
        attention.is_stuck = false;
        // The attendant checks whether all threads wait again.
        connection.attend.notify_all();
    }
    may_read(&attention)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(10);

    #[test]
    fn who_is_killed_waits_for_nothing_and_who_handles_a_signal_as_posix_says() {
        for operation in [opcode::READ, opcode::WRITE, opcode::MKDIR, opcode::LOOKUP, opcode::SETLKW] {
            assert_eq!(judge(operation, Caller::Ends, Duration::ZERO), Verdict::End);
            assert_eq!(judge(operation, Caller::Waits, PATIENCE * 100), Verdict::GoesOn);
        }
        for (operation, verdict) in [
            (opcode::READ, Verdict::End),
            (opcode::OPEN, Verdict::End),
            (opcode::FSYNC, Verdict::End),
            (opcode::WRITE, Verdict::GiveUp),
            (opcode::CREATE, Verdict::GiveUp),
            (opcode::MKDIR, Verdict::GoesOn),
            (opcode::RENAME2, Verdict::GoesOn),
            (opcode::GETATTR, Verdict::GoesOn),
        ] {
            assert_eq!(judge(operation, Caller::Handles, SOON), Verdict::GoesOn, "{operation}");
            assert_eq!(judge(operation, Caller::Handles, PATIENCE), verdict, "{operation}");
            assert_eq!(judge(operation, Caller::Unseen, SOON), Verdict::GoesOn, "{operation}");
            assert_eq!(judge(operation, Caller::Unseen, PATIENCE), Verdict::End, "{operation}");
        }
        assert_eq!(judge(opcode::SETLKW, Caller::Handles, Duration::ZERO), Verdict::GiveUp);
    }

    #[test]
    fn what_a_caller_is_about_to_do() {
        let status = |own: u64, shared: u64, blocked: u64, ignored: u64, caught: u64| {
            caller_with(&format!(
                "Name:\tflock\nSigQ:\t0/7\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n\
                 SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
            ))
        };
        let bit = |signal: i32| 1u64 << (signal - 1);
        let (term, stop) = (bit(libc::SIGTERM), bit(libc::SIGTSTP));
        assert_eq!(status(0, 0, 0, 0, term), Caller::Waits);
        assert_eq!(status(term, 0, 0, 0, term), Caller::Handles);
        assert_eq!(status(0, term, 0, 0, term), Caller::Handles);
        assert_eq!(status(term, 0, 0, 0, 0), Caller::Ends);
        assert_eq!(status(bit(libc::SIGKILL), 0, 0, 0, 0), Caller::Ends);
        assert_eq!(status(bit(libc::SIGKILL), term, term, 0, term), Caller::Ends);
        assert_eq!(status(term, 0, term, 0, term), Caller::Waits);
        assert_eq!(status(0, term, 0, term, 0), Caller::Waits);
        assert_eq!(status(0, stop, 0, 0, 0), Caller::Waits, "it only stops");
        assert_eq!(status(0, stop, 0, 0, stop), Caller::Handles);
        for idle in IDLE_SIGNALS.map(bit) {
            assert_eq!(status(0, idle, 0, 0, 0), Caller::Waits, "a child that ended was taken for SIGKILL");
            assert_eq!(status(0, idle, 0, 0, idle), Caller::Handles);
            assert_eq!(status(0, idle | term, 0, 0, 0), Caller::Ends);
        }
        assert_eq!(caller_with("Name:\tgone\n"), Caller::Unseen);
        assert_eq!(caller_with(&std::fs::read_to_string("/proc/self/status").expect("proc")), Caller::Waits);
        assert_eq!(look_at(0), Caller::Unseen);
    }
}
