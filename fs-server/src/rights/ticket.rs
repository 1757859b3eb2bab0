//! Open tickets: a client's proof to a later life of the server that it had a file open.
//!
//! A handle keeps the rights it was opened with, also when the file's mode changes (POSIX). A new server knows no handles. To
//! reclaim one by the mode of today would take a rightful handle away from its program, and let in any client that claims to
//! have had one. So an open gives the client a ticket: a MAC under the pool's secret over the client, the inode and the rights.
//! With it the client reclaims exactly these rights; the server has nothing to remember.
//!
//! A ticket does not expire: neither does a handle that is not closed.

use crate::meta::HashKey;
use cuttlefs_common::ids::{ClientId, InodeNo};
use cuttlefs_common::rpc::{OpenTicket, Rights};
use siphasher::sip::SipHasher24;

/// Makes and checks tickets.
pub struct Tickets {
    key: HashKey,
}

impl Tickets {
    /// Of a pool.
    pub fn new(key: HashKey) -> Self {
        Self { key }
    }

    /// For a client that has opened a file.
    pub fn issue(&self, client: ClientId, ino: InodeNo, rights: Rights) -> OpenTicket {
        let mut input = [0; 32];
        input[..7].copy_from_slice(b"ticket\0");
        input[7] = u8::from(rights.read) | u8::from(rights.write) << 1;
        input[8..24].copy_from_slice(&client.0.to_le_bytes());
        input[24..].copy_from_slice(&ino.0.to_le_bytes());
        OpenTicket(SipHasher24::new_with_key(&self.key.0).hash(&input))
    }

    /// Whether the client has opened the file so.
    pub fn is_good(&self, ticket: OpenTicket, client: ClientId, ino: InodeNo, rights: Rights) -> bool {
        // Both are wide words: comparing them takes the same time wherever they differ.
        self.issue(client, ino, rights).0 ^ ticket.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_for_one_client_one_file_and_its_rights() {
        let tickets = Tickets::new(HashKey(*b"sixteen byte key"));
        let rights = Rights { read: true, write: false };
        let (client, ino) = (ClientId(7), InodeNo(9));
        let ticket = tickets.issue(client, ino, rights);
        assert!(tickets.is_good(ticket, client, ino, rights));
        assert!(!tickets.is_good(ticket, ClientId(8), ino, rights));
        assert!(!tickets.is_good(ticket, client, InodeNo(10), rights));
        assert!(!tickets.is_good(ticket, client, ino, Rights { read: true, write: true }));
        assert!(!tickets.is_good(OpenTicket(ticket.0 ^ 1), client, ino, rights));
        let other = Tickets::new(HashKey(*b"another byte key"));
        assert!(!other.is_good(ticket, client, ino, rights));
    }
}
