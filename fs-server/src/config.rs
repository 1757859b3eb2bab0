//! `cuttlefs.toml`: the parts of a pool, and the settings it is served with.
//!
//! The file is written by `cuttlefsd format`, with a comment at each key, and edited by people. The pool's own part
//! is not for editing; the rest are defaults that options of `cuttlefsd serve` override. An unknown key is an error:
//! a misspelt `read_only` must not serve a writable export.

use crate::pages::window::WindowKind;
use crate::pool::PoolUuid;
use crate::rights::{Account, ExportRule, PeerPattern};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::regular_file;
use cuttlefs_common::size::ByteSize;
use serde::{Deserialize, Deserializer};
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Name of the file in the pool's directory.
pub const CONFIG_FILE: &str = "cuttlefs.toml";
/// Largest configuration file that is read. A pool's has about 2 KiB.
const MOST_CONFIG_BYTES: u64 = 1 << 20;
/// Least memory a server runs with: the reserved frames and some to work in.
pub const LEAST_MEMORY_BYTES: u64 = 1 << 20;
/// Least lease: below it, a busy machine's scheduling looks like a dead client.
pub const LEAST_LEASE_MS: u64 = 1_000;
/// Longest lease: a dead client's locks are held as long.
pub const MOST_LEASE_MS: u64 = 3_600_000;

/// All of `cuttlefs.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The parts of the pool.
    pub pool: PoolConfig,
    /// How the pool is served.
    #[serde(default)]
    pub server: ServerConfig,
    /// The rules of the export. The first one for a peer counts.
    #[serde(default = "to_everybody", deserialize_with = "exports")]
    pub export: Vec<ExportConfig>,
}

/// The parts of the pool. Written by `format`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// The pool's identity, as in its superblocks.
    #[serde(deserialize_with = "parsed")]
    pub uuid: PoolUuid,
    /// Space for files in bytes, all data files together.
    #[serde(deserialize_with = "size")]
    pub size: u64,
    /// Data files and devices in order; relative to the pool's directory.
    pub data: Vec<PathBuf>,
}

/// How the pool is served.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// DRAM for pages, in bytes.
    #[serde(deserialize_with = "size")]
    pub memory: u64,
    /// Endpoints to listen on.
    #[serde(deserialize_with = "endpoints")]
    pub listen: Vec<Endpoint>,
    /// Files with the keys that tcp accepts, relative to the pool's directory. If there are none: the file `key` there, which is made if it is
    /// missing.
    pub keys: Vec<PathBuf>,
    /// How long a client may be silent, in milliseconds.
    pub lease_ms: u64,
    /// When an operation is durable.
    pub durability: Durability,
    /// Whether every client may read this server's memory by itself, and with it every file.
    pub trust_clients: bool,
    /// What RNICs of trusted clients READ bytes of pages from.
    pub page_window: WindowKind,
}

/// When an operation is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// When fsync, fdatasync or O_SYNC says so.
    #[default]
    Fsync,
    /// When it is answered.
    Ack,
}

impl std::fmt::Display for Durability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Fsync => "fsync",
            Self::Ack => "ack",
        })
    }
}

/// The rights of some clients.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExportConfig {
    /// The peers that it is for: those that match any of these.
    #[serde(rename = "for", deserialize_with = "peers")]
    pub peers: Vec<PeerPattern>,
    /// The directory that these clients see as the root.
    pub path: String,
    /// Whether these clients can change nothing.
    pub read_only: bool,
    /// The account under which their root acts; `None`: as root.
    #[serde(deserialize_with = "optional_account")]
    pub root_squash: Option<Account>,
    /// The account under which all of their users act; `None`: as themselves.
    #[serde(deserialize_with = "optional_account")]
    pub all_squash: Option<Account>,
    /// Whether their requests may name the user they are for. `None`: those of root, of the server's own user and of other machines may.
    pub speaks_for_others: Option<bool>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            memory: 1 << 30,
            listen: Vec::new(),
            keys: Vec::new(),
            lease_ms: 20_000,
            durability: Durability::Fsync,
            trust_clients: false,
            page_window: WindowKind::Pinned,
        }
    }
}

impl Default for ExportConfig {
    fn default() -> Self {
        Self {
            peers: vec![PeerPattern::Anybody],
            path: "/".to_owned(),
            read_only: false,
            root_squash: None,
            all_squash: None,
            speaks_for_others: None,
        }
    }
}

