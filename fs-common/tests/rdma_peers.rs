//! The identity that a listener finds for a peer: user, group and supplementary groups of the process that connected, on both local links, also from
//! another PID or user namespace.
//!
//! Other users are threads of this process that change their own credentials. So these tests need root, and are skipped without it.

use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{ConnectOptions, Device, Endpoint, LocalPeer, PeerIdentity, QpConfig, RdmaError};
use rustix::fs::{Gid, Uid};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

const ENDPOINT: &str = "CUTTLEFS_TEST_ENDPOINT";

fn connect(endpoint: &Endpoint) -> Result<(), RdmaError> {
    connect_to(endpoint, None)
}

/// Connects, and trusts a server of this user, too.
fn connect_to(endpoint: &Endpoint, server_user: Option<u32>) -> Result<(), RdmaError> {
    let device = SoftDevice::new(SoftOptions { server_user, ..SoftOptions::default() });
    let cq = device.create_cq(16).expect("a queue");
    let qp = QpConfig::new(&cq, 4, 4);
    let options = ConnectOptions { qp, receives: Vec::new(), timeout: Duration::from_secs(30) };
    device.alloc_pd().expect("a domain").connect(endpoint, options).map(|connected| connected.qp.close())
}

/// Listens and lets `client` connect. Returns the peer that the listener accepted, if it did, and the client's result.
fn seen<T>(link: &str, client: impl FnOnce(Endpoint) -> JoinHandle<T>) -> (Option<LocalPeer>, T) {
    let directory = tempfile::tempdir().expect("a directory");
    rustix::fs::chmod(directory.path(), 0o755.into()).expect("for everybody");
    let path = directory.path().join("socket");
    let endpoint: Endpoint = format!("{link}://{}", path.display()).parse().expect("an endpoint");
    let device = SoftDevice::new(SoftOptions::default());
    let listener =
        std::sync::Arc::from(device.alloc_pd().expect("a domain").listen(&endpoint).expect("listen"));
    let accepting = std::thread::spawn({
        let (listener, cq): (std::sync::Arc<dyn cuttlefs_common::rdma::Listener>, _) =
            (std::sync::Arc::clone(&listener), device.create_cq(16).expect("a queue"));
        move || {
            let incoming = listener.accept().ok()?;
            let PeerIdentity::Local(peer) = incoming.peer() else { panic!("a local link has local peers") };
            let qp = QpConfig::new(&cq, 4, 4);
            incoming.accept(qp, Vec::new()).expect("the handshake ends");
            Some(peer)
        }
    });
    let client = client(endpoint).join().expect("the client ends");
    listener.close();
    (accepting.join().expect("the listener ends"), client)
}

/// Runs `run` in a thread with other credentials.
fn as_user<T: Send + 'static>(
    (uid, gid): (u32, u32),
    groups: &[u32],
    run: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let groups: Vec<Gid> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    std::thread::spawn(move || {
        rustix::thread::set_thread_groups(&groups).expect("groups");
        let gid = Gid::from_raw(gid);
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("group");
        let uid = Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("user");
        run()
    })
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: only root can be somebody else");
    }
    is_root
}

#[test]
fn a_peer_is_the_user_who_connected() {
    if !is_root() {
        return;
    }
    let many: Vec<u32> = (3000..3500).collect();
    for groups in [&[][..], &[11, 12], &many] {
        let (peer, connected) =
            seen("unix", |endpoint| as_user((1234, 567), groups, move || connect(&endpoint)));
        connected.expect("anybody may connect");
        let peer = peer.expect("it came");
        assert_eq!((peer.uid, peer.gid, &*peer.groups), (1234, 567, groups));
        assert_eq!(peer.pid.map(|pid| pid.get()), Some(std::process::id() as i32));
    }
}

#[test]
fn only_root_and_the_servers_user_come_to_the_frames() {
    if !is_root() {
        return;
    }
    let (_, refused) = seen("shm", |endpoint| {
        // Only root may use this path; the listener itself would refuse a path that others may use.
        if let Endpoint::Shm(path) = &endpoint {
            rustix::fs::chmod(path, 0o666.into()).expect("for everybody");
        }
        as_user((1234, 1234), &[], move || connect(&endpoint))
    });
    let reason = refused.expect_err("not to the frames").to_string();
    assert!(reason.contains("unix://"), "{reason}");
}

/// A device of another user, and its listener.
type Listening = (std::sync::Arc<SoftDevice>, Box<dyn cuttlefs_common::rdma::Listener>);

fn listening_as(uid: u32, endpoint: &Endpoint) -> Listening {
    let endpoint = endpoint.clone();
    let listen = move || {
        let device = SoftDevice::new(SoftOptions::default());
        let listener = device.alloc_pd().expect("a domain").listen(&endpoint).expect("listen");
        (device, listener)
    };
    as_user((uid, uid), &[], listen).join().expect("it listens")
}

