//! All connections of a server, so that a reply finds the newest connection of its slot whichever worker has it.

use super::connection::Connection;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Connections at most; more are refused at the door. A mount uses one for each of its threads.
pub const MAX_CONNECTIONS: usize = 4096;

/// Connections by number.
#[derive(Default)]
pub struct Connections {
    by_number: Mutex<HashMap<u64, Weak<Connection>>>,
    next: AtomicU64,
}

impl Connections {
    /// A number for a new connection; `None` when there are too many.
    pub fn next_number(&self) -> Option<u64> {
        if self.by_number.lock().len() >= MAX_CONNECTIONS {
            return None;
        }
        Some(self.next.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// A connection was accepted.
    pub fn add(&self, connection: &Arc<Connection>) {
        self.by_number.lock().insert(connection.number(), Arc::downgrade(connection));
    }

    /// The connection of this number, if it still stands.
    pub fn get(&self, number: u64) -> Option<Arc<Connection>> {
        self.by_number.lock().get(&number).and_then(Weak::upgrade)
    }

    /// A connection is gone.
    pub fn remove(&self, number: u64) {
        self.by_number.lock().remove(&number);
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