fn to_everybody() -> Vec<ExportConfig> {
    vec![ExportConfig::default()]
}

impl ExportConfig {
    /// The rule as the server uses it.
    pub fn rule(&self) -> ExportRule {
        let parts = self.path.split('/').filter(|part| !part.is_empty() && *part != ".");
        ExportRule {
            peers: self.peers.clone(),
            path: parts.map(|part| part.as_bytes().to_vec()).collect(),
            read_only: self.read_only,
            root_squash: self.root_squash,
            all_squash: self.all_squash,
            speaks_for_others: self.speaks_for_others,
        }
    }

    fn check(&self) -> Result<(), ValueError> {
        let path = &self.path;
        let goes_up = path.split('/').any(|part| part == "..");
        if !path.starts_with('/') || goes_up || path.contains('\0') {
            return Err(ValueError::ExportPath(path.clone()));
        }
        if self.peers.is_empty() {
            return Err(ValueError::ExportForNobody);
        }
        let is_one = self.speaks_for_others == Some(false) && self.all_squash.is_none();
        match self.peers.iter().find(|peer| is_one && peer.is_remote()) {
            Some(peer) => Err(ValueError::ExportWithoutUser(peer.clone())),
            None => Ok(()),
        }
    }
}

/// A value with which no server can run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The file is longer than any configuration.
    #[error("it has {0} bytes; is it the right file?")]
    TooLong(u64),
    /// `pool.data` is empty.
    #[error("pool.data names no data file")]
    NoData,
    /// `server.memory` is too small.
    #[error("server.memory is {0}; give {least} at least", least = ByteSize(LEAST_MEMORY_BYTES))]
    Memory(ByteSize),
    /// `server.lease_ms` is out of range.
    #[error("server.lease_ms is {0}; give {LEAST_LEASE_MS} to {MOST_LEASE_MS}")]
    Lease(u64),
    /// An export's path is not an absolute path without `..`.
    #[error("the path of an [[export]] is {0:?}; give one from /, without `..`")]
    ExportPath(String),
    /// An export has no peers.
    #[error("an [[export]] is for nobody; give it `for = [\"*\"]`")]
    ExportForNobody,
    /// A remote peer that does not speak for others needs a user, and none is given.
    #[error(
        "the [[export]] for {0} says that it does not speak for others; say who it is with all_squash = \"UID:GID\""
    )]
    ExportWithoutUser(PeerPattern),
    /// An export stands behind the one for everybody, so it never applies.
    #[error(
        "the [[export]] number {0} never counts, for the one before it is for everybody (`for = [\"*\"]`) and the first that is for a \
         client counts; put the one for everybody last, or take it out"
    )]
    ExportNeverCounts(usize),
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or has an unknown key or value.
    #[error("{path} is wrong: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and what, in the parser's words.
        reason: String,
    },
    /// A value is out of range.
    #[error("{path} is wrong: {reason}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The value, and what would be right.
        reason: ValueError,
    },
    /// A path that is not UTF-8 cannot be written to the file.
    #[error("the path {0:?} is not UTF-8; rename it")]
    NotUtf8(PathBuf),
}

impl Config {
    /// The configuration of a pool with defaults for all else.
    pub fn new(pool: PoolConfig) -> Self {
        Self { pool, server: ServerConfig::default(), export: to_everybody() }
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// `ConfigError`, with the file, the place in it, and what would be right.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = |source| ConfigError::Read { path: path.to_owned(), source };
        let file = regular_file::open(path).map_err(read)?;
        let len = file.metadata().map_err(read)?.len();
        if len > MOST_CONFIG_BYTES {
            return Err(ConfigError::Value { path: path.to_owned(), reason: ValueError::TooLong(len) });
        }
        let mut text = String::new();
        file.take(MOST_CONFIG_BYTES).read_to_string(&mut text).map_err(read)?;
        Self::parse(&text, path)
    }

