//! Where the pages of the swap space lie: at a memory node, or in a map, for tests.

use super::store::Bytes;
use super::wire::PAGE;
use cuttlefs_common::odrp::{RemoteError, RemotePages};

/// Times that an operation is tried whose connection broke.
const TRIES: u32 = 3;
/// Connections of a client that can break: one for each chain.
const CONNECTIONS: u32 = 4;

/// Where the pages lie. A trait, so that the rest is tested without a node.
pub trait Remote {
    /// Stores pages, in any order.
    ///
    /// # Errors
    /// One of them is not stored.
    fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError>;

    /// Loads a page.
    ///
    /// # Errors
    /// It cannot be had.
    fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError>;

    /// Whether a page is stored: its place there needs no further one of the node's pages.
    fn is_stored(&self, page: u64) -> bool;

    /// Gives pages back.
    ///
    /// # Errors
    /// The node is gone.
    fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError>;
}

/// Runs `operation`, again if the connection broke and was made anew.
fn again<T>(mut operation: impl FnMut() -> Result<T, RemoteError>) -> Result<T, RemoteError> {
    for _ in 1..TRIES {
        match operation() {
            Err(RemoteError::Cut) => {}
            result => return result,
        }
    }
    operation()
}

/// Has all operations outstanding at once, as far as there are slots. None is outstanding behind it, whatever came of them.
fn pipelined<T: Copy>(
    pages: &mut RemotePages,
    all: &[T],
    begin: impl Fn(&mut RemotePages, T) -> Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    let mut run = || {
        for one in all {
            loop {
                match begin(pages, *one) {
                    Err(RemoteError::Full) => drop(pages.finish_any()?),
                    result => break result?,
                }
            }
        }
        while pages.finish_any()?.is_some() {}
        Ok(())
    };
    let result = run();
    if result.is_err() {
        drain(pages);
    }
    result
}

/// Waits for what is outstanding. What comes of it is seen when all is tried again, and that must find no page busy: each chain has a connection of its own,
/// so the other ones' operations are still under way when one breaks.
fn drain(pages: &mut RemotePages) {
    let mut broken = 0;
    while broken < CONNECTIONS {
        match pages.finish_any() {
            Ok(Some(_)) => {}
            Ok(None) | Err(RemoteError::Silent) => return,
            Err(_) => broken += 1,
        }
    }
}

impl Remote for RemotePages {
    fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError> {
        again(|| pipelined(self, pages, |own, (page, bytes)| own.begin_store(page, bytes).map(drop)))
    }

    fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError> {
        let mut bytes = Box::new([0; PAGE]);
        again(|| RemotePages::load(self, page, &mut *bytes))?;
        Ok(bytes)
    }

    fn is_stored(&self, page: u64) -> bool {
        RemotePages::is_stored(self, page)
    }

    fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError> {
        again(|| {
            // One whose chain ran before the connection broke is forgotten already.
            let stored: Vec<u64> = pages.iter().copied().filter(|page| self.is_stored(*page)).collect();
            pipelined(self, &stored, |own, page| own.begin_invalidate(page).map(drop))
        })
    }
}

#[cfg(test)]
mod tests;
