//! `cuttlefsd key` makes keys and shows their names; and the choice of the keys with which a server serves.

use anyhow::{Context, anyhow, ensure};
use clap::{Args, Subcommand};
use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::soft::TcpSecurity;
use cuttlefs_common::world::SystemRandom;
use std::path::{Path, PathBuf};

/// Name of the key file in a pool's directory, for servers that are given no key.
const POOL_KEY_FILE: &str = "key";
/// The name of that key.
const POOL_KEY_NAME: &str = "pool";

#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefsd key new box7.key       for the machine box7: copy it there, mode 0600
  cuttlefsd serve --pool DIR --key box7.key --key box8.key --listen tcp://0.0.0.0:7950
  cuttlefs mount tcp://server:7950 /mnt --key box7.key
  cuttlefsd memory --size 16G --key swap.key --listen tcp://0.0.0.0:7951
  cuttlefs swap --memory tcp://server:7951 --key swap.key PROGRAM

Keys are for tcp:// and rdma://. Who has a key may mount, or, if a memory node takes it, swap.
The server knows clients by the names of their keys.")]
pub(super) struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Make a key file, which only its owner can read
    #[command(after_help = "Examples:
  cuttlefsd key new /etc/cuttlefs/box7.key
  cuttlefsd key new --name box7 /root/new.key")]
    New {
        /// Whose key it will be, as the server knows it [default: as the file, without what follows the last dot]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// The file to make
        file: PathBuf,
    },
    /// Show a key's name and fingerprint, not the key
    #[command(after_help = "Examples:
  cuttlefsd key show /etc/cuttlefs/box7.key")]
    Show {
        /// The key file
        file: PathBuf,
    },
}

pub(super) fn run(args: &KeyArgs) -> anyhow::Result<()> {
    match &args.command {
        KeyCommand::New { name, file } => {
            let name = name.as_deref().or_else(|| file.file_stem()?.to_str());
            let name = name.context("say whose key it will be: --name NAME")?;
            let key = ClusterKey::generate(name, &SystemRandom)?;
            key.create_file(file)?;
            let file = file.display();
            cuttlefs_common::say!(
                "made the key `{}` in {file}; its fingerprint is {}",
                key.name(),
                key.fingerprint()
            );
            cuttlefs_common::say!(
                "the server takes it with:  cuttlefsd serve --key {file} (and the keys it takes already)"
            );
            cuttlefs_common::say!(
                "a copy of the file, mode 0600, on the client mounts with:  cuttlefs mount SERVER DIR --key {file}"
            );
            cuttlefs_common::say!(
                "for a memory node:  cuttlefsd memory --key {file}, and cuttlefs swap --memory NODE --key {file}"
            );
        }
        KeyCommand::Show { file } => {
            let key = read_key(file)?;
            cuttlefs_common::say!("{} {}", key.name(), key.fingerprint());
        }
    }
    Ok(())
}

/// A key file that was made for a server, if one was. It goes again when this is dropped, unless the server serves.
pub(super) struct MadeKey(Option<PathBuf>);

impl MadeKey {
    const NONE: Self = Self(None);

    /// The server serves: clients will want the key.
    pub(super) fn stay(mut self) {
        if let Some(file) = self.0.take() {
            tracing::info!(file = %file.display(), "made a key for tcp:// and rdma://; clients mount with it: --key FILE");
        }
    }
}

