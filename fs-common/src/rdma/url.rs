//! Endpoints: the places where servers listen, as people write them.
//!
//! `rdma://host:port` (an RNIC, by the address of its interface; `?device=mlx5_0&port=1&gid=3` behind it names one),
//! `tcp://host:port`, `unix:///path` (the tcp protocol over a Unix socket), `shm:///path` (shared memory, set up over a Unix socket at that path).

use std::path::PathBuf;
use std::str::FromStr;

/// The port of a `tcp://` or `rdma://` endpoint that names none.
pub const DEFAULT_PORT: u16 = 7950;
/// Longest path of a Unix socket, bytes: `sun_path` less the zero at its end, unix(7).
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// Where a server can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// Software RNIC over TCP.
    Tcp {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// An RNIC, connections by rdma_cm.
    Rdma {
        /// Name or address of an interface of the RNIC; IPv6 without brackets.
        host: String,
        /// Port, in rdma_cm's own space.
        port: u16,
        /// The RNIC of this machine to use; `None`: the one that follows from the address.
        via: Option<Via>,
    },
    /// Software RNIC's TCP protocol over a Unix socket.
    Unix(PathBuf),
    /// Software RNIC over shared memory.
    Shm(PathBuf),
}

/// The choice of one of this machine's RNICs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Via {
    /// The device's name, as in `rdma link`.
    pub device: String,
    /// The device's port, from 1.
    pub port: u8,
    /// Index in the port's table of GIDs; `None`: the first that fits the address.
    pub gid: Option<u32>,
}

impl Via {
    /// Parses the text behind the question mark.
    fn parse(text: &str) -> Result<Self, &'static str> {
        let (mut device, mut port, mut gid) = (None, None, None);
        for part in text.split('&') {
            let (name, value) = part.split_once('=').ok_or("write ?device=NAME&port=N&gid=N")?;
            let is_given = match name {
                "device" => device.is_some(),
                "port" => port.is_some(),
                _ => gid.is_some(),
            };
            if is_given {
                return Err(
                    "each of device, port and gid can be written once: one connection takes one of them",
                );
            }
            match name {
                "device" => {
                    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
                    if value.is_empty() || !value.bytes().all(is_name) {
                        return Err("`device` is a name as `rdma link` shows it, such as mlx5_0");
                    }
                    device = Some(value.to_owned());
                }
                "port" => {
                    let number = value.parse().ok().filter(|number| *number > 0);
                    port =
                        Some(number.ok_or("`port` behind the question mark is a device's, from 1 to 255")?);
                }
                "gid" => {
                    gid = Some(value.parse().map_err(|_| "`gid` is a place in the port's table, from 0")?);
                }
                _ => return Err("behind the question mark there can be device, port and gid"),
            }
        }
        let device = device.ok_or("name the device, too: ?device=NAME")?;
        Ok(Self { device, port: port.unwrap_or(1), gid })
    }
}

impl std::fmt::Display for Via {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "?device={}&port={}", self.device, self.port)?;
        self.gid.map_or(Ok(()), |gid| write!(f, "&gid={gid}"))
    }
}

