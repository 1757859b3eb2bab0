//! Answers about the root of a mount while the server does not answer.
//!
//! umount(8) looks at the mount point before it unmounts, as df(1) and a machine that is shut down do: the root's attributes
//! (GETATTR) and the free space (STATFS). If these waited for a server that is away, only force could end the mount. So the
//! server's last answers are remembered, and the kernel gets them, not to be cached, when the server has not answered for
//! [`PATIENCE`]. Requests about anything below the root wait.
//!
//! The request to the server goes on meanwhile, in the thread that took it. While one such request waits, later ones are answered from memory at once
//! and occupy no thread. [`CuttleFuse::answer_late`] is called each second and answers those that came before.

use super::convert;
use super::file_system::CuttleFuse;
use super::kernel::{ReplyAttr, ReplyStatfs};
use super::reply::refused;
use crate::file::volume::{Caller, Volume};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{NAME_MAX, PAGE_SIZE, TraceId};
use cuttlefs_common::rpc::Space;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the server may take. A restart takes less, so that after one the answer is fresh.
const PATIENCE: Duration = Duration::from_secs(2);

/// The last answer to a question, and those who wait for the next one.
#[derive(Debug)]
pub(super) struct Remembered<R, A>(Mutex<State<R, A>>);

#[derive(Debug)]
struct State<R, A> {
    /// The server's last answer.
    last: Option<A>,
    /// The requests that the server has not answered yet, in order; at most as many as threads.
    asked: BTreeMap<u64, Asked<R>>,
    next: u64,
}

#[derive(Debug)]
struct Asked<R> {
    since: Instant,
    /// The reply to send. `None`: it was answered from memory.
    reply: Option<R>,
}

impl<R, A: Copy> Remembered<R, A> {
    pub(super) fn new(last: Option<A>) -> Self {
        Self(Mutex::new(State { last, asked: BTreeMap::new(), next: 0 }))
    }

    /// Remembers the server's answer.
    pub(super) fn remember(&self, answer: A) {
        self.0.lock().last = Some(answer);
    }

    /// A request comes at this time. Returns a number under which the server must be asked.
    ///
    /// # Errors
    /// The server has not answered earlier requests in time: the reply must be answered with the server's last answer.
    fn ask(&self, reply: R, now: Instant) -> Result<u64, (R, A)> {
        let mut state = self.0.lock();
        let is_away =
            state.asked.values().next().is_some_and(|first| now.duration_since(first.since) >= PATIENCE);
        if let Some(last) = state.last.filter(|_| is_away) {
            return Err((reply, last));
        }
        let number = state.next;
        state.next += 1;
        state.asked.insert(number, Asked { since: now, reply: Some(reply) });
        Ok(number)
    }

    /// The server has answered. Returns the reply, unless it was answered from memory.
    fn answered(&self, number: u64) -> Option<R> {
        self.0.lock().asked.remove(&number).and_then(|asked| asked.reply)
    }

    /// The replies that have waited for too long, with the server's last answer.
    fn overdue(&self, now: Instant) -> Vec<(R, A)> {
        let mut state = self.0.lock();
        let Some(last) = state.last else { return Vec::new() };
        let late = state.asked.values_mut().filter(|asked| now.duration_since(asked.since) >= PATIENCE);
        late.filter_map(|asked| asked.reply.take()).map(|reply| (reply, last)).collect()
    }
}

/// The root's attributes and the free space, before the mount.
pub(super) fn look_at_root<V: Volume + ?Sized>(volume: &V) -> (Option<Attr>, Option<Space>) {
    let caller = Caller::new(0, 0, TraceId(0));
    (volume.get_attr(&caller, volume.root()).ok(), volume.stat_fs(&caller).ok())
}

impl<V: Volume + ?Sized> CuttleFuse<V> {
    /// Answers a GETATTR of the root.
    pub(super) fn reply_root_attr(&self, caller: &Caller, reply: ReplyAttr) {
        match self.root_attr.ask(reply, Instant::now()) {
            Ok(number) => {
                let result = self.volume.get_attr(caller, self.root);
                match self.root_attr.answered(number) {
                    Some(reply) => self.reply_attr(result, reply),
                    None => result.iter().for_each(|attr| self.root_attr.remember(*attr)),
                }
            }
            Err((reply, attr)) => self.reply_old_attr(&attr, reply),
        }
    }

    /// Answers a STATFS.
    pub(super) fn reply_space(&self, caller: &Caller, reply: ReplyStatfs) {
        match self.space.ask(reply, Instant::now()) {
            Ok(number) => {
                let result = self.volume.stat_fs(caller);
                result.iter().for_each(|space| self.space.remember(*space));
                match (self.space.answered(number), result) {
                    (Some(reply), Ok(space)) => tell_space(&space, reply),
                    (Some(reply), Err(error)) => reply.error(refused(&error)),
                    (None, _) => {}
                }
            }
            Err((reply, space)) => tell_space(&space, reply),
        }
    }

    /// Answers the requests for which the server has taken too long.
    pub(super) fn answer_late(&self) {
        let now = Instant::now();
        self.root_attr.overdue(now).into_iter().for_each(|(reply, attr)| self.reply_old_attr(&attr, reply));
        self.space.overdue(now).into_iter().for_each(|(reply, space)| tell_space(&space, reply));
    }

    fn reply_old_attr(&self, attr: &Attr, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &convert::to_file_attr(self.root, attr));
    }
}

fn tell_space(space: &Space, reply: ReplyStatfs) {
    reply.statfs(
        space.pool_pages,
        space.free_pages,
        // Free pages cannot be used if there is no room for the extents that map them.
        if space.free_inodes > 0 { space.free_pages } else { 0 },
        space.inodes.saturating_add(space.free_inodes),
        space.free_inodes,
        PAGE_SIZE as u32,
        NAME_MAX as u32,
        PAGE_SIZE as u32,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_waited_gets_what_was_said_last_and_who_comes_later_does_not_wait() {
        let begun = Instant::now();
        let later = begun + PATIENCE;
        let remembered = Remembered::<&str, u32>::new(None);
        let first = remembered.ask("first", begun).expect("the server is asked");
        assert!(remembered.overdue(later).is_empty(), "nothing is known that could be said");
        remembered.remember(7);
        assert!(remembered.overdue(later - Duration::from_millis(1)).is_empty());
        let second = remembered.ask("second", later - Duration::from_millis(1)).expect("it may be there");
        assert_eq!(remembered.overdue(later), [("first", 7)]);
        assert!(remembered.overdue(later).is_empty(), "each once");
        assert_eq!(remembered.ask("third", later), Err(("third", 7)));
        assert_eq!(remembered.answered(first), None, "it has its answer");
        assert_eq!(remembered.answered(second), Some("second"));
        remembered.remember(8);
        let fourth = remembered.ask("fourth", later).expect("it is back");
        assert_eq!(remembered.answered(fourth), Some("fourth"));
    }
}