impl Drop for MadeKey {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            // What cannot be removed is a good key for the next server.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// How clients prove over `tcp` and `rdma` that they may connect: with one of the given keys, or with the pool's own key, which is made if it does not exist.
pub(super) fn tcp_security(
    pool: &Path,
    listen: &[Endpoint],
    given: &[PathBuf],
    insecure: bool,
) -> anyhow::Result<(TcpSecurity, MadeKey)> {
    if !listen.iter().any(|endpoint| matches!(endpoint, Endpoint::Tcp { .. } | Endpoint::Rdma { .. })) {
        return Ok((TcpSecurity::Loopback, MadeKey::NONE));
    }
    if insecure {
        ensure!(
            given.is_empty(),
            "--insecure takes no keys; leave it out, or the keys (--key, `keys` in cuttlefs.toml)"
        );
        tracing::warn!(
            "INSECURE: whoever reaches a tcp:// or rdma:// endpoint may read and change every file as any user, and so may whoever is \
             between; leave --insecure out to have keys"
        );
        return Ok((TcpSecurity::Insecure, MadeKey::NONE));
    }
    let (keys, made) = if given.is_empty() {
        let (key, made) = pool_key(pool)?;
        (vec![key], made)
    } else {
        (given.iter().map(|file| read_key(file)).collect::<Result<_, _>>()?, MadeKey::NONE)
    };
    for key in &keys {
        tracing::info!(
            name = key.name(),
            fingerprint = key.fingerprint(),
            "tcp:// and rdma:// take this key"
        );
    }
    Ok((TcpSecurity::Keys(ClusterKeys::new(keys)?), made))
}

/// Reads the pool's own key, or makes it.
fn pool_key(pool: &Path) -> anyhow::Result<(ClusterKey, MadeKey)> {
    let file = pool.join(POOL_KEY_FILE);
    let mut made = MadeKey::NONE;
    if !file.try_exists().with_context(|| format!("cannot look for {}", file.display()))? {
        ClusterKey::generate(POOL_KEY_NAME, &SystemRandom)?.create_file(&file)?;
        made = MadeKey(Some(file.clone()));
    }
    Ok((read_key(&file)?, made))
}

fn read_key(file: &Path) -> anyhow::Result<ClusterKey> {
    ClusterKey::read_file(file).map_err(|error| match error {
        error if error.is_missing() || error.is_no_key() => {
            anyhow!("{error}; make it with `cuttlefsd key new FILE`")
        }
        error => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp() -> [Endpoint; 1] {
        ["tcp://127.0.0.1:0".parse().expect("an endpoint")]
    }

    fn fingerprint(security: &TcpSecurity) -> String {
        let TcpSecurity::Keys(keys) = security else { panic!("{security:?}") };
        keys.own().fingerprint()
    }

    #[test]
    fn tcp_is_never_open_by_itself() {
        let pool = tempfile::tempdir().expect("directory");
        let of_pool = pool.path().join("key");
        let refused = tcp_security(pool.path(), &tcp(), &[], false).expect("a key of its own");
        assert!(of_pool.exists());
        drop(refused);
        assert!(!of_pool.exists(), "the server did not serve");
        let (made, file) = tcp_security(pool.path(), &tcp(), &[], false).expect("a key of its own");
        file.stay();
        let (again, file) = tcp_security(pool.path(), &tcp(), &[], false).expect("the same");
        assert_eq!(fingerprint(&made), fingerprint(&again));
        drop(file);
        ClusterKey::read_file(&of_pool).expect("for nobody else to read");
        let path = pool.path().join("one");
        let one = ClusterKey::generate("one", &SystemRandom).expect("a key");
        one.create_file(&path).expect("made");
        let (given, _) =
            tcp_security(pool.path(), &tcp(), std::slice::from_ref(&path), false).expect("given");
        assert_eq!(fingerprint(&given), one.fingerprint());
        assert!(tcp_security(pool.path(), &tcp(), &[path], true).is_err(), "both");
        assert!(matches!(tcp_security(pool.path(), &tcp(), &[], true), Ok((TcpSecurity::Insecure, _))));
        let missing = tcp_security(pool.path(), &tcp(), &["none".into()], false);
        let missing = missing.map(drop).expect_err("no such key");
        assert!(missing.to_string().contains("none"), "{missing}");
        assert!(missing.to_string().contains("make it with `cuttlefsd key new"), "{missing}");
    }

    #[test]
    fn without_tcp_nothing_is_made() {
        let pool = tempfile::tempdir().expect("directory");
        let unix = ["unix:///a".parse().expect("an endpoint")];
        tcp_security(pool.path(), &unix, &[], false).expect("nothing to protect");
        assert!(!pool.path().join("key").exists());
    }
}