/// Why a string is no endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{input}` is no endpoint: {reason}; write tcp://HOST:PORT, rdma://HOST:PORT, unix:///PATH or shm:///PATH"
)]
pub struct EndpointError {
    input: String,
    reason: &'static str,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let error = |reason| EndpointError { input: input.to_owned(), reason };
        let Some((scheme, rest)) = input.split_once("://") else {
            return Err(error("it has no scheme"));
        };
        match scheme {
            "tcp" | "rdma" => {
                let (rest, via) = match rest.split_once('?') {
                    Some((rest, via)) if scheme == "rdma" => (rest, Some(Via::parse(via).map_err(error)?)),
                    Some(_) => return Err(error("only rdma:// has something behind a question mark")),
                    None => (rest, None),
                };
                let rest = rest.strip_suffix('/').unwrap_or(rest);
                if rest.contains('/') {
                    return Err(error("a directory of the server is a mount's option: -o subdir=PATH"));
                }
                let (host, port) = match rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
                    Some((host, "")) => (host, DEFAULT_PORT),
                    Some((host, tail)) => {
                        let port = tail.strip_prefix(':').ok_or_else(|| error("junk after `]`"))?;
                        (host, port.parse().map_err(|_| error("the port is no number below 65536"))?)
                    }
                    None => match rest.rsplit_once(':') {
                        Some((host, _)) if host.contains(':') => {
                            return Err(error("an IPv6 address needs brackets"));
                        }
                        Some((host, port)) => {
                            (host, port.parse().map_err(|_| error("the port is no number below 65536"))?)
                        }
                        None => (rest, DEFAULT_PORT),
                    },
                };
                if host.is_empty() {
                    return Err(error("the host is missing"));
                }
                let host = host.to_owned();
                Ok(if scheme == "rdma" { Self::Rdma { host, port, via } } else { Self::Tcp { host, port } })
            }
            "unix" | "shm" => {
                if !rest.starts_with('/') {
                    return Err(error("the path must be absolute"));
                }
                if rest.len() > SOCKET_PATH_MAX_BYTES {
                    return Err(error("the path of a socket has at most 107 bytes; choose a shorter one"));
                }
                let path = PathBuf::from(rest);
                Ok(if scheme == "shm" { Self::Shm(path) } else { Self::Unix(path) })
            }
            "http" | "https" => Err(error("a cuttlefs server is no web server")),
            "rdmacm" | "verbs" | "ib" | "ibv" | "roce" => Err(error("RDMA hardware is rdma://")),
            "file" | "nfs" | "ssh" | "sshfs" => Err(error("that is another kind of file system's")),
            _ => Err(error("the scheme is not known")),
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port } | Self::Rdma { host, port, .. } => {
                let scheme = if matches!(self, Self::Rdma { .. }) { "rdma" } else { "tcp" };
                if host.contains(':') {
                    write!(f, "{scheme}://[{host}]:{port}")?;
                } else {
                    write!(f, "{scheme}://{host}:{port}")?;
                }
                match self {
                    Self::Rdma { via: Some(via), .. } => write!(f, "{via}"),
                    _ => Ok(()),
                }
            }
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Shm(path) => write!(f, "shm://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_round_trip() {
        for text in [
            "tcp://127.0.0.1:7950",
            "tcp://[::1]:80",
            "rdma://10.9.0.1:7950",
            "rdma://[fe80::1%2]:80",
            "rdma://10.9.0.1:7950?device=mlx5_0&port=2&gid=3",
            "rdma://[::1]:80?device=rxe0&port=1",
            "unix:///run/a.sock",
            "shm:///run/a.sock",
        ] {
            assert_eq!(text.parse::<Endpoint>().expect(text).to_string(), text);
        }
        assert_eq!("tcp://box".parse::<Endpoint>().expect("host").to_string(), "tcp://box:7950");
        let short = "rdma://box?device=rxe0".parse::<Endpoint>().expect("host").to_string();
        assert_eq!(short, "rdma://box:7950?device=rxe0&port=1");
    }

    #[test]
    fn errors_say_what_to_write() {
        for text in ["", "box", "tcp://", "tcp://a:b", "tcp://::1:5", "unix://rel", "ftp://x", "tcp://[::1]x"]
        {
            let error = text.parse::<Endpoint>().expect_err(text).to_string();
            assert!(error.contains("tcp://HOST:PORT"), "{error}");
        }
        let hint = |text: &str| text.parse::<Endpoint>().expect_err(text).to_string();
        assert!(hint("http://box:80").contains("no web server"));
        assert!(hint("roce://box").contains("rdma://"));
        assert!(hint("rdma://box?port=1").contains("?device=NAME"));
        assert!(hint("rdma://box?device=../x").contains("rdma link"));
        assert!(hint("rdma://box?device=a&port=0").contains("from 1"));
        assert!(hint("rdma://box?device=a&gid=x").contains("`gid`"));
        assert!(hint("rdma://box?mtu=4").contains("device, port and gid"));
        for twice in ["device=a&device=b", "device=a&port=1&port=1", "gid=1&gid=2&device=a"] {
            assert!(hint(&format!("rdma://box?{twice}")).contains("can be written once"), "{twice}");
        }
        for below in ["tcp://box/sub", "rdma://box:7950/sub", "rdma://[::1]:7950/a/b/"] {
            assert!(hint(below).contains("-o subdir=PATH"), "{below}");
        }
        assert!(hint("tcp://box:1?device=a").contains("only rdma://"));
        for scheme in ["unix", "shm"] {
            let longest = format!("{scheme}:///{}", "a".repeat(SOCKET_PATH_MAX_BYTES - 1));
            longest.parse::<Endpoint>().expect("the system takes it");
            assert!(hint(&format!("{longest}a")).contains("at most 107 bytes"));
        }
    }
}
