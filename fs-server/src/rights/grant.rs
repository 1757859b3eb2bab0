//! What a session was granted when it attached: by which rule, and for whom it speaks.
//!
//! # How it works
//! A session either carries one identity (whose connection it is, by the link's own word), or the right to speak for others:
//! then each request says for whom it is, as a mount that serves all users of its machine must. What a request says of a user
//! is heard in the second case only; in the first it is ignored, whatever it is. So a user's own mount acts as that user for
//! everybody who gets in, as sshfs does.
//!
//! Who carries one identity, and who is squashed, is checked here: its own kernel, if there is one, is in its own hands.
//!
//! # Numbers
//! A client names inodes by number. Where it is not to reach all of them, by number or because a directory on the way may not
//! be searched, the numbers are veiled (`veil`): it can use those that it was told, and guess none.

use super::accounts::Accounts;
use super::identity::{Account, Identity};
use super::rules::ExportRule;
use crate::export;
use crate::meta::{HashKey, Meta, RequestId};
use crate::veil::Veil;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::{LocalPeer, PeerIdentity};
use cuttlefs_common::rpc::RequestHeader;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// For whom a session speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Voice {
    /// For whomever each request names.
    Others,
    /// For itself.
    One { account: Account, groups: Arc<[u32]> },
}

/// What a session may do.
#[derive(Clone)]
pub struct Grant {
    voice: Voice,
    root_squash: Option<Account>,
    all_squash: Option<Account>,
    accounts: Arc<Accounts>,
    /// Nothing may be changed.
    pub read_only: bool,
    /// The directory it sees at most.
    pub root: InodeNo,
    /// The numbers it knows inodes by, where it is not to reach all of them.
    pub veil: Option<Arc<Veil>>,
}

impl Grant {
    /// Whether the server checks its rights.
    pub fn is_checked(&self) -> bool {
        self.voice != Voice::Others || self.root_squash.is_some() || self.all_squash.is_some()
    }

    /// Whether it may do everything everywhere.
    pub fn is_unrestricted(&self) -> bool {
        !self.read_only && self.veil.is_none() && !self.is_checked()
    }

    /// Whom a request is for.
    pub fn identify(&self, header: &RequestHeader, request: Option<RequestId>) -> Identity {
        let account = match &self.voice {
            Voice::One { account, .. } => *account,
            Voice::Others => Account { uid: header.uid, gid: header.gid },
        };
        let identity = |Account { uid, gid }, groups| {
            let checked = self.is_checked();
            let drops_privileges = header.drops_privileges || checked && uid != 0;
            Identity { uid, gid, groups, checked, umask: header.umask, drops_privileges, request }
        };
        if let Some(squashed) = self.all_squash.or(self.root_squash.filter(|_| account.uid == 0)) {
            return identity(squashed, None);
        }
        let groups = match &self.voice {
            Voice::One { groups, .. } => Some(groups.clone()),
            // What a client says of a user's groups proves nothing, and takes room in each message.
            Voice::Others if self.is_checked() => Some(self.accounts.groups_of(account.uid)),
            Voice::Others => None,
        };
        match self.root_squash {
            None => identity(account, groups),
            Some(squash) => {
                let gid = if account.gid == 0 { squash.gid } else { account.gid };
                let groups = groups.map(|groups| match groups.contains(&0) {
                    true => groups.iter().copied().filter(|gid| *gid != 0).collect(),
                    false => groups,
                });
                identity(Account { gid, ..account }, groups)
            }
        }
    }
}

/// A rule that is being served.
struct Served {
    rule: ExportRule,
    root: InodeNo,
}

/// The rules of a server.
pub struct Exports {
    served: Vec<Served>,
    key: HashKey,
    accounts: Arc<Accounts>,
    own_uid: u32,
}

impl Exports {
    /// Finds the rules' directories.
    ///
    /// # Errors
    /// The path that is not there, and why.
    pub fn new(rules: Vec<ExportRule>, meta: &Meta, accounts: Accounts) -> Result<Self, (String, Status)> {
        let served = rules.into_iter().map(|rule| {
            let lookup = |parent, name: &[u8]| meta.lookup(parent, name);
            let root = export::walk(InodeNo::ROOT, &rule.path, lookup).map_err(|status| {
                let parts = rule.path.iter().map(|part| String::from_utf8_lossy(part));
                (parts.flat_map(|part| ["/".into(), part]).collect::<String>(), status)
            })?;
            Ok(Served { rule, root })
        });
        let own_uid = rustix::process::geteuid().as_raw();
        let served = served.collect::<Result<_, _>>()?;
        Ok(Self { served, key: meta.hash_key(), accounts: Arc::new(accounts), own_uid })
    }

    /// The rules.
    pub fn rules(&self) -> impl Iterator<Item = &ExportRule> {
        self.served.iter().map(|served| &served.rule)
    }

    /// What a peer may do. `None`: nothing; why stands in the log.
    pub fn grant(&self, peer: &PeerIdentity) -> Option<Grant> {
        let found = self.served.iter().enumerate().find(|(_, served)| served.rule.is_for(peer));
        let Some((number, Served { rule, root })) = found else {
            tracing::warn!(%peer, "refused: no [[export]] of cuttlefs.toml is for this peer");
            return None;
        };
        let is_trusted = match peer {
            PeerIdentity::Local(local) => local.uid == 0 || local.uid == self.own_uid,
            PeerIdentity::Remote(_) | PeerIdentity::Key { .. } => true,
        };
        let voice = match peer {
            _ if rule.speaks_for_others.unwrap_or(is_trusted) => Voice::Others,
            PeerIdentity::Local(LocalPeer { uid, gid, groups, .. }) => {
                Voice::One { account: Account { uid: *uid, gid: *gid }, groups: groups.clone() }
            }
            PeerIdentity::Remote(_) | PeerIdentity::Key { .. } => match rule.all_squash {
                Some(account) => Voice::One { account, groups: [].into() },
                None => {
                    tracing::warn!(
                        %peer,
                        rule = number + 1,
                        "refused: its [[export]] of cuttlefs.toml does not let it speak for others, and says by no \
                         all_squash who it is"
                    );
                    return None;
                }
            },
        };
        let mut grant = Grant {
            voice,
            root_squash: rule.root_squash,
            all_squash: rule.all_squash,
            accounts: self.accounts.clone(),
            read_only: rule.read_only,
            root: *root,
            veil: None,
        };
        let is_veiled = grant.is_checked() || *root != InodeNo::ROOT;
        let uid = match &grant.voice {
            Voice::One { account, .. } => Some(account.uid),
            Voice::Others => None,
        };
        grant.veil = is_veiled.then(|| Arc::new(Veil::new(self.key, *root, uid)));
        Some(grant)
    }
}
