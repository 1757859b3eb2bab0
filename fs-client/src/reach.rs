//! The way to a server: the RNIC that an endpoint needs, the proof of a key, and errors that say what to do.

use crate::session::{Session, SessionOptions, lanes_bytes, unsynced_bytes};
use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::rdma::soft::{SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{Device, Endpoint, RdmaError, open_to_connect};
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::{Random, SystemClock, SystemRandom};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a server cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// The server is not there, or not yet.
    #[error(transparent)]
    NotThere(NotThere),
    /// To try again is of no use: the text says what to change.
    #[error("{0}")]
    Unusable(String),
    /// The server or the RNIC refuses.
    #[error(transparent)]
    Refused(#[from] RdmaError),
}

/// The server is not there, or not yet.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotThere(pub String);

/// What a client asks of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reaching {
    /// A label for people, in the server's status.
    pub(crate) label: String,
    /// The pool whose files are meant; `None`: that of the server.
    pub(crate) pool: Option<PoolUuid>,
    /// The directory of the export that is the root; empty: the export's root.
    pub(crate) subtree: Vec<u8>,
    /// The number of requests that can be in flight at once.
    pub(crate) lanes: usize,
    /// How the right server is recognized.
    pub(crate) trust: Trust,
}

/// How the right server is recognized.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// The file of the key that is shown over tcp; `None`: the connection is in plain.
    pub key: Option<PathBuf>,
    /// The user who may serve over shm and unix, besides root and the calling user.
    pub server_user: Option<u32>,
}

/// Reaches the server by `connect`. The errors say what to do.
pub(crate) fn reach<T>(
    server: &Endpoint,
    options: &Reaching,
    background: bool,
    connect: impl FnOnce(Arc<dyn Device>, SessionOptions, &dyn Random) -> Result<T, RdmaError>,
) -> Result<T, ReachError> {
    let session_options = SessionOptions {
        endpoint: server.clone(),
        label: options.label.clone(),
        pool: options.pool,
        subtree: options.subtree.clone(),
        lanes: options.lanes.max(1),
        unsynced_bytes: unsynced_bytes(),
        clock: Arc::new(SystemClock::new()),
        initiator_translates: false,
        background,
    };
    let device = device(server, &options.trust)?;
    connect(device, session_options, &SystemRandom).map_err(|error| match error {
        // The limit is this machine's, and no server that comes later changes it.
        RdmaError::Io { ref source, .. } if source.kind() == ErrorKind::OutOfMemory => {
            ReachError::Unusable(format!("{error}; {}", room_for_lanes(options.lanes)))
        }
        RdmaError::Io { ref source, .. } => {
            if let Some(wrong) = wrong_kind(server, source) {
                return ReachError::Unusable(format!("{server} is not what a server listens at: {wrong}"));
            }
            let text = match advice(server, source.kind()) {
                Some(advice) => format!("{error}; {advice}"),
                None => error.to_string(),
            };
            match source.kind() {
                ErrorKind::PermissionDenied => ReachError::Unusable(text),
                _ => ReachError::NotThere(NotThere(text)),
            }
        }
        // A server that is stopping may be about to be started again.
        RdmaError::Handshake { .. } => ReachError::NotThere(NotThere(format!(
            "{error}; what listens there is no cuttlefsd of this version, hangs, or is stopping (a memory node: status --memory)"
        ))),
        other => other.into(),
    })
}

/// If something else than a server of this scheme is at the endpoint's path, says what it is and what to write.
fn wrong_kind(server: &Endpoint, error: &std::io::Error) -> Option<String> {
    let (path, other) = match server {
        Endpoint::Shm(path) => (path, "unix"),
        Endpoint::Unix(path) => (path, "shm"),
        Endpoint::Tcp { .. } | Endpoint::Rdma { .. } => return None,
    };
    if error.raw_os_error() == Some(libc::EPROTOTYPE) {
        return Some(format!(
            "the socket is another program's, or a server's for {other}://; if it is, write {other}://{}",
            path.display()
        ));
    }
    let found = std::fs::metadata(path).ok()?.file_type();
    let what = if found.is_socket() {
        return None;
    } else if found.is_dir() {
        "directory"
    } else {
        "file that is no socket"
    };
    Some(format!(
        "{} is a {what}; write the path of the socket, as it stands in the server's --listen",
        path.display()
    ))
}

/// What to do when a server cannot be reached; `None` if the error says that.
fn advice(server: &Endpoint, kind: ErrorKind) -> Option<String> {
    Some(match (server, kind) {
        (Endpoint::Shm(_), ErrorKind::PermissionDenied) => {
            "shm:// is for root and the server's own user; mount its unix:// or tcp:// endpoint".to_owned()
        }
        (Endpoint::Unix(_), ErrorKind::PermissionDenied) => {
            "you may not reach this path: ask whoever runs the server for the folder's mode, or mount its tcp:// endpoint"
                .to_owned()
        }
        // A server is there that refuses, or the name is unknown: the error says why.
        (
            Endpoint::Tcp { .. } | Endpoint::Rdma { .. },
            ErrorKind::PermissionDenied | ErrorKind::AddrNotAvailable,
        ) => return None,
        (
            Endpoint::Tcp { port, .. },
            ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::WouldBlock,
        ) => format!("is that machine up, and does no firewall on the way hold back port {port}?"),
        // The error says what to do about this machine's RNIC.
        (Endpoint::Rdma { .. }, kind)
            if !matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::TimedOut) =>
        {
            return None;
        }
        _ => format!("is cuttlefsd running there, and listening at {server}?"),
    })
}