    /// Parses and checks a file's text; `path` is for messages.
    ///
    /// # Errors
    /// As `load`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| {
            // Beside an [[export]] it is a key that is there twice, which does not say what to do.
            let once = text.lines().any(|line| line.trim_start().starts_with("[export]"));
            let advice = if once { "write [[export]] for [export], in two brackets\n" } else { "" };
            ConfigError::Syntax { path: path.to_owned(), reason: format!("{advice}{error}") }
        })?;
        config.check().map_err(|reason| ConfigError::Value { path: path.to_owned(), reason })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ValueError> {
        if self.pool.data.is_empty() {
            return Err(ValueError::NoData);
        }
        if self.server.memory < LEAST_MEMORY_BYTES {
            return Err(ValueError::Memory(ByteSize(self.server.memory)));
        }
        let lease = self.server.lease_ms;
        if !(LEAST_LEASE_MS..=MOST_LEASE_MS).contains(&lease) {
            return Err(ValueError::Lease(lease));
        }
        self.export.iter().try_for_each(ExportConfig::check)?;
        let takes_all = |export: &ExportConfig| export.peers.contains(&PeerPattern::Anybody);
        if let Some(number) = self.export.iter().position(takes_all).filter(|at| at + 1 < self.export.len()) {
            return Err(ValueError::ExportNeverCounts(number + 2));
        }
        Ok(())
    }

    /// The file's text, with a comment at each key.
    ///
    /// # Errors
    /// `NotUtf8` if a path cannot be written.
    pub fn render(&self) -> Result<String, ConfigError> {
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let list = |items: Vec<String>| format!("[{}]", items.join(", "));
        let mut data = Vec::new();
        for path in &self.pool.data {
            let text = path.to_str().ok_or_else(|| ConfigError::NotUtf8(path.clone()))?;
            data.push(quoted(text));
        }
        let listen = self.server.listen.iter().map(|one| quoted(&one.to_string())).collect();
        let mut keys = Vec::new();
        for path in &self.server.keys {
            let text = path.to_str().ok_or_else(|| ConfigError::NotUtf8(path.clone()))?;
            keys.push(quoted(text));
        }
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "# A cuttlefs pool. Unknown keys are refused. Sizes take K, M, G and T.\n\
             \n\
             [pool] # written by `cuttlefsd format`; change only paths in `data`, when a file has moved\n\
             uuid = {uuid}\n\
             size = {size} # space for files, all data files together\n\
             data = {data} # files and devices, relative to this directory\n\
             \n\
             [server] # options of `cuttlefsd serve` override these\n\
             memory = {memory} # DRAM for pages\n\
             listen = {listen} # tcp://HOST:PORT, rdma://HOST:PORT, unix:///PATH, shm:///PATH\n\
             keys = {keys} # files of the keys that tcp and rdma take (`cuttlefsd key new`); none: `key` in this directory\n\
             lease_ms = {lease_ms} # how long a client may be silent before its locks and files are taken away\n\
             # fsync: data and names are durable when fsync, fdatasync or O_SYNC says so;\n\
             # ack: every change is durable when it is answered (one under a write grant is not answered: it needs a sync)\n\
             durability = \"{durability}\"\n\
             # true: RNICs of clients read this server's memory; every client can then read every file (docs/security.md)\n\
             trust_clients = {trust_clients}\n\
             # pinned: clients over rdma:// that are trusted (serve --trust-clients) read pages in the server's frames;\n\
             # odp: in a window that RNICs follow by on-demand paging; iommu: in one that the IOMMU translates (docs/rdma.md)\n\
             page_window = \"{page_window}\"\n\
             \n\
             # To whom, and with which rights: the first [[export]] that is for a client counts, and who finds none is refused.\n",
            uuid = quoted(&self.pool.uuid.to_string()),
            size = quoted(&exact(self.pool.size)),
            data = list(data),
            memory = quoted(&exact(self.server.memory)),
            listen = list(listen),
            keys = list(keys),
            lease_ms = self.server.lease_ms,
            durability = self.server.durability,
            trust_clients = self.server.trust_clients,
            page_window = self.server.page_window,
        );
        for export in &self.export {
            let peers = export.peers.iter().map(|peer| quoted(&peer.to_string())).collect();
            let account = |key: &str, account: Option<Account>| match account {
                Some(account) => format!("{key} = {}", quoted(&account.to_string())),
                None => format!("# {key} = \"65534:65534\""),
            };
            let speaks = match export.speaks_for_others {
                Some(speaks) => format!("speaks_for_others = {speaks}"),
                None => "# speaks_for_others = false".to_owned(),
            };
            let _ = write!(
                text,
                "\n\
                 [[export]]\n\
                 for = {peers} # \"uid:1000\" (on this machine), \"key:NAME\", \"addr:10.0.0.0/8\", \"*\"\n\
                 path = {path} # the directory they see as the root; while it is not there they are refused\n\
                 read_only = {read_only} # nothing can be changed\n\
                 {root_squash} # as which uid:gid their root acts; without it, as root\n\
                 {all_squash} # as which uid:gid everybody acts; without it, as themselves\n\
                 # whether they say for whom each request is, as a mount must that serves several users; without it, root,\n\
                 # the server's own user and other machines may, and every other user of this machine is who it is\n\
                 {speaks}\n",
                peers = list(peers),
                path = quoted(&export.path),
                read_only = export.read_only,
                root_squash = account("root_squash", export.root_squash),
                all_squash = account("all_squash", export.all_squash),
            );
        }
        Ok(text)
    }
}

