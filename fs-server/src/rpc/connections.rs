//! All connections of a server, so that a reply finds the newest connection of its slot, on any worker.
//!
//! An entry lasts as long as its connection: the connection owns it and drops it last of all. The peer's share bounds
//! their number (`shares`).

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
    /// A number for a new connection, never used before.
    pub fn entry(&self) -> Entry {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        Entry { number, by_number: self.by_number.clone() }
    }

    /// A connection was accepted.
    pub fn add(&self, connection: &Arc<Connection>) {
        self.by_number.lock().insert(connection.number(), Arc::downgrade(connection));
    }

    /// The connection of this number, if it still stands.
    pub fn get(&self, number: u64) -> Option<Arc<Connection>> {
        self.by_number.lock().get(&number).and_then(Weak::upgrade)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_number.lock().len()
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those that stand.
    pub fn all(&self) -> Vec<Arc<Connection>> {
        self.by_number.lock().values().filter_map(Weak::upgrade).collect()
    }
}

/// A connection's number, which is known as long as this is there.
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
