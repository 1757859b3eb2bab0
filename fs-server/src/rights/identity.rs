//! The identity a request runs under.

use crate::meta::RequestId;
use cuttlefs_common::rpc::Rights;
use std::str::FromStr;
use std::sync::Arc;

/// A user and group that stand for somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// User.
    pub uid: u32,
    /// Group.
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
            // 2^32 - 1 is no user: chown takes it as "leave it".
            Some((Ok(uid), Ok(gid))) if uid != u32::MAX && gid != u32::MAX => Ok(Self { uid, gid }),
            _ => Err(format!("`{input}` is no UID:GID; write two numbers, such as 65534:65534")),
        }
    }
}

/// The identity a request runs under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User: owner of what is made.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups, where it is checked and has some.
    pub groups: Option<Arc<[u32]>>,
    /// The server checks its rights. `false`: a trusted client's kernel has, or it is the server itself.
    pub checked: bool,
    /// Permission bits that what is made does not get, where no default ACL says otherwise.
    pub umask: u16,
    /// A change of contents takes set-id bits and capabilities from the file.
    pub drops_privileges: bool,
    /// The request this is done for, if a client may send it again.
    pub request: Option<RequestId>,
    /// What that request opens a file for.
    pub opens: Option<Rights>,
}

impl Identity {
    /// The server itself.
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

    /// Whether nothing is refused to it but to execute what nobody may, as to a process with all capabilities.
    pub fn is_privileged(&self) -> bool {
        !self.checked || self.uid == 0
    }

    /// Whether it is in a group.
    pub fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.as_ref().is_some_and(|groups| groups.contains(&gid))
    }
}