/// A size in a unit that people write, if that is exact; else in bytes.
fn exact(bytes: u64) -> String {
    let text = ByteSize(bytes).to_string();
    match text.parse() {
        Ok(ByteSize(parsed)) if parsed == bytes => text,
        _ => bytes.to_string(),
    }
}

fn parsed<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr,
    T::Err: std::fmt::Display,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(serde::de::Error::custom)
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a size such as \"8G\", or a number of bytes")]
    enum Size {
        Bytes(u64),
        Text(String),
    }
    match Size::deserialize(deserializer)? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Text(text) => text.parse().map(|ByteSize(bytes)| bytes).map_err(serde::de::Error::custom),
    }
}

fn endpoints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Endpoint>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| text.parse().map_err(serde::de::Error::custom)).collect()
}

fn optional_account<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Account>, D::Error> {
    parsed(deserializer).map(Some)
}

fn peers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PeerPattern>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| text.parse().map_err(serde::de::Error::custom)).collect()
}

fn exports<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ExportConfig>, D::Error> {
    let value = toml::Value::deserialize(deserializer)?;
    if value.is_table() {
        return Err(serde::de::Error::custom("there may be several; write [[export]], in two brackets"));
    }
    value.try_into().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Config {
        let uuid = PoolUuid(*b"0123456789abcdef");
        Config::new(PoolConfig { uuid, size: 8 << 30, data: vec!["data".into()] })
    }

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("/pool/cuttlefs.toml"))
    }

    #[test]
    fn what_is_rendered_parses_to_the_same() {
        let plain = example();
        let text = plain.render().expect("UTF-8");
        assert!(text.contains("size = \"8G\"") && text.contains("memory = \"1G\""), "{text}");
        assert_eq!(parse(&text).expect("its own text"), plain);
        let mut odd = example();
        odd.pool.size = (1 << 30) + 4096;
        odd.pool.data = vec!["/dev/disk \"1\"\\x".into(), "bücher\n".into()];
        odd.server.listen = vec!["tcp://127.0.0.1:7950".parse().expect("an endpoint")];
        odd.server.trust_clients = true;
        odd.server.page_window = WindowKind::Iommu;
        odd.server.keys = vec!["/etc/cuttlefs/\"a\"".into(), "b".into()];
        let first = ExportConfig {
            peers: vec![PeerPattern::User(5), PeerPattern::Addresses([10, 0, 0, 0].into(), 8)],
            read_only: true,
            root_squash: Some(Account { uid: 1, gid: 2 }),
            all_squash: Some(Account { uid: 3, gid: 4 }),
            path: "/a b".into(),
            speaks_for_others: Some(false),
        };
        odd.export.insert(0, first);
        assert_eq!(parse(&odd.render().expect("UTF-8")).expect("its own text"), odd);
        use std::os::unix::ffi::OsStrExt;
        odd.pool.data = vec![std::ffi::OsStr::from_bytes(b"\xff").into()];
        assert!(matches!(odd.render(), Err(ConfigError::NotUtf8(_))));
    }

    #[test]
    fn everything_but_the_pool_has_a_default() {
        let pool =
            "[pool]\nuuid = \"30313233-3435-3637-3839-616263646566\"\nsize = 8589934592\ndata = [\"data\"]\n";
        assert_eq!(parse(pool).expect("enough"), example());
        let partial = format!("{pool}[server]\nlease_ms = 5000\n[[export]]\nread_only = true\n");
        let config = parse(&partial).expect("enough");
        assert_eq!((config.server.lease_ms, config.server.memory), (5000, 1 << 30));
        assert!(config.export[0].read_only && config.export[0].peers == [PeerPattern::Anybody]);
    }

    #[test]
    fn wrong_keys_and_values_are_refused_and_named() {
        let good = example().render().expect("UTF-8");
        let changes = [
            ("read_only", "readonly", "readonly"),
            ("memory = \"1G\"", "memory = \"much\"", "no size"),
            ("memory = \"1G\"", "memory = \"4K\"", "server.memory"),
            ("lease_ms = 20000", "lease_ms = 5", "server.lease_ms"),
            ("lease_ms = 20000", "lease_ms = -5", "lease_ms"),
            ("durability = \"fsync\"", "durability = \"always\"", "always"),
            ("page_window = \"pinned\"", "page_window = \"mapped\"", "mapped"),
            ("path = \"/\"", "path = \"a/b\"", "[[export]]"),
            ("path = \"/\"", "path = \"/a/../b\"", "[[export]]"),
            ("for = [\"*\"]", "for = [\"root\"]", "uid:1000"),
            ("for = [\"*\"]", "for = []", "for nobody"),
            ("for = [\"*\"]", "for = [\"key:laptop\"]\nspeaks_for_others = false", "all_squash"),
            ("# all_squash = \"65534:65534\"", "all_squash = \"65534\"", "UID:GID"),
            ("listen = []", "listen = [\"http://x\"]", "no endpoint"),
            ("# root_squash = \"65534:65534\"", "root_squash = \"nobody\"", "UID:GID"),
            ("data = [\"data\"]", "data = []", "pool.data"),
            ("uuid = \"3031", "uuid = \"303", "no UUID"),
            ("\n[[export]]\n", "\n[[exports]]\n", "exports"),
            ("\n[[export]]\n", "\n[export]\n", "[[export]]"),
            ("\n[[export]]\n", "\n[[export]]\n[export]\n", "write [[export]]"),
            ("[pool]", "[pool", "pool"),
        ];
        for (from, to, named) in changes {
            assert!(good.contains(from), "{from}");
            let error = parse(&good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(named) && error.contains("/pool/cuttlefs.toml"), "{error}");
        }
        assert!(parse("").is_err());
        let missing = Config::load(Path::new("/nowhere/cuttlefs.toml")).expect_err("missing");
        assert!(missing.to_string().contains("/nowhere"));
    }

    /// A pool's configuration in which every key is set.
    fn with_every_key() -> Config {
        let mut all = example();
        let account = Some(Account { uid: 1, gid: 2 });
        let (root_squash, all_squash) = (account, account);
        all.export = vec![ExportConfig {
            root_squash,
            all_squash,
            speaks_for_others: Some(true),
            ..ExportConfig::default()
        }];
        all
    }

    /// Keys with their values, as `section.key`.
    fn keys_of(config: &Config) -> std::collections::BTreeMap<String, String> {
        let text = config.render().expect("UTF-8");
        let table: toml::Table = text.parse().expect("TOML");
        let sections = table.into_iter().map(|(section, value)| match value {
            toml::Value::Array(mut all) => (section, all.remove(0)),
            value => (section, value),
        });
        let mut keys = std::collections::BTreeMap::new();
        for (section, value) in sections {
            let toml::Value::Table(values) = value else { panic!("{section} is no table") };
            keys.extend(
                values.into_iter().map(|(key, value)| (format!("{section}.{key}"), value.to_string())),
            );
        }
        keys
    }

    #[test]
    fn every_key_is_documented_with_its_default() {
        let document = include_str!("../../docs/operations.md");
        let section =
            document.split("\n## cuttlefs.toml\n").nth(1).and_then(|rest| rest.split("\n## ").next());
        let mut documented = std::collections::BTreeMap::new();
        for row in section.expect("the section").lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
            let [key, _, default, _] = cells[..] else { panic!("{row}") };
            documented.insert(key.trim_matches('`').to_owned(), default.trim_matches('`').to_owned());
        }
        let known = keys_of(&with_every_key());
        assert_eq!(documented.keys().collect::<Vec<_>>(), known.keys().collect::<Vec<_>>());
        let defaults = keys_of(&example());
        for (key, shown) in documented {
            let default = match defaults.get(&key) {
                _ if key.starts_with("pool.") => "set by `format",
                Some(value) => value,
                None => "none",
            };
            assert_eq!(shown, default, "{key}");
        }
    }
}
