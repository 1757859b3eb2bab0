//! A relay through TLS for programs that have none: it joins each connection to a Unix socket with one to a server's `tcp://` with a key, and passes
//! the bytes on unchanged. For `scripts/suites/attack.sh`, whose hostile peers write packets by hand.
//!
//! `keyed_relay KEY-FILE HOST:PORT SOCKET`

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::rdma::soft::tcp::KeyedStream;
use std::error::Error;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long either end may neither send nor take anything.
const PATIENCE: Duration = Duration::from_secs(60);
const BUFFER_LEN: usize = 64 * 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [key, server, socket] = &arguments[..] else {
        return Err("usage: keyed_relay KEY-FILE HOST:PORT SOCKET".into());
    };
    let keys = ClusterKeys::new(vec![ClusterKey::read_file(Path::new(key))?])?;
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, PermissionsExt::from_mode(0o666))?;
    for client in listener.incoming() {
        let (client, keys, server) = (client?, keys.clone(), server.clone());
        std::thread::spawn(move || {
            if let Err(error) = relay(&client, &keys, &server) {
                eprintln!("keyed_relay: {error}");
            }
            // The client may still wait for bytes: this ends its connection.
            let _ = client.shutdown(Shutdown::Both);
        });
    }
    Ok(())
}

fn relay(client: &UnixStream, keys: &ClusterKeys, server: &str) -> Result<(), Box<dyn Error>> {
    let tcp = TcpStream::connect(server)?;
    tcp.set_nodelay(true)?;
    let ends = tcp.try_clone()?;
    let keyed = Arc::new(KeyedStream::open(tcp, keys, PATIENCE)?);
    let (from, to) = (client.try_clone()?, keyed.clone());
    let sending = std::thread::spawn(move || {
        // Whether the client has ended or failed, the other direction ends, too.
        let _ = pump(&from, &*to);
        let _ = ends.shutdown(Shutdown::Both);
    });
    let _ = pump(&*keyed, client);
    let _ = client.shutdown(Shutdown::Both);
    sending.join().map_err(|_| "the sending thread panicked")?;
    Ok(())
}

fn pump(mut from: impl Read, mut to: impl Write) -> std::io::Result<()> {
    let mut buffer = vec![0; BUFFER_LEN];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            count => to.write_all(&buffer[..count])?,
        }
    }
}
