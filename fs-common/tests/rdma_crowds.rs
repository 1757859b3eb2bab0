//! Crowds of clients without a key at a `tcp` listener that asks for one: a client with the key still gets in.

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{
    ConnectOptions, Device, Endpoint, Listener, PeerIdentity, QpConfig, QueuePair, RdmaError,
};
use cuttlefs_common::world::SeededRandom;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// More connections than a listener keeps that have not said hello.
const CROWD: usize = 1500;
const PATIENCE: Duration = Duration::from_secs(60);

fn device() -> Arc<SoftDevice> {
    let key = ClusterKey::generate("honest", &SeededRandom::new(1)).expect("a key");
    let tcp = TcpSecurity::Keys(ClusterKeys::new(vec![key]).expect("keys"));
    SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() })
}

/// A listener that accepts clients with the key, and notes the names of their keys.
struct Served {
    port: u16,
    listener: Arc<dyn Listener>,
    accepting: Option<JoinHandle<Vec<Arc<str>>>>,
}

fn serve() -> Served {
    // The sockets of the crowd and those of the server all belong to this process.
    cuttlefs_common::descriptors::raise_limit().expect("raised");
    let device = device();
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
    let listener: Arc<dyn Listener> =
        Arc::from(device.alloc_pd().expect("a domain").listen(&endpoint).expect("listen"));
    let Endpoint::Tcp { port, .. } = listener.endpoint() else { panic!("tcp") };
    let accepts = listener.clone();
    let accepting = std::thread::spawn(move || {
        let cq = device.create_cq(16).expect("cq");
        let (mut names, mut live) = (Vec::new(), Vec::new());
        loop {
            match accepts.accept() {
                Ok(incoming) => {
                    let PeerIdentity::Key { name, .. } = incoming.peer() else { panic!("without a key") };
                    let qp = QpConfig::new(&cq, 4, 4);
                    names.push(name);
                    live.push(incoming.accept(qp, Vec::new()));
                }
                Err(RdmaError::Closed) => return names,
                Err(error) => panic!("accept: {error}"),
            }
        }
    });
    Served { port, listener, accepting: Some(accepting) }
}

impl Served {
    /// Closes the listener, and returns the key names of the clients that it accepted.
    fn end(mut self) -> Vec<Arc<str>> {
        self.listener.close();
        self.accepting.take().expect("once").join().expect("it accepts")
    }

    /// A connection from an address of this machine that no other number has.
    fn stranger(&self, number: usize) -> TcpStream {
        let from = Ipv4Addr::new(127, 3, (number / 250) as u8, (number % 250) as u8 + 1);
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let socket: OwnedFd = socket.expect("socket");
        rustix::net::bind(&socket, &SocketAddrV4::new(from, 0)).expect("bound");
        rustix::net::connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.port)).expect("connected");
        TcpStream::from(socket)
    }
}

/// Connects to this port as a client with the key.
fn connect(port: u16) -> Result<Arc<dyn QueuePair>, RdmaError> {
    let device = device();
    let cq = device.create_cq(16).expect("cq");
    let qp = QpConfig::new(&cq, 4, 4);
    let options = ConnectOptions { qp, receives: vec![], timeout: PATIENCE };
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port };
    device.alloc_pd().expect("a domain").connect(&endpoint, options).map(|connected| connected.qp)
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, at_once: usize) {
    let mut buffer = vec![0; at_once];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// A relay to the server: passes on a client's first words, `at_once` bytes at a time, then runs `then`, then passes on everything. Returns its port,
/// and a thread that ends with the first words.
fn way(port: u16, at_once: usize, then: impl FnOnce() + Send + 'static) -> (u16, JoinHandle<Vec<u8>>) {
    let between = TcpListener::bind("127.0.0.1:0").expect("bound");
    let way = between.local_addr().expect("bound").port();
    let passes = std::thread::spawn(move || {
        let (mut here, _) = between.accept().expect("a client");
        let mut there = TcpStream::connect(("127.0.0.1", port)).expect("connected");
        there.set_nodelay(true).expect("a socket");
        let mut words = vec![0; 4096];
        let count = here.read(&mut words).expect("first words");
        words.truncate(count);
        for part in words.chunks(at_once) {
            there.write_all(part).expect("passed on");
        }
        then();
        let (back_from, back_to) = (there.try_clone().expect("fd"), here.try_clone().expect("fd"));
        let back = std::thread::spawn(move || pass_on(back_from, back_to, 4096));
        pass_on(here, there, at_once);
        back.join().expect("thread");
        words
    });
    (way, passes)
}

/// A crowd of any number of addresses does not push out a client with the key whose handshake is still on its way over a slow line.
#[test]
fn a_handshake_outlasts_a_crowd() {
    let served = serve();
    let crowd = Arc::new(Served { port: served.port, listener: served.listener.clone(), accepting: None });
    let (port, passes) = way(served.port, 4096, {
        let crowd = crowd.clone();
        move || {
            let mut strangers: Vec<TcpStream> = (0..CROWD).map(|number| crowd.stranger(number)).collect();
            // The listener closed this stranger to make room. It closes the oldest first, so it has closed every stranger that came before, and would
            // have closed the client of the handshake, too, if it took that for a stranger.
            strangers[CROWD / 2].set_read_timeout(Some(PATIENCE)).expect("a socket");
            assert_eq!(strangers[CROWD / 2].read(&mut [0]).ok(), Some(0), "there is room for everybody");
        }
    });
    let connected = connect(port).expect("a key is enough");
    connected.close();
    drop(connected);
    passes.join().expect("the way");
    assert_eq!(served.end(), ["honest".into()]);
}

/// Strangers at the client's own address do not keep it out, whatever they say.
#[test]
fn strangers_at_the_same_address_keep_nobody_out() {
    let served = serve();
    let words: [&[u8]; 4] =
        [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.0\r\n\r\n", &[0x16, 3, 1, 0xff, 0xff]];
    let crowd: Vec<TcpStream> = (0..CROWD)
        .map(|number| {
            let mut stranger = TcpStream::connect(("127.0.0.1", served.port)).expect("connected");
            // The listener may have closed it already.
            let _ = stranger.write_all(words[number % words.len()]);
            stranger
        })
        .collect();
    connect(served.port).expect("a key is enough").close();
    drop(crowd);
    assert_eq!(served.end(), ["honest".into()]);
}

/// First words that somebody recorded and sends again begin no second handshake.
#[test]
fn first_words_are_good_for_once() {
    let served = serve();
    let (port, passes) = way(served.port, 4096, || {});
    let connected = connect(port).expect("who has the key");
    connected.close();
    drop(connected);
    let words = passes.join().expect("the way");
    let mut refused = TcpStream::connect(("127.0.0.1", served.port)).expect("connected");
    refused.set_read_timeout(Some(PATIENCE)).expect("a socket");
    refused.write_all(&words).expect("said again");
    let mut answer = Vec::new();
    refused.read_to_end(&mut answer).expect("an end");
    assert_eq!(answer, [0x15, 3, 3, 0, 2, 2, 49], "an alert: access denied");
    assert_eq!(served.end(), ["honest".into()]);
}

#[test]
fn first_words_may_come_one_byte_at_a_time() {
    let served = serve();
    let (port, passes) = way(served.port, 1, || {});
    let connected = connect(port).expect("who has the key");
    connected.close();
    drop(connected);
    passes.join().expect("the way");
    assert_eq!(served.end(), ["honest".into()]);
}
