//! Users, each a thread with credentials of its own.

use rustix::fs::{Gid, Uid};
use std::sync::mpsc;
use std::thread::JoinHandle;

/// Credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    pub name: &'static str,
    pub uid: u32,
    pub gid: u32,
    pub groups: &'static [u32],
}

/// The owner of most inodes.
pub const OWNER: Credentials = Credentials { name: "owner", uid: 61_001, gid: 62_001, groups: &[] };
/// A user whose own group is that of most inodes.
pub const FELLOW: Credentials = Credentials { name: "fellow", uid: 61_002, gid: 62_001, groups: &[] };
/// A user who has that group among the supplementary ones.
pub const MEMBER: Credentials =
    Credentials { name: "member", uid: 61_003, gid: 62_003, groups: &[62_009, 62_001, 62_002] };
/// A user who is neither the owner nor in the group.
pub const STRANGER: Credentials = Credentials { name: "stranger", uid: 61_004, gid: 62_004, groups: &[] };
/// Root, which may do everything.
pub const ROOT: Credentials = Credentials { name: "root", uid: 0, gid: 0, groups: &[] };

type Job = Box<dyn FnOnce() + Send>;

/// A thread with credentials.
pub struct Person {
    pub credentials: Credentials,
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Person {
    pub fn new(credentials: Credentials) -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = std::thread::spawn(move || {
            let groups: Vec<Gid> = credentials.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
            rustix::thread::set_thread_groups(&groups).expect("groups");
            let gid = Gid::from_raw(credentials.gid);
            rustix::thread::set_thread_res_gid(gid, gid, gid).expect("group");
            let uid = Uid::from_raw(credentials.uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).expect("user");
            queue.into_iter().for_each(|job| job());
        });
        Self { credentials, jobs: Some(jobs), thread: Some(thread) }
    }

    /// Runs `work` as this user, and waits for its result.
    pub fn does<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let (give, take) = mpsc::channel();
        let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
            let _ = give.send(work());
        });
        // SAFETY: only the lifetime is changed. The job borrows from this call, which does not return before the job is dropped: `take` ends when `give`,
        // which the job owns, is gone, whether the job ran or not.
        let job: Job = unsafe { std::mem::transmute(job) };
        self.jobs.as_ref().expect("it lives").send(job).expect("it works");
        take.recv().expect("the user's thread did not panic")
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_none_or(|ended| ended.is_ok()));
    }
}
