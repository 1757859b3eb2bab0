//! The identity under which a request runs.

use crate::meta::RequestId;
use cuttlefs_common::rpc::Rights;
use std::str::FromStr;
use std::sync::Arc;

/// A user and a group for requests that are mapped to another user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

impl std::fmt::Display for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.uid, self.gid)
    }
}

impl FromStr for Account {
    type Err = String;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let parts = input.split_once(':').map(|(uid, gid)| (uid.parse(), gid.parse()));
        match parts {
            // 2^32 - 1 is no user: chown(2) takes it to mean no change.
            Some((Ok(uid), Ok(gid))) if uid != u32::MAX && gid != u32::MAX => Ok(Self { uid, gid }),
            _ => Err(format!("`{input}` is no UID:GID; write two numbers, such as 65534:65534")),
        }
    }
}

/// The identity under which a request runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user id, which owns new inodes.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// The supplementary groups, if the server checks the rights and the user has some.
    pub groups: Option<Arc<[u32]>>,
    /// Whether the server checks the rights. If not, a trusted client's kernel has, or the identity is the server's own.
    pub checked: bool,
    /// Permission bits that new inodes do not get, unless a default ACL applies.
    pub umask: u16,
    /// Whether a change of contents takes set-id bits and capabilities from the file.
    pub drops_privileges: bool,
    /// The request's number, if its client may send it again.
    pub request: Option<RequestId>,
    /// The rights with which the request opens a file, if it does.
    pub opens: Option<Rights>,
}

impl Identity {
    /// The server's own identity.
    pub fn server() -> Self {
        Self {
            uid: 0,
            gid: 0,
            groups: None,
            checked: false,
            umask: 0,
            drops_privileges: false,
            request: None,
            opens: None,
        }
    }

    /// Whether it has the rights of a process with all capabilities: it may do everything but execute what nobody may.
    pub fn is_privileged(&self) -> bool {
        !self.checked || self.uid == 0
    }

    /// Whether it is in a group.
    pub fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.as_ref().is_some_and(|groups| groups.contains(&gid))
    }
}