/// What a client needs that has not enough memory for an RNIC.
fn room_for_lanes(threads: usize) -> String {
    let wanted = |threads| ByteSize(lanes_bytes(threads));
    format!(
        "a mount of {threads} threads wants {} for its requests and some 2.1M to count reads in; -o threads=1 wants {}",
        wanted(threads),
        wanted(1)
    )
}

/// An RNIC for connections to a server that must be trusted in this way.
///
/// # Errors
/// The key file cannot be used.
pub fn device(server: &Endpoint, trust: &Trust) -> Result<Arc<dyn Device>, ReachError> {
    let tcp = match (server, &trust.key) {
        // Over the other links the kernel says who the server is.
        (Endpoint::Tcp { .. } | Endpoint::Rdma { .. }, Some(file)) => {
            let keys = ClusterKeys::new(vec![read_key(file)?]);
            TcpSecurity::Keys(keys.map_err(|error| ReachError::Unusable(error.to_string()))?)
        }
        _ => TcpSecurity::Loopback,
    };
    Ok(open_to_connect(server, SoftOptions { tcp, server_user: trust.server_user })?)
}

fn read_key(file: &Path) -> Result<ClusterKey, ReachError> {
    ClusterKey::read_file(file).map_err(|error| match error {
        error if error.is_missing() => {
            ReachError::Unusable(format!("{error}; copy it from the server (DIR/key)"))
        }
        error if error.is_no_key() => ReachError::Unusable(format!("{error}; get the server's key file")),
        error => ReachError::Unusable(error.to_string()),
    })
}

/// The server's status as JSON.
///
/// # Errors
/// The server cannot be reached. The inner error is the server's.
pub(crate) fn server_status(
    server: &Endpoint,
    trust: &Trust,
) -> Result<Result<String, crate::transport::FsError>, ReachError> {
    let options =
        Reaching { label: "status".to_owned(), lanes: 1, trust: trust.clone(), ..Reaching::default() };
    reach(server, &options, false, Session::ask_status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let failure = |server: &str| {
            let server: Endpoint = server.parse().expect("an endpoint");
            server_status(&server, &Trust::default()).expect_err("nobody is there").to_string()
        };
        let unknown = failure("tcp://no-such-host.invalid:1");
        assert!(unknown.contains("check how it is written") && !unknown.contains("cuttlefsd"), "{unknown}");
        let nobody = failure("tcp://127.0.0.1:1");
        assert!(nobody.contains("is cuttlefsd running there"), "{nobody}");
        assert!(failure("shm:///nowhere/a.sock").contains("is cuttlefsd running there"));
        let directory = tempfile::tempdir().expect("temporary directory");
        let at = |scheme: &str, name: &str| format!("{scheme}://{}/{name}", directory.path().display());
        std::fs::write(directory.path().join("file"), b"").expect("write");
        let _stream =
            std::os::unix::net::UnixListener::bind(directory.path().join("stream")).expect("socket");
        let unix = at("unix", "stream");
        assert!(failure(&at("shm", "stream")).contains(&format!("write {unix}")));
        assert!(failure(&at("unix", "file")).contains("file that is no socket"));
        assert!(failure(&at("shm", "")).contains("is a directory"));
        let with_key = |name: &str| {
            let trust = Trust { key: Some(directory.path().join(name)), server_user: None };
            let server: Endpoint = "tcp://127.0.0.1:1".parse().expect("an endpoint");
            server_status(&server, &trust).expect_err("no key").to_string()
        };
        assert!(with_key("none").ends_with("copy it from the server (DIR/key)"), "{}", with_key("none"));
        assert!(with_key("file").ends_with("get the server's key file"), "{}", with_key("file"));
        let said = |server: &str, kind| advice(&server.parse().expect("an endpoint"), kind);
        assert!(said("shm:///a", ErrorKind::PermissionDenied).is_some_and(|text| text.contains("unix://")));
        assert!(said("tcp://a", ErrorKind::TimedOut).is_some_and(|text| text.contains("firewall")));
        assert!(
            said("rdma://a", ErrorKind::ConnectionRefused).is_some_and(|text| text.contains("cuttlefsd"))
        );
        assert_eq!(said("rdma://a", ErrorKind::NetworkDown), None, "the port is down");
        let room = room_for_lanes(8);
        for words in ["8 threads wants 12.0M", "-o threads=1 wants 3.6M"] {
            assert!(room.contains(words), "{room}");
        }
    }
}
