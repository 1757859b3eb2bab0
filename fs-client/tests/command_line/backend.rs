//! What stands in for a server: a volume in memory behind the command, and a `cuttlefsd` that only starts and stops.

use crate::memory_volume::MemoryVolume;
use anyhow::bail;
use cuttlefs_client::cli::{Backend, NotThere, Trust, VolumeOptions};
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::Endpoint;
use signal_hook::consts::SIGTERM;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// If this is set, the server fails to start.
pub const DIES_VARIABLE: &str = "CUTTLEFS_TEST_SERVER_DIES";
/// If this is set, the server never answers.
pub const SILENT_VARIABLE: &str = "CUTTLEFS_TEST_SERVER_IS_SILENT";
/// If this is set, the server is somebody else's.
pub const STRANGER_VARIABLE: &str = "CUTTLEFS_TEST_SERVER_IS_A_STRANGER";
/// If this is set, the server of every mount is away and has not taken all changes.
pub const STRANDS_VARIABLE: &str = "CUTTLEFS_TEST_MOUNT_STRANDS";

pub struct InMemory;

impl Backend for InMemory {
    fn connect_volume(&self, server: &Endpoint, options: &VolumeOptions) -> anyhow::Result<Arc<dyn Volume>> {
        match server {
            Endpoint::Tcp { host, .. } if host == "refuses" => bail!("{server} refuses"),
            Endpoint::Tcp { host, .. } if host == "away" => {
                return Err(NotThere(format!("cannot reach {server}: nobody listens there")).into());
            }
            Endpoint::Shm(path) if !path.exists() => {
                return Err(NotThere(format!("cannot reach {server}: no such socket")).into());
            }
            _ => {}
        }
        assert!(!options.label.is_empty() && options.threads > 0);
        let volume = MemoryVolume::new(InodeNo::ROOT);
        if matches!(server, Endpoint::Tcp { host, .. } if host == "stalls") {
            volume.stall_reads();
        }
        if matches!(server, Endpoint::Tcp { host, .. } if host == "vanishes") {
            volume.vanish();
        }
        if matches!(server, Endpoint::Tcp { host, .. } if host == "strands")
            || std::env::var_os(STRANDS_VARIABLE).is_some()
        {
            volume.strand();
        }
        Ok(Arc::new(volume))
    }

    fn server_status(&self, server: &Endpoint, _: &Trust) -> anyhow::Result<String> {
        match server {
            Endpoint::Shm(path) if !path.exists() => {
                Err(NotThere(format!("cannot reach {server}: no such socket")).into())
            }
            Endpoint::Shm(_) if std::env::var_os(STRANGER_VARIABLE).is_some() => {
                bail!("user 65534 listens at {server}")
            }
            Endpoint::Tcp { host, .. } if host == "leaves" || host == "strands" => {
                bail!("cannot reach {server}")
            }
            Endpoint::Shm(path) => {
                let pid = std::fs::read_to_string(path)?;
                Ok(format!("{{\"version\": \"test\", \"pid\": {pid}, \"pool\": {{\"free_pages\": 7}}}}"))
            }
            _ => Ok("{\"version\": \"test\", \"pool\": {\"free_pages\": 7}}".to_owned()),
        }
    }
}

pub fn argument<'a>(arguments: &'a [String], name: &str) -> &'a str {
    let at = arguments.iter().position(|argument| argument == name).expect(name);
    &arguments[at + 1]
}

pub fn fake_format(arguments: &[String]) -> ExitCode {
    let pool = Path::new(argument(arguments, "--pool"));
    if argument(arguments, "--size") == "1" {
        std::fs::write(pool.join("half"), "").expect("write");
        eprintln!("a pool needs more than a byte");
        return ExitCode::FAILURE;
    }
    let text = format!("[pool]\nsize = {}\n", argument(arguments, "--size"));
    std::fs::write(pool.join("cuttlefs.toml"), text).expect("write");
    ExitCode::SUCCESS
}

pub fn fake_serve(arguments: &[String]) -> ExitCode {
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM]).expect("signals");
    let pool = Path::new(argument(arguments, "--pool"));
    let socket = argument(arguments, "--listen").strip_prefix("shm://").expect("shm first");
    if std::env::var_os(DIES_VARIABLE).is_some() {
        eprintln!("the device is on fire");
        return ExitCode::from(3);
    }
    std::fs::write(pool.join("pid"), std::process::id().to_string()).expect("write");
    if std::env::var_os(SILENT_VARIABLE).is_some() {
        signals.forever().next();
        std::fs::write(pool.join("stopped"), "").expect("write");
        return ExitCode::SUCCESS;
    }
    std::thread::sleep(Duration::from_millis(50));
    std::fs::write(socket, std::process::id().to_string()).expect("socket");
    signals.forever().next();
    std::fs::remove_file(socket).expect("socket");
    std::fs::write(pool.join("stopped"), "").expect("write");
    ExitCode::SUCCESS
}
