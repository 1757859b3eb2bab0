//! Open tickets: a client's proof to a later life of the server that it had a file open.
//!
//! An open file keeps the rights that it was opened with, also when its mode changes (POSIX). A new server knows no open files. If it let clients
//! reclaim them by today's mode, it would take rightful ones away from their programs, and admit clients that only claim to have had one. So each
//! open gives the client a ticket: a MAC under the pool's secret over the client, the inode and the rights. With the ticket the client reclaims
//! exactly these rights, and the server has to remember nothing.
//!
//! A ticket does not expire, as an open file does not.

use crate::meta::HashKey;
use cuttlefs_common::ids::{ClientId, InodeNo};
use cuttlefs_common::rpc::{OpenTicket, Rights};
use siphasher::sip::SipHasher24;

/// Makes and checks tickets.
pub struct Tickets {
    key: HashKey,
}

impl Tickets {
    /// Makes and checks tickets with the secret of a pool.
    pub fn new(key: HashKey) -> Self {
        Self { key }
    }

    /// The ticket of a client that has opened a file.
    pub fn issue(&self, client: ClientId, ino: InodeNo, rights: Rights) -> OpenTicket {
        let mut input = [0; 32];
        input[..7].copy_from_slice(b"ticket\0");
        input[7] = u8::from(rights.read) | u8::from(rights.write) << 1;
        input[8..24].copy_from_slice(&client.0.to_le_bytes());
        input[24..].copy_from_slice(&ino.0.to_le_bytes());
        OpenTicket(SipHasher24::new_with_key(&self.key.0).hash(&input))
    }

    /// Whether this is the client's ticket for an open of the file with these rights.
    pub fn is_good(&self, ticket: OpenTicket, client: ClientId, ino: InodeNo, rights: Rights) -> bool {
        // A single comparison of wide words takes the same time wherever they differ.
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
