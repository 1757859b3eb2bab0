//! All connections of a server, so that a reply finds the newest connection of its slot, on any worker.
//!
//! An entry exists as long as its connection, which owns it and drops it last of all. The peer's share bounds the number of entries (`shares`).

use super::connection::Connection;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

type ByNumber = Arc<Mutex<HashMap<u64, Weak<Connection>>>>;

/// Connections by number.
#[derive(Default)]
pub struct Connections {
    by_number: ByNumber,
    last: AtomicU64,
}

impl Connections {
    /// The entry of a new connection, with a number that was never used before.
    pub fn entry(&self) -> Entry {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        Entry { number, by_number: self.by_number.clone() }
    }

    /// Adds a connection that was accepted.
    pub fn add(&self, connection: &Arc<Connection>) {
        self.by_number.lock().insert(connection.number(), Arc::downgrade(connection));
    }

    /// The connection of this number, if it still exists.
    pub fn get(&self, number: u64) -> Option<Arc<Connection>> {
        self.by_number.lock().get(&number).and_then(Weak::upgrade)
    }

    /// The number of connections.
    pub fn len(&self) -> usize {
        self.by_number.lock().len()
    }

    /// Whether there are no connections.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All connections.
    pub fn all(&self) -> Vec<Arc<Connection>> {
        self.by_number.lock().values().filter_map(Weak::upgrade).collect()
    }
}

/// A connection's number. The connection can be found by it until this is dropped.
pub struct Entry {
    number: u64,
    by_number: ByNumber,
}

impl Entry {
    /// Number within the server, never reused.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.by_number.lock().remove(&self.number);
    }
}
