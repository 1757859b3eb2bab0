//! The choice of the key file: `--key`, `-o key=`, or the environment.

use super::connect::Trust;
use super::run_state::RunState;
use anyhow::Context;
use std::path::{Path, PathBuf};

/// The variable that names a key file if no option does.
const KEY_VARIABLE: &str = "CUTTLEFS_KEY";

/// The first key file that is given, else that of the environment, as an absolute path, which is valid for a process in another directory, too.
///
/// # Errors
/// The path cannot be resolved.
pub fn chosen(said: impl IntoIterator<Item = Option<PathBuf>>) -> anyhow::Result<Option<PathBuf>> {
    let said = said.into_iter().flatten().next();
    let key =
        said.or_else(|| std::env::var_os(KEY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from));
    key.map(|path| std::path::absolute(path).context("cannot resolve the key file's path")).transpose()
}

/// How the server of a mount is recognized by whoever asks it beside the mount: as by the mount, but for a key that was said.
///
/// # Errors
/// As [`chosen`]; what the mount's process wrote down cannot be read.
pub fn of_mount(mountpoint: &Path, said: Option<PathBuf>) -> anyhow::Result<Trust> {
    let of_mount = RunState::load(mountpoint)?.map(|state| state.trust).unwrap_or_default();
    Ok(Trust { key: chosen([said, of_mount.key])?, ..of_mount })
}
