//! The thread that connects to servers and opens files there.
//!
//! It has **a descriptor table of its own**, which the threads of sessions share with it: a program may close any number, or put a file of its own in its
//! place, and must not find ours. For the same reason none of the program's descriptors may stay open here: a pipe would never end. So all descriptors
//! of the new table are closed first. Threads of the program touch mapped memory of sessions, and nothing with a number.
//!
//! # Failure
//! What does not come in time is left to the kernel: the server may be away, and there the program waits as in any mount.

use crate::descriptor::FileId;
use crate::state::{self, State};
use cuttlefs_client::fuse::MountTable;
use cuttlefs_client::native::{ConnectOptions, File, InodeNo, OpenOptions, Session, Trust};
use cuttlefs_client::preload::PlannedMount;
use cuttlefs_client::signals::{self, Signals};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

/// How long a read or an open waits for the server before it is left to the kernel.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long an open waits for the engine, which may be about to connect.
const OPEN_WAIT: Duration = Duration::from_secs(10);
/// How long the end of a program waits for the good-bye to its servers. Without one they keep the session for its lease.
const END_WAIT: Duration = Duration::from_millis(500);
/// How often idle files are looked for.
const TICK: Duration = Duration::from_secs(1);
/// After that time a server that could not be reached is tried again.
const CONNECT_AGAIN: Duration = Duration::from_secs(10);
/// Threads of a session: requests for pages on SSD, and over links that map no memory all reads, wait in them.
const THREADS: usize = 4;

enum Job {
    Open { mount: usize, id: FileId, answer: SyncSender<Option<File>> },
    End { answer: SyncSender<()> },
}

/// The engine of this process.
pub(crate) struct Engine {
    jobs: Sender<Job>,
}

impl Engine {
    /// Starts the thread. `None`: the system gives none.
    pub(crate) fn start(state: &'static State) -> Option<Self> {
        let (jobs, received) = channel();
        let body = move || {
            state::stay_inside();
            if own_descriptors() {
                run(state, &received);
            }
        };
        let spawn = || std::thread::Builder::new().name("cuttlefs-engine".to_owned()).spawn(body).ok();
        // The thread, and those that it spawns, block what this one does: handlers are the program's, and run in its threads.
        let before = signals::block(Signals::ALL);
        let spawned = spawn();
        signals::block_only(before);
        spawned?;
        Some(Self { jobs })
    }

    /// The file, open for reading; `None` if it cannot be had in time.
    pub(crate) fn open(&self, mount: usize, id: FileId) -> Option<File> {
        let (answer, answered) = sync_channel(1);
        self.jobs.send(Job::Open { mount, id, answer }).ok()?;
        answered.recv_timeout(OPEN_WAIT).ok()?
    }

    /// Says good-bye to the servers.
    pub(crate) fn end(&self) {
        let (answer, answered) = sync_channel(1);
        if self.jobs.send(Job::End { answer }).is_ok() {
            let _ = answered.recv_timeout(END_WAIT);
        }
    }
}

/// Gives the calling thread an empty descriptor table of its own, in which 0, 1 and 2 lead nowhere.
fn own_descriptors() -> bool {
    // SAFETY: with CLOSE_RANGE_UNSHARE this thread gets a table of its own before anything is closed in it; nothing here owns a descriptor yet.
    let closed =
        unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE) };
    let nowhere = || std::fs::File::options().read(true).write(true).open("/dev/null").map(std::mem::forget);
    closed == 0 && (0..3).all(|_| nowhere().is_ok())
}

/// A session with the server of a mount.
enum Server {
    Unknown,
    Connected(Session),
    /// It could not be reached then.
    Unreached(Instant),
}

fn run(state: &'static State, jobs: &Receiver<Job>) {
    let mut servers: Vec<Server> = state.plan.mounts.iter().map(|_| Server::Unknown).collect();
    let mut next_tick = Instant::now() + TICK;
    loop {
        let now = Instant::now();
        if now >= next_tick {
            state.files.forget_idle();
            next_tick = now + TICK;
        }
        match jobs.recv_timeout(next_tick.saturating_duration_since(now)) {
            Ok(Job::Open { mount, id, answer }) => {
                let file = open(&mut servers[mount], &state.plan.mounts[mount], id);
                // Nobody may wait any more.
                let _ = answer.send(file);
            }
            Ok(Job::End { answer }) => {
                for server in &servers {
                    if let Server::Connected(session) = server {
                        session.close();
                    }
                }
                let _ = answer.send(());
                return;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn open(server: &mut Server, mount: &PlannedMount, id: FileId) -> Option<File> {
    if !is_there(mount) {
        return None;
    }
    let may_connect = match server {
        Server::Connected(_) => false,
        Server::Unknown => true,
        Server::Unreached(since) => since.elapsed() >= CONNECT_AGAIN,
    };
    if may_connect {
        let Ok(pool) = mount.pool.parse() else { return None };
        let trust = Trust { key: mount.key.clone(), server_user: mount.server_user };
        let options = ConnectOptions {
            trust,
            label: String::new(),
            pool: Some(pool),
            subtree: mount.subtree.clone(),
            threads: THREADS,
            deadline: Some(DEADLINE),
        };
        *server = match Session::connect(&mount.url, options) {
            Ok(session) => Server::Connected(session),
            Err(_) => Server::Unreached(Instant::now()),
        };
    }
    let Server::Connected(session) = server else { return None };
    session.open_inode(InodeNo(id.ino), OpenOptions::READ).ok()
}

/// Whether the device is still that mount's: it may be another one's by now.
fn is_there(mount: &PlannedMount) -> bool {
    let device = format!("{}:{}", mount.major, mount.minor);
    let table = MountTable::read();
    table.is_ok_and(|table| table.cuttlefs().any(|found| found.device == device && found.source == mount.url))
}
