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

Keys are for tcp:// and rdma://. Who has a key may mount.
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
        }
        KeyCommand::Show { file } => {
            let key = read_key(file)?;
            cuttlefs_common::say!("{} {}", key.name(), key.fingerprint());
        }
    }
    Ok(())
}

/// How clients prove over `tcp` and `rdma` that they may connect: with one of the given keys, or with the pool's own key, which is made if it does not exist.
pub(super) fn tcp_security(
    pool: &Path,
    listen: &[Endpoint],
    given: &[PathBuf],
    insecure: bool,
) -> anyhow::Result<TcpSecurity> {
    if !listen.iter().any(|endpoint| matches!(endpoint, Endpoint::Tcp { .. } | Endpoint::Rdma { .. })) {
        return Ok(TcpSecurity::Loopback);
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
        return Ok(TcpSecurity::Insecure);
    }
    let keys = if given.is_empty() {
        vec![pool_key(pool)?]
    } else {
        given.iter().map(|file| read_key(file)).collect::<Result<_, _>>()?
    };
    for key in &keys {
        tracing::info!(
            name = key.name(),
            fingerprint = key.fingerprint(),
            "tcp:// and rdma:// take this key"
        );
    }
    Ok(TcpSecurity::Keys(ClusterKeys::new(keys)?))
}

/// Reads the pool's own key, or makes it.
fn pool_key(pool: &Path) -> anyhow::Result<ClusterKey> {
    let file = pool.join(POOL_KEY_FILE);
    if !file.try_exists().with_context(|| format!("cannot look for {}", file.display()))? {
        ClusterKey::generate(POOL_KEY_NAME, &SystemRandom)?.create_file(&file)?;
        tracing::info!(file = %file.display(), "made a key for tcp:// and rdma://; clients mount with it: --key FILE");
    }
    read_key(&file)
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
        let made = tcp_security(pool.path(), &tcp(), &[], false).expect("a key of its own");
        let again = tcp_security(pool.path(), &tcp(), &[], false).expect("the same");
        assert_eq!(fingerprint(&made), fingerprint(&again));
        ClusterKey::read_file(&pool.path().join("key")).expect("for nobody else to read");
        let path = pool.path().join("one");
        let one = ClusterKey::generate("one", &SystemRandom).expect("a key");
        one.create_file(&path).expect("made");
        let given = tcp_security(pool.path(), &tcp(), std::slice::from_ref(&path), false).expect("given");
        assert_eq!(fingerprint(&given), one.fingerprint());
        assert!(tcp_security(pool.path(), &tcp(), &[path], true).is_err(), "both");
        assert!(matches!(tcp_security(pool.path(), &tcp(), &[], true), Ok(TcpSecurity::Insecure)));
        let missing = tcp_security(pool.path(), &tcp(), &["none".into()], false).expect_err("no such key");
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