#[test]
fn a_client_says_nothing_to_a_stranger_who_listens() {
    if !is_root() {
        return;
    }
    for link in ["unix", "shm"] {
        let directory = tempfile::tempdir().expect("a directory");
        rustix::fs::chmod(directory.path(), 0o1777.into()).expect("for everybody");
        let path = directory.path().join("socket");
        let endpoint: Endpoint = format!("{link}://{}", path.display()).parse().expect("an endpoint");
        let (device, listener) = listening_as(1234, &endpoint);
        let refused = connect(&endpoint).expect_err("a stranger");
        assert!(matches!(refused, RdmaError::Untrusted { uid: 1234, .. }), "{refused}");
        assert!(refused.to_string().contains("--server-user 1234"), "{refused}");
        assert!(matches!(connect_to(&endpoint, Some(1235)), Err(RdmaError::Untrusted { .. })));
        std::thread::scope(|scope| {
            // The refused clients never sent a hello, so the first connection to accept is that of the client that trusts this user.
            let cq = device.create_cq(16).expect("a queue");
            let accepting = scope.spawn(move || {
                let incoming = listener.accept().expect("somebody comes");
                let qp = QpConfig::new(&cq, 4, 4);
                incoming.accept(qp, Vec::new()).expect("the handshake ends");
            });
            connect_to(&endpoint, Some(1234)).expect("said to be the server");
            accepting.join().expect("accepted");
        });
    }
}

#[test]
fn a_users_own_server_is_his() {
    if !is_root() {
        return;
    }
    let (peer, connected) = seen("unix", |endpoint| as_user((1234, 1234), &[], move || connect(&endpoint)));
    connected.expect("root's");
    assert_eq!(peer.map(|peer| peer.uid), Some(1234));
    let directory = tempfile::tempdir().expect("a directory");
    rustix::fs::chmod(directory.path(), 0o1777.into()).expect("for everybody");
    let endpoint = Endpoint::Unix(directory.path().join("socket"));
    let (device, listener) = listening_as(1234, &endpoint);
    let accepting = std::thread::spawn(move || {
        let cq = device.create_cq(16).expect("a queue");
        let qp = QpConfig::new(&cq, 4, 4);
        listener.accept().expect("somebody comes").accept(qp, Vec::new()).expect("the handshake ends");
    });
    let at = endpoint.clone();
    let other = as_user((1235, 1235), &[], move || connect(&at)).join().expect("another user");
    assert!(matches!(other, Err(RdmaError::Untrusted { uid: 1234, .. })));
    as_user((1234, 1234), &[], move || connect(&endpoint)).join().expect("himself").expect("his own");
    accepting.join().expect("accepted");
}

/// Not a test by itself: `processes_of_other_namespaces_connect` runs it in another namespace.
#[test]
fn in_a_namespace() {
    if let Ok(endpoint) = std::env::var(ENDPOINT) {
        connect(&endpoint.parse().expect("an endpoint")).expect("connect from another namespace");
    }
}

#[test]
fn processes_of_other_namespaces_connect() {
    if !is_root() {
        return;
    }
    let namespaces: [(&[&str], u32); 2] =
        [(&["--pid", "--fork"], 0), (&["--user", "--map-root-user", "--pid", "--fork"], 0)];
    for link in ["unix", "shm"] {
        for (flags, uid) in namespaces {
            let (peer, (status, output)) = seen(link, |endpoint| {
                std::thread::spawn(move || {
                    let output = Command::new("unshare")
                        .args(flags)
                        .arg(std::env::current_exe().expect("this program"))
                        .args(["--exact", "in_a_namespace"])
                        .env(ENDPOINT, endpoint.to_string())
                        .stdin(Stdio::null())
                        .output()
                        .expect("unshare runs");
                    (output.status, String::from_utf8_lossy(&output.stdout).into_owned())
                })
            });
            assert!(status.success(), "{link} {flags:?}: {output}");
            // Processes of the new namespace have numbers in this one, too, since it is the parent. The server's process has no number in the new
            // one.
            assert_eq!(peer.map(|peer| peer.uid), Some(uid), "{link} {flags:?}");
        }
    }
}

#[test]
fn a_peer_without_a_number_here_is_a_peer() {
    if !is_root() {
        return;
    }
    // Here the listener is in a namespace of its own, and the client is outside.
    if let Ok(endpoint) = std::env::var(ENDPOINT) {
        let device = SoftDevice::new(SoftOptions::default());
        let listener = device
            .alloc_pd()
            .expect("a domain")
            .listen(&endpoint.parse().expect("an endpoint"))
            .expect("listen");
        println!("listening");
        let incoming = listener.accept().expect("somebody comes");
        let PeerIdentity::Local(peer) = incoming.peer() else { panic!("a local link has local peers") };
        assert_eq!((peer.uid, peer.pid), (0, None));
        let cq = device.create_cq(16).expect("a queue");
        let qp = QpConfig::new(&cq, 4, 4);
        incoming.accept(qp, Vec::new()).expect("the handshake ends");
        return;
    }
    for link in ["unix", "shm"] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let endpoint: Endpoint = format!("{link}://{}", path.display()).parse().expect("an endpoint");
        let mut server = Command::new("unshare")
            .args(["--pid", "--fork"])
            .arg(std::env::current_exe().expect("this program"))
            .args(["--exact", "a_peer_without_a_number_here_is_a_peer", "--nocapture"])
            .env(ENDPOINT, endpoint.to_string())
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare runs");
        let connected = loop {
            match connect(&endpoint) {
                // The server does not listen yet.
                Err(RdmaError::Io { .. }) if server.try_wait().expect("its state").is_none() => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                result => break result,
            }
        };
        connected.expect("let in");
        assert!(server.wait().expect("it ends").success(), "{link}");
    }
}
