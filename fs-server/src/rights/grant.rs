//! The grant of a session, made when it attaches: its rule, and the users it speaks for.
//!
//! # How it works
//! A session either carries one identity (the connection's user, as the link knows it), or the right to speak for others: then each
//! request names its user, as a mount that serves all users of its machine must. The user that a request names counts in the second
//! case only; in the first it is ignored. So a user's own mount acts as that user for every program that has access to it, as sshfs
//! does.
//!
//! Sessions with one identity, and squashed ones, are checked by the server: their kernels are not trusted.
//!
//! # Directories
//! When a session attaches, the directory that has the rule's path then becomes the session's, for good. While there is no such directory, as before
//! it is made or after it was moved away, sessions are refused. So an export works from the moment at which its directory is made, and does not
//! affect other exports before.
//!
//! # Numbers
//! A client names inodes by number. A client that may not reach all of them, because it is confined to a subtree or because a
//! directory on the way may not be searched, gets veiled numbers (`veil`): it can use those that it was told, and guess none.

use super::accounts::Accounts;
use super::identity::{Account, Identity};
use super::rules::ExportRule;
use crate::export;
use crate::meta::{HashKey, Meta, RequestId};
use crate::veil::Veil;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::{LocalPeer, PeerIdentity, PeerKey};
use cuttlefs_common::rpc::RequestHeader;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// The users for whom a session sends requests.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Voice {
    /// The user whom each request names.
    Others,
    /// One user.
    One { account: Account, groups: Arc<[u32]> },
}

/// What a session may do.
#[derive(Clone)]
pub struct Grant {
    voice: Voice,
    root_squash: Option<Account>,
    all_squash: Option<Account>,
    accounts: Arc<Accounts>,
    /// Whether it can change nothing.
    pub read_only: bool,
    /// The topmost directory that it can reach.
    pub root: InodeNo,
    /// The numbers by which it knows inodes, if it may not reach all of them.
    pub veil: Option<Arc<Veil>>,
}

impl Grant {
    /// Whether the server checks the rights of its requests.
    pub fn is_checked(&self) -> bool {
        self.voice != Voice::Others || self.root_squash.is_some() || self.all_squash.is_some()
    }

    /// Whether it may do everything everywhere.
    pub fn is_unrestricted(&self) -> bool {
        !self.read_only && self.veil.is_none() && !self.is_checked()
    }

