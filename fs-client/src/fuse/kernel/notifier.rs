//! Messages to the kernel that are not answers.

use super::abi::{INodeNo, NOTIFY_INVAL_INODE};
use super::requests::Connection;
use std::io;
use std::sync::Arc;

/// Sends notifications to the kernel.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<Connection>);

impl Notifier {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self(connection)
    }

    /// Makes the kernel forget the cached attributes of an inode, and its cached bytes from `offset` on (`len` 0: up to the end; `offset` negative:
    /// no bytes). Waits for requests that fill such pages.
    ///
    /// # Errors
    /// The kernel refused. It is no error if the kernel does not know the inode: then nothing is cached.
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
