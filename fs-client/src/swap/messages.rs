//! What the kernel tells of processes: faults, and whatever changes the layout of their memory.
//!
//! # Order
//! A process's messages are looked at in their order; faults have none. A fork that finds no descriptor (`spares`) stays with the kernel, and comes behind
//! what other threads have done meanwhile. The child is what the process was before that: so the others are put aside until the fork is there.

use super::remote::Remote;
use super::swapper::{SwapError, Swapper, is, kernel};
use super::sys::{Message, Uffd};
use rustix::io::Errno;

/// Messages of a process that are looked at before others have their turn.
const MESSAGES: usize = 16;

impl<R: Remote> Swapper<R> {
    /// Looks at a process's messages; of what its own thread was asked for, if a `Take` is out. Returns how many there were.
    pub(super) fn messages(&mut self, id: u64, asked: Option<(u32, &[u64])>) -> Result<usize, SwapError> {
        for count in 0..MESSAGES {
            let Some(process) = self.processes.get_mut(&id) else { return Ok(count) };
            self.spares.keep(&process.uffd);
            match process.uffd.read() {
                Ok(None) => return Ok(count),
                Ok(Some(fork @ Message::Fork(_))) => {
                    let behind = process.behind_fork.take();
                    self.message(id, fork, asked);
                    self.spares.came();
                    for message in behind.into_iter().flatten() {
                        self.message(id, message, asked);
                    }
                }
                Ok(Some(message @ Message::Fault { .. })) => self.message(id, message, asked),
                Ok(Some(message)) => match &mut process.behind_fork {
                    // The child is what the process was before.
                    Some(behind) => behind.push(message),
                    None => self.message(id, message, asked),
                },
                Err(error) if is(&error, Errno::MFILE) || is(&error, Errno::NFILE) => {
                    process.behind_fork.get_or_insert_default();
                    self.spares.refused()?;
                    return Ok(count);
                }
                Err(error) => return Err(kernel("read a userfaultfd")(error)),
            }
        }
        Ok(MESSAGES)
    }

    fn message(&mut self, id: u64, message: Message, asked: Option<(u32, &[u64])>) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        match message {
            Message::Fault { page, .. } if process.show(page, id) => {}
            Message::Fault { page, thread } => match asked {
                // The process's own thread: a page was given up under its hands. It gets a new one, and takes that.
                Some((own, pages)) if own == thread => process.help(page, pages),
                _ => process.waiting.push_back(page),
            },
            Message::Fork(uffd) => self.forked(id, uffd),
            Message::Remap { from, to, len } => process.remap(from, to, len, &mut self.store),
            Message::Remove(from, to) | Message::Unmap(from, to) => {
                process.give_up(from, to, &mut self.store);
            }
            Message::Other => {}
        }
    }

    fn forked(&mut self, id: u64, uffd: Uffd) {
        let Some(child) = self.processes.get(&id).map(|parent| parent.fork(uffd, &mut self.store)) else {
            return;
        };
        self.figures.processes += 1;
        self.figures.forks += 1;
        self.last += 1;
        self.processes.insert(self.last, child);
        self.spares.expect_one_more();
    }
}
