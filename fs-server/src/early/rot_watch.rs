//! A disk that remembers whether a page it read had rotted.
//!
//! A write of part of a page that does not match its checksum cannot be done, today or ever, and nothing of it would be seen if
//! it were: reads of that page fail. So it is answered as failed and done with, where a device that fails has its ring wait.

use crate::pool::disk::{Disk, IoDone, IoRequest, LocalFuture};
use std::cell::Cell;
use std::rc::Rc;

pub(super) struct RotWatch<'d> {
    disk: &'d dyn Disk,
    saw_rot: Rc<Cell<bool>>,
}

impl<'d> RotWatch<'d> {
    pub(super) fn new(disk: &'d dyn Disk) -> Self {
        Self { disk, saw_rot: Rc::default() }
    }

    pub(super) fn saw_rot(&self) -> bool {
        self.saw_rot.get()
    }
}

impl Disk for RotWatch<'_> {
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        let (submitted, saw_rot) = (self.disk.submit(batch), self.saw_rot.clone());
        Box::pin(async move {
            let done = submitted.await;
            if done.iter().any(|done| done.result.as_ref().is_err_and(|error| error.is_rot())) {
                saw_rot.set(true);
            }
            done
        })
    }

    fn sync(&self) -> LocalFuture<'static, Result<(), std::io::Error>> {
        self.disk.sync()
    }
}
