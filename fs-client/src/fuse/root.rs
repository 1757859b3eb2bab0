//! Answers of the root of a mount when the server does not answer.
//!
//! umount(8) looks at the mount point before it unmounts, as df(1) and a machine that is shut down do: the root's attributes
//! (GETATTR) and the free space (STATFS). If these waited for a server that is away, only force could end the mount. So the
//! server's last answers are remembered, and the kernel gets them, not to be cached, when the server has not answered for
//! [`PATIENCE`]. Requests about anything below the root wait.
//!
//! The request to the server goes on meanwhile, in the thread that took it. As long as one does, later ones are answered from
//! memory at once, and take no thread; [`CuttleFuse::answer_late`] is called each second for those that came before.

use super::convert;
use super::edge::CuttleFuse;
use super::kernel::{ReplyAttr, ReplyStatfs};
use super::reply::refused;
use crate::file::volume::{Caller, Volume};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{NAME_MAX, PAGE_SIZE, TraceId};
use cuttlefs_common::rpc::Space;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a server may take. A restart takes less, and what it answers behind that is not old.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers to one question, which all who ask it get.
#[derive(Debug)]
pub(super) struct Remembered<R, A>(Mutex<State<R, A>>);

#[derive(Debug)]
struct State<R, A> {
    /// What the server last said.
    last: Option<A>,
    /// Questions that the server has not answered yet, in order. No more than there are threads.
    asked: BTreeMap<u64, Asked<R>>,
    next: u64,
}

#[derive(Debug)]
struct Asked<R> {
    since: Instant,
    /// `None`: has been answered from memory.
    reply: Option<R>,
}

impl<R, A: Copy> Remembered<R, A> {
    pub(super) fn new(last: Option<A>) -> Self {
        Self(Mutex::new(State { last, asked: BTreeMap::new(), next: 0 }))
    }

    /// The server said so.
    pub(super) fn remember(&self, answer: A) {
        self.0.lock().last = Some(answer);
    }

    /// Somebody asks, at this time: a number under which the server is to be asked.
    ///
    /// # Errors
    /// It does not answer those who asked before: what it last said is the answer.
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

    /// The server has answered: who is still to be told.
    fn answered(&self, number: u64) -> Option<R> {
        self.0.lock().asked.remove(&number).and_then(|asked| asked.reply)
    }

    /// Whoever has waited for too long, and what the server last said.
    fn overdue(&self, now: Instant) -> Vec<(R, A)> {
        let mut state = self.0.lock();
        let Some(last) = state.last else { return Vec::new() };
        let late = state.asked.values_mut().filter(|asked| now.duration_since(asked.since) >= PATIENCE);
        late.filter_map(|asked| asked.reply.take()).map(|reply| (reply, last)).collect()
    }
}

/// What a volume says of its root before it is mounted.
pub(super) fn look_at_root<V: Volume + ?Sized>(volume: &V) -> (Option<Attr>, Option<Space>) {
    let caller = Caller::new(0, 0, TraceId(0));
    (volume.get_attr(&caller, volume.root()).ok(), volume.stat_fs(&caller).ok())
}

impl<V: Volume + ?Sized> CuttleFuse<V> {
    /// Answers GETATTR of the root.
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

    /// Answers STATFS.
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

    /// Answers those for whom the server took too long.
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
        // Pages without room for what maps them are free and cannot be had.
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