    /// The identity of a request.
    pub fn identify(&self, header: &RequestHeader, request: Option<RequestId>) -> Identity {
        let account = match &self.voice {
            Voice::One { account, .. } => *account,
            Voice::Others => Account { uid: header.uid, gid: header.gid },
        };
        let identity = |Account { uid, gid }, groups| {
            let checked = self.is_checked();
            let drops_privileges = header.drops_privileges || checked && uid != 0;
            Identity {
                uid,
                gid,
                groups,
                checked,
                umask: header.umask,
                drops_privileges,
                request,
                opens: None,
            }
        };
        if let Some(squashed) = self.all_squash.or(self.root_squash.filter(|_| account.uid == 0)) {
            return identity(squashed, None);
        }
        let groups = match &self.voice {
            Voice::One { groups, .. } => Some(groups.clone()),
            // A client's own words about a user's groups prove nothing, and would take room in each message.
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

/// The path of a rule's directory, for messages.
fn path_of(rule: &ExportRule) -> String {
    let parts = rule.path.iter().map(|part| String::from_utf8_lossy(part));
    parts.flat_map(|part| ["/".into(), part]).collect()
}

/// The directory that has a rule's path now.
fn root_of(rule: &ExportRule, meta: &Meta) -> Result<InodeNo, Status> {
    export::walk(InodeNo::ROOT, &rule.path, |parent, name| meta.lookup(parent, name))
}

/// The rules of the export.
pub struct Exports {
    rules: Vec<ExportRule>,
    key: HashKey,
    accounts: Arc<Accounts>,
    own_uid: u32,
}

impl Exports {
    /// Warns of rules whose directories do not exist.
    pub fn new(rules: Vec<ExportRule>, meta: &Meta, accounts: Accounts) -> Self {
        for rule in &rules {
            if let Err(status) = root_of(rule, meta) {
                tracing::warn!(
                    path = path_of(rule),
                    %status,
                    "the directory of an [[export]] is not there, so whom it is for is refused; make it, or correct its `path` in \
                     cuttlefs.toml"
                );
            }
        }
        let own_uid = rustix::process::geteuid().as_raw();
        Self { rules, key: meta.hash_key(), accounts: Arc::new(accounts), own_uid }
    }

    /// The rules, each with its directory's path and whether that exists.
    pub fn rules<'a>(&'a self, meta: &'a Meta) -> impl Iterator<Item = (&'a ExportRule, String, bool)> {
        self.rules.iter().map(|rule| (rule, path_of(rule), root_of(rule, meta).is_ok()))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.rules.len()
    }

    /// Whether a peer may know the rules, whose paths and names are nobody else's business: root and the server's own user can read them in
    /// cuttlefs.toml, and who may have the whole pool as root can read every name in it.
    pub fn are_shown_to(&self, peer: &PeerIdentity) -> bool {
        let is_local = matches!(peer, PeerIdentity::Local(_));
        let is_as_root = |rule: &ExportRule| {
            let is_squashed = rule.root_squash.is_some() || rule.all_squash.is_some();
            rule.path.is_empty() && !is_squashed && rule.speaks_for_others.unwrap_or(!is_local)
        };
        let rule = || self.rules.iter().find(|rule| rule.is_for(peer));
        PeerKey::from(peer).is_administrator(self.own_uid) || rule().is_some_and(is_as_root)
    }

    /// The grant of a peer's session. The reason of a refusal is in the server's messages.
    ///
    /// # Errors
    /// `Denied`: no rule is for the peer. `NotFound`, `NotDirectory`: its rule's directory does not exist.
    pub fn grant(&self, peer: &PeerIdentity, meta: &Meta) -> Result<Grant, Status> {
        let found = self.rules.iter().enumerate().find(|(_, rule)| rule.is_for(peer));
        let Some((number, rule)) = found else {
            tracing::warn!(%peer, "refused: no [[export]] of cuttlefs.toml is for this peer");
            return Err(Status::Denied);
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
                    return Err(Status::Denied);
                }
            },
        };
        let root = root_of(rule, meta).inspect_err(|status| {
            let path = path_of(rule);
            tracing::warn!(%peer, path, %status, "refused: the directory of its [[export]] is not there; make it");
        })?;
        let mut grant = Grant {
            voice,
            root_squash: rule.root_squash,
            all_squash: rule.all_squash,
            accounts: self.accounts.clone(),
            read_only: rule.read_only,
            root,
            veil: None,
        };
        let is_veiled = grant.is_checked() || root != InodeNo::ROOT;
        let uid = match &grant.voice {
            Voice::One { account, .. } => Some(account.uid),
            Voice::Others => None,
        };
        grant.veil = is_veiled.then(|| Arc::new(Veil::new(self.key, root, uid)));
        Ok(grant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::{Caller, Format, MemoryStore, Operation};
    use crate::rights::PeerPattern;
    use cuttlefs_common::rpc::NewNode;
    use cuttlefs_common::world::ManualClock;

    const CALLER: Caller =
        Caller { uid: 0, gid: 0, umask: 0, drops_privileges: false, request: None, opens: None };

    fn run(meta: &Meta, operation: &Operation<'_>) -> Option<InodeNo> {
        let outcome = meta.execute(CALLER, operation, &|_| false).expect("executes");
        outcome.attr.map(|attr| attr.ino)
    }

    fn make(meta: &Meta, parent: InodeNo, name: &[u8]) -> InodeNo {
        let make = Operation::Make { parent, name, node: NewNode::Directory, mode: 0o755 };
        run(meta, &make).expect("made")
    }

    fn empty_meta() -> Meta {
        let (store, clock) = (Arc::new(MemoryStore::new()), Arc::new(ManualClock::default()));
        let format = Format { uuid: [7; 16], hash_key: HashKey([1; 16]), root: CALLER, root_mode: 0o755 };
        Meta::format(&*store, &*clock, &format).expect("formats");
        Meta::open(store, clock).expect("opens")
    }

    #[test]
    fn only_who_may_have_the_whole_pool_as_root_is_shown_the_rules() {
        let squash = Some(Account { uid: 9, gid: 9 });
        let rule = |uid| ExportRule {
            peers: vec![PeerPattern::User(uid)],
            speaks_for_others: Some(true),
            ..ExportRule::default()
        };
        let rules = vec![
            rule(1_000_001),
            ExportRule { path: vec![b"a".to_vec()], ..rule(1_000_002) },
            ExportRule { root_squash: squash, ..rule(1_000_003) },
            ExportRule { all_squash: squash, ..rule(1_000_004) },
            ExportRule { speaks_for_others: None, ..rule(1_000_005) },
            ExportRule { root_squash: squash, ..rule(0) },
            ExportRule { peers: vec![PeerPattern::Key("all".into())], ..ExportRule::default() },
            ExportRule {
                peers: vec![PeerPattern::Key("part".into())],
                path: vec![b"a".to_vec()],
                ..ExportRule::default()
            },
        ];
        let mut exports = Exports::new(rules, &empty_meta(), Accounts::default());
        exports.own_uid = 1_000_007;
        let user = |uid| PeerIdentity::Local(LocalPeer { uid, ..LocalPeer::root() });
        let key = |name: &str| PeerIdentity::Key {
            name: name.into(),
            address: "1.2.3.4:5".parse().expect("an address"),
        };
        let stranger = PeerIdentity::Remote("1.2.3.4:5".parse().expect("an address"));
        for (peer, may) in [
            (user(1_000_001), true),
            (user(1_000_002), false),
            (user(1_000_003), false),
            (user(1_000_004), false),
            (user(1_000_005), false),
            // No rule is for it.
            (user(1_000_006), false),
            // They can read cuttlefs.toml, whatever it says of them.
            (user(1_000_007), true),
            (user(0), true),
            (key("all"), true),
            (key("part"), false),
            (stranger, false),
        ] {
            assert_eq!(exports.are_shown_to(&peer), may, "{peer}");
        }
    }

    #[test]
    fn an_export_lives_while_its_directory_is_there() {
        let meta = empty_meta();
        let user = |uid| PeerIdentity::Local(LocalPeer { uid, ..LocalPeer::root() });
        let missing = ExportRule {
            peers: vec![PeerPattern::User(7)],
            path: vec![b"a".to_vec(), b"b".to_vec()],
            ..ExportRule::default()
        };
        let exports = Exports::new(vec![missing, ExportRule::default()], &meta, Accounts::default());
        let root = |uid| exports.grant(&user(uid), &meta).map(|grant| grant.root);
        let shown = || exports.rules(&meta).map(|(_, path, is_there)| (path, is_there)).collect::<Vec<_>>();
        assert_eq!(root(8), Ok(InodeNo::ROOT), "the others are served");
        assert_eq!(root(7), Err(Status::NotFound));
        assert_eq!(shown(), [("/a/b".to_owned(), false), (String::new(), true)]);
        let above = make(&meta, InodeNo::ROOT, b"a");
        assert_eq!(root(7), Err(Status::NotFound));
        let first = make(&meta, above, b"b");
        assert_eq!((root(7), shown()[0].1), (Ok(first), true));
        // The next session gets the directory that has the path then.
        let rename = Operation::Rename {
            parent: above,
            name: b"b",
            new_parent: InodeNo::ROOT,
            new_name: b"c",
            mode: cuttlefs_common::rpc::RenameMode::Replace,
        };
        run(&meta, &rename);
        assert_eq!((root(7), shown()[0].1), (Err(Status::NotFound), false));
        let second = make(&meta, above, b"b");
        assert_eq!((root(7), shown()[0].1), (Ok(second), true));
    }
}
