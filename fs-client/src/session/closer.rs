//! The closing of files at the server: the thread *closer* sends closes in batches, so that close(2) does not wait for the server. In a
//! process without background threads, each close is sent at once.

use super::{ServerOpen, Session};
use crate::transport::FsError;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rpc::Request;
use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

/// The most closes that wait to be sent. At that number close(2) waits for the closer.
const CLOSE_QUEUE: usize = 16_384;
/// How long the closer gathers closes before it sends them. A build closes thousands of files per second, and only the space of unlinked open files
/// waits for a close.
const CLOSE_GATHER: Duration = Duration::from_millis(3);
/// The most closes in one request.
const CLOSE_BATCH: usize = 512;

#[derive(Debug, Default)]
struct Closing {
    files: Vec<Arc<ServerOpen>>,
    ended: bool,
}

/// The files that wait to be closed.
#[derive(Debug, Default)]
pub(super) struct CloseQueue {
    closing: Mutex<Closing>,
    /// Notified when the first close waits, and when there is room again.
    changed: Condvar,
}

impl CloseQueue {
    /// Hands a file to the closer. Only the first of a batch wakes it.
    fn put(&self, file: Arc<ServerOpen>) {
        let mut closing = self.closing.lock();
        while closing.files.len() >= CLOSE_QUEUE && !closing.ended {
            self.changed.wait(&mut closing);
        }
        closing.files.push(file);
        if closing.files.len() == 1 {
            self.changed.notify_all();
        }
    }

    /// Waits until a file waits to be closed; `false` when the session has ended.
    fn wait(&self) -> bool {
        let mut closing = self.closing.lock();
        while closing.files.is_empty() && !closing.ended {
            self.changed.wait(&mut closing);
        }
        !closing.ended
    }

    /// Takes all files that wait to be closed.
    fn take(&self) -> Vec<Arc<ServerOpen>> {
        let files = std::mem::take(&mut self.closing.lock().files);
        self.changed.notify_all();
        files
    }

    /// The session has ended: nobody waits for closes any more.
    pub(super) fn end(&self) {
        self.closing.lock().ended = true;
        self.changed.notify_all();
    }
}

impl Session {
    /// Closes a file at the server: soon and in a batch, or at once where there are no background threads.
    pub(crate) fn close(&self, file: Arc<ServerOpen>) {
        if self.options.background {
            return self.closes.put(file);
        }
        let build = || Request::Close { filekeys: vec![file.bound_key()] };
        if let Err(error) = self.call(&self.own_caller(), build, |_| Ok(())) {
            tracing::debug!(%error, "closing a file failed");
        }
        self.opens.forget(&file);
    }

    /// Closes files at the server. An error means that the mount ends.
    fn close_batch(&self, mut files: Vec<Arc<ServerOpen>>) -> Result<(), FsError> {
        while !files.is_empty() {
            let sent = RefCell::new(Vec::<FileKey>::new());
            let build = || {
                *sent.borrow_mut() = files.iter().map(|file| file.bound_key()).collect();
                Request::Close { filekeys: sent.borrow().clone() }
            };
            for file in &files {
                file.begin_close();
            }
            let result = self.call(&self.own_caller(), build, |_| Ok(()));
            for file in &files {
                self.opens.forget(file);
            }
            match result {
                Ok(()) => {}
                Err(FsError::ShutDown) => return Err(FsError::ShutDown),
                Err(error) => tracing::warn!(%error, "closing files failed"),
            }
            // A recovery that began before the files were forgotten has opened them again. Close those filekeys too, or the space of unlinked files
            // never becomes free.
            self.wait_for_recovery();
            let mut closed = sent.into_inner().into_iter();
            files.retain(|file| closed.next() != Some(file.bound_key()));
        }
        Ok(())
    }
}

/// The body of the thread. Ends when the session is shut down.
pub(super) fn run(session: &Session) {
    while session.closes.wait() {
        panic_ends::plant("closer");
        std::thread::sleep(CLOSE_GATHER);
        for batch in session.closes.take().chunks(CLOSE_BATCH) {
            if session.close_batch(batch.to_vec()).is_err() {
                return;
            }
        }
    }
}
