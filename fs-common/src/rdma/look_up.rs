//! Resolves names of machines to addresses.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

/// The addresses of a name, at least one.
///
/// # Errors
/// `AddrNotAvailable`, with advice: the name is unknown.
pub(super) fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let unknown = |why: &str| {
        let text = format!(
            "no machine called `{host}` is known ({why}); check how it is written, and that this machine's DNS or /etc/hosts has it, \
             or write its address"
        );
        io::Error::new(io::ErrorKind::AddrNotAvailable, text)
    };
    let found: Vec<_> =
        (host, port).to_socket_addrs().map_err(|error| unknown(&error.to_string()))?.collect();
    if found.is_empty() { Err(unknown("it has no address")) } else { Ok(found) }
}
