//! Serves the faults of all processes, one after the other, and has pages leave.
//!
//! # How a page leaves
//! Only a process itself can move its pages (UFFDIO_MOVE), so each has a thread of the library that does it when it is asked (`Take`): the page is moved
//! to the staging area, in one step of the kernel's. A write comes before it, and is in the page, or after it, and is a fault: no write is lost, and
//! none that a device is about to do, for the kernel does not move a page that one uses. Then the bytes are copied from there.
//!
//! # Waiting for a process
//! While a `Take` is out, the messages of that process are looked at, for its thread may wait for one of them, and its faults are put aside. Other
//! processes wait. A process that is stopped (SIGSTOP) in this moment holds up the others that belong to the same command.
//!
//! # Failure
//! A process whose memory cannot be had is killed: it never sees another byte than the one that it wrote. If this process ends, the library's threads
//! see it, and kill theirs.

use super::figures::Figures;
use super::hello::Strangers;
use super::places;
use super::process::{Process, State};
use super::remote::Remote;
use super::spares::{RETRY, Spares};
use super::store::{Bytes, Store, StoreError};
use super::sys::peek;
use super::wire::{PAGE, TAKE_MAX, Taken};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Instant;

/// The least pages of a limit: those on their way, those that have left, and some to work with.
pub const LIMIT_LEAST: usize = 64;
/// Pages that are stored at once.
const FLUSH: usize = 16;
/// Between two looks at processes that were forked and have not said hello.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why a process or the whole run has to end.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The swap space.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// A page is not where it must be.
    #[error(
        "page {0:#x} of the program is neither there nor here: something took it away past the kernel's messages"
    )]
    Lost(u64),
    /// Processes that were forked or begin have waited for descriptors for too long.
    #[error(
        "as many files are open as may be, and none was closed for {} s, so new processes of the program cannot be taken in: each takes two descriptors of \
         `cuttlefs swap`. Raise the hard limit (now {limit}: ulimit -Hn, LimitNOFILE=), or have fewer processes at once",
        super::spares::PATIENCE.as_secs()
    )]
    Descriptors {
        /// How many there may be.
        limit: u64,
    },
    /// The kernel refuses.
    #[error("the kernel refuses to {what}: {source}")]
    Kernel {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Names what was tried.
pub(super) fn kernel(what: &'static str) -> impl FnOnce(io::Error) -> SwapError {
    move |source| SwapError::Kernel { what, source }
}

/// What came of a process.
#[derive(Debug, PartialEq, Eq)]
enum Life {
    There,
    Gone,
}

/// Serves processes.
pub struct Swapper<R> {
    pub(super) store: Store<R>,
    pub(super) processes: BTreeMap<u64, Process>,
    pub(super) last: u64,
    pub(super) figures: Figures,
    strangers: Strangers,
    pub(super) spares: Spares,
    most_resident: usize,
    most_left: usize,
}

impl<R: Remote> Swapper<R> {
    /// Serves with this swap space, and lets each process have so many pages.
    pub fn new(store: Store<R>, limit_pages: usize) -> Self {
        let limit = limit_pages.max(LIMIT_LEAST);
        let most_left = (limit / 8).clamp(FLUSH, 1024);
        Self {
            store,
            processes: BTreeMap::new(),
            last: 0,
            figures: Figures::default(),
            strangers: Strangers::default(),
            spares: Spares::default(),
            most_resident: limit - most_left - TAKE_MAX,
            most_left,
        }
    }

    /// Figures up to now.
    pub fn figures(&self) -> Figures {
        Figures { store: self.store.figures(), ..self.figures }
    }

    /// Serves until the program and all processes that belong to it have ended.
    ///
    /// # Errors
    /// The first thing that was wrong, when all processes have been killed.
    pub fn serve(&mut self, listener: &UnixListener, program: impl AsFd) -> Result<(), SwapError> {
        let mut is_over = false;
        while !is_over || !self.processes.is_empty() {
            if let Err(error) = self.turn(listener, program.as_fd(), &mut is_over) {
                self.kill_all();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits for something to do, and does it.
    fn turn(
        &mut self,
        listener: &UnixListener,
        program: std::os::fd::BorrowedFd<'_>,
        is_over: &mut bool,
    ) -> Result<(), SwapError> {
        let mut ready: Vec<(u64, bool, bool)> = Vec::new();
        let has_waiting =
            self.processes.values().any(|process| !process.waiting.is_empty() && !process.waits_in_fork());
        // What waits for descriptors is ready all the time.
        let if_tried = if self.spares.may_try() { PollFlags::IN } else { PollFlags::empty() };
        let unclaimed = self.processes.values().filter(|process| process.link.is_none()).count();
        self.spares.expect(unclaimed + self.strangers.sockets().count(), listener);
        let (is_new, have_spoken): (bool, Vec<bool>);
        {
            let mut fds = vec![PollFd::new(listener, if_tried)];
            // One that has ended would be ready for ever.
            fds.push(PollFd::from_borrowed_fd(
                program,
                if *is_over { PollFlags::empty() } else { PollFlags::IN },
            ));
            fds.extend(self.strangers.sockets().map(|socket| PollFd::new(socket, if_tried)));
            for process in self.processes.values() {
                let wanted = if process.waits_in_fork() { if_tried } else { PollFlags::IN };
                fds.push(PollFd::new(&process.uffd, wanted));
                fds.extend(process.link.iter().map(|link| PollFd::new(&link.socket, PollFlags::IN)));
            }
            let patience = match has_waiting {
                true => Timespec { tv_sec: 0, tv_nsec: 0 },
                false if self.spares.is_short() => RETRY,
                false => TICK,
            };
            match poll(&mut fds, Some(&patience)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(kernel("wait")(error.into())),
            }
            let mut results = fds.iter().map(|fd| !fd.revents().is_empty());
            let mut next = || results.next().unwrap_or(false);
            is_new = next();
            *is_over |= next();
            have_spoken = self.strangers.sockets().map(|_| next()).collect();
            for (id, process) in &self.processes {
                ready.push((*id, next(), process.link.is_some() && next()));
            }
        }
        let mut gone = Vec::new();
        for (id, has_messages, has_answer) in ready {
            if has_messages {
                self.messages(id, None)?;
            }
            let mut life = self.faults(id)?;
            if has_answer {
                life = self.answer(id)?;
            }
            if life == Life::Gone {
                gone.push(id);
            }
        }
        // Before new ones: a program that starts another one in its place has two connections for a moment.
        let unclaimed = self.processes.iter().filter(|(_, process)| process.link.is_none());
        gone.extend(unclaimed.filter(|(_, process)| !process.uffd.has_process()).map(|(id, _)| *id));
        for id in gone {
            if let Some(mut process) = self.processes.remove(&id) {
                process.end(&mut self.store);
            }
        }
        for socket in self.strangers.take(&have_spoken) {
            // A userfaultfd may come with what it says. One that the kernel has no number for would be lost.
            if self.spares.make_free(&socket) {
                self.take_in(socket);
                self.spares.came();
            } else {
                self.strangers.add(socket);
                self.spares.refused()?;
            }
        }
        // A spare is left for each that is in already.
        if is_new && self.spares.make_free_but(self.strangers.sockets().count(), listener) {
            self.strangers.accept(listener)?;
            self.spares.came();
        } else if is_new {
            self.spares.refused()?;
        }
        Ok(self.store.tidy()?)
    }

    /// Brings the pages that threads of a process wait for.
    fn faults(&mut self, id: u64) -> Result<Life, SwapError> {
        while let Some(process) = self.processes.get_mut(&id).filter(|process| !process.waits_in_fork())
            && let Some(page) = process.waiting.pop_front()
        {
            let began = Instant::now();
            let life = self.bring(id, page)?;
            self.figures.waited += began.elapsed();
            if life == Life::Gone {
                return Ok(life);
            }
        }
        Ok(Life::There)
    }

    /// Brings one page, and wakes who waits for it.
    fn bring(&mut self, id: u64, page: u64) -> Result<Life, SwapError> {
        if self.make_room(id)? == Life::Gone {
            return Ok(Life::Gone);
        }
        // Fetched once, for as long as the page stays the same.
        let mut loaded = None;
        loop {
            let Some(process) = self.processes.get(&id) else { return Ok(Life::Gone) };
            let (bytes, slot): (Arc<Bytes>, _) = match process.get(page) {
                None | Some(State::Resident(_) | State::Leaving(_)) => (Arc::new([0; PAGE]), None),
                Some(State::Left(bytes, slot)) => (bytes.clone(), *slot),
                Some(State::Stored(slot)) => {
                    let slot = *slot;
                    match &loaded {
                        Some((of, bytes)) if *of == slot => (Arc::clone(bytes), Some(slot)),
                        _ => {
                            let began = Instant::now();
                            let bytes: Arc<Bytes> = Arc::from(self.store.load(slot)?);
                            self.figures.loading += began.elapsed();
                            loaded = Some((slot, bytes.clone()));
                            (bytes, Some(slot))
                        }
                    }
                }
            };
            let Some(process) = self.processes.get_mut(&id) else { return Ok(Life::Gone) };
            match process.uffd.put(page, &bytes) {
                Ok(()) => {
                    match process.get(page) {
                        None => self.figures.fresh += 1,
                        Some(State::Left(..)) => self.figures.returned += 1,
                        // Given up just before it was touched again, when the kernel had not yet taken it away.
                        Some(State::Resident(None)) => {}
                        Some(State::Resident(_) | State::Leaving(_)) => return Err(SwapError::Lost(page)),
                        Some(State::Stored(_)) => {}
                    }
                    process.set(page, State::Resident(slot));
                    break;
                }
                // What the kernel has to tell may change what this page is.
                Err(error) if is(&error, Errno::AGAIN) => {
                    if self.messages(id, None)? == 0 {
                        std::thread::yield_now();
                    }
                    // It refuses until the fork is read.
                    if let Some(process) = self.processes.get_mut(&id).filter(|one| one.waits_in_fork()) {
                        process.waiting.push_front(page);
                        return Ok(Life::There);
                    }
                }
                // Another thread waited for it, too; or it was there at a fork, and is here besides.
                Err(error) if is(&error, Errno::EXIST) => {
                    if !matches!(process.get(page), Some(State::Resident(_) | State::Leaving(_))) {
                        process.set(page, State::Resident(slot));
                    }
                    break;
                }
                // It is no longer mapped, which the kernel tells besides.
                Err(error) if is(&error, Errno::NOENT) => break,
                Err(error) if is(&error, Errno::SRCH) => return Ok(Life::Gone),
                Err(error) => return Err(kernel("bring a page")(error)),
            }
        }
        let Some(process) = self.processes.get(&id) else { return Ok(Life::Gone) };
        let here = (process.resident() + process.left() + TAKE_MAX) as u64;
        self.figures.most = self.figures.most.max(here);
        self.figures.faults += 1;
        Ok(if process.uffd.wake(page).is_ok() { Life::There } else { Life::Gone })
    }

    /// Has pages leave if the process has as many as it may have.
    fn make_room(&mut self, id: u64) -> Result<Life, SwapError> {
        let is_full = |own: &Self| {
            own.processes.get(&id).is_some_and(|process| process.resident() >= own.most_resident)
        };
        if !is_full(self) {
            return Ok(Life::There);
        }
        let began = Instant::now();
        // Pages that the kernel holds are asked for once more by then.
        for _ in 0..2 {
            if is_full(self) && self.leave(id)? == Life::Gone {
                return Ok(Life::Gone);
            }
        }
        self.figures.beyond += u64::from(is_full(self));
        self.figures.leaving += began.elapsed();
        Ok(Life::There)
    }

    /// Has some pages leave.
    fn leave(&mut self, id: u64) -> Result<Life, SwapError> {
        let Some(process) = self.processes.get_mut(&id) else { return Ok(Life::Gone) };
        let Some((thread, staging)) =
            process.link.as_ref().and_then(|link| Some((link.thread?, link.staging)))
        else {
            return Ok(Life::There);
        };
        let pages = process.oldest(TAKE_MAX.min(self.most_resident / 2));
        if pages.is_empty() {
            return Ok(Life::There);
        }
        process.leaving = pages.iter().copied().map(Some).collect();
        let before = self.last;
        let Some(answer) = self.ask(id, thread, &pages)? else { return Ok(Life::Gone) };
        let mut staged = vec![0; pages.len() * PAGE];
        let Some(process) = self.processes.get(&id) else { return Ok(Life::Gone) };
        let pid = process.link.as_ref().map_or(0, |link| link.pid);
        for (place, room) in staged.as_chunks_mut::<PAGE>().0.iter_mut().enumerate() {
            if answer[place] == Taken::Staged && peek(pid, Process::staged(staging, place), room).is_err() {
                return Ok(Life::Gone);
            }
        }
        let staged = staged.as_chunks::<PAGE>().0;
        // Those that were forked from it meanwhile have the same pages under way.
        let children = self.processes.range(before + 1..).map(|(id, _)| *id);
        let forked: Vec<u64> =
            children.filter(|id| self.processes[id].leaving.len() == pages.len()).collect();
        for place in 0..pages.len() {
            self.left(id, place, answer[place], &staged[place]);
            for child in &forked {
                // One that was not taken from the parent after the fork was there at the fork.
                let taken = if answer[place] == Taken::Staged { Taken::Staged } else { Taken::Held };
                self.left(*child, place, taken, &staged[place]);
            }
        }
        for id in forked.iter().chain([&id]) {
            if let Some(process) = self.processes.get_mut(id) {
                process.leaving.clear();
            }
            self.flush(*id)?;
        }
        Ok(Life::There)
    }

    /// Asks a process for pages, and waits. `None`: it is gone.
    fn ask(&mut self, id: u64, thread: u32, pages: &[u64]) -> Result<Option<Vec<Taken>>, SwapError> {
        let request: Vec<u8> = pages.iter().flat_map(|page| page.to_ne_bytes()).collect();
        match self.processes.get(&id).and_then(|process| process.link.as_ref()) {
            Some(link) if send(&link.socket, &request, SendFlags::NOSIGNAL).is_ok() => {}
            _ => return Ok(None),
        }
        loop {
            let Some(process) = self.processes.get(&id) else { return Ok(None) };
            let Some(link) = &process.link else { return Ok(None) };
            let waits_in_fork = process.waits_in_fork();
            let (wanted, patience) = match waits_in_fork {
                true => (PollFlags::empty(), Some(&RETRY)),
                false => (PollFlags::IN, None),
            };
            let mut fds = [PollFd::new(&link.socket, PollFlags::IN), PollFd::new(&process.uffd, wanted)];
            match poll(&mut fds, patience) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(kernel("wait")(error.into())),
            }
            let [has_answer, has_messages] = fds.map(|fd| !fd.revents().is_empty());
            if has_answer {
                let mut bytes = [0; TAKE_MAX];
                let answer = match recv(&link.socket, &mut bytes, RecvFlags::DONTWAIT) {
                    Ok((len, _)) if len == pages.len() => bytes[..len].iter().map(|byte| Taken::parse(*byte)),
                    Err(Errno::AGAIN | Errno::INTR) => continue,
                    _ => return Ok(None),
                };
                let answer: Option<Vec<Taken>> = answer.collect();
                // What the kernel told meanwhile belongs before the answer.
                self.messages(id, Some((thread, pages)))?;
                return Ok(answer);
            }
            if has_messages || waits_in_fork {
                self.messages(id, Some((thread, pages)))?;
            }
        }
    }

    /// Notes what came of a page that a process was asked for.
    fn left(&mut self, id: u64, place: usize, taken: Taken, bytes: &Bytes) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        // One that was given up meanwhile is nothing any more.
        let Some(page) = process.leaving.get(place).copied().flatten() else { return };
        let slot = match process.get(page) {
            Some(State::Leaving(slot)) => *slot,
            _ => return,
        };
        match taken {
            Taken::Staged => {
                self.figures.left += 1;
                if bytes.iter().all(|byte| *byte == 0) {
                    self.figures.zeros += 1;
                    process.take(page);
                    slot.into_iter().for_each(|slot| self.store.release(slot));
                } else {
                    process.set(page, State::Left(Arc::new(*bytes), slot));
                }
            }
            Taken::Absent if slot.is_none() => drop(process.take(page)),
            Taken::Absent => process.set(page, State::Resident(slot)),
            Taken::Held => {
                self.figures.held += 1;
                process.set(page, State::Resident(slot));
            }
        }
    }

    /// Stores the pages that have been here for longest, if they are too many.
    fn flush(&mut self, id: u64) -> Result<(), SwapError> {
        while let Some(process) =
            self.processes.get_mut(&id).filter(|process| process.left() > self.most_left)
        {
            let oldest = process.longest_left(FLUSH);
            let pages: Vec<_> = oldest.iter().map(|(_, bytes, slot)| (*slot, &**bytes)).collect();
            let slots = places::save(&mut self.store, &mut self.processes, &pages)?;
            let Some(process) = self.processes.get_mut(&id) else { break };
            for ((page, ..), slot) in oldest.iter().zip(slots) {
                process.set(*page, State::Stored(slot));
            }
        }
        Ok(())
    }

    /// A message of a process's thread, outside of a `Take`: that it is there. Otherwise the process is gone, or another program runs in it.
    fn answer(&mut self, id: u64) -> Result<Life, SwapError> {
        let Some(link) = self.processes.get_mut(&id).and_then(|process| process.link.as_mut()) else {
            return Ok(Life::Gone);
        };
        let mut bytes = [0; 4];
        match recv(&link.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((4, _)) if link.thread.is_none() => {
                link.thread = Some(u32::from_ne_bytes(bytes));
                Ok(Life::There)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Life::There),
            _ => Ok(Life::Gone),
        }
    }

    fn kill_all(&self) {
        for link in self.processes.values().filter_map(|process| process.link.as_ref()) {
            if let Some(pid) = Pid::from_raw(link.pid) {
                // It may have ended by itself.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Whether an error is this one.
pub(super) fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}
