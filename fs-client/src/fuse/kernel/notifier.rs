//! Messages to the kernel that are no answers.

use super::abi::{INodeNo, NOTIFY_INVAL_INODE};
use super::requests::Connection;
use std::io;
use std::sync::Arc;

/// Tells the kernel things.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<Connection>);

impl Notifier {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self(connection)
    }

    /// What is cached of an inode is not good any more: its attributes, and bytes from `offset` on (`len` 0: all of them;
    /// `offset` negative: none). Waits for requests that bring such bytes.
    ///
    /// # Errors
    /// The kernel refused. That it does not know the inode is none: then nothing is cached.
    pub fn inval_inode(&self, ino: INodeNo, offset: i64, len: i64) -> io::Result<()> {
        let mut body = Vec::with_capacity(24);
        body.extend_from_slice(&ino.0.to_ne_bytes());
        body.extend_from_slice(&offset.to_ne_bytes());
        body.extend_from_slice(&len.to_ne_bytes());
        match self.0.send(0, NOTIFY_INVAL_INODE, &[&body]) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }
}
