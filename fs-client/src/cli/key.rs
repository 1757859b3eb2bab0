//! The source of the key: `--key`, `-o key=`, the environment.

use anyhow::Context;
use std::path::PathBuf;

/// Names a key file, where neither options nor arguments do.
const KEY_VARIABLE: &str = "CUTTLEFS_KEY";

/// Of what was said, the first; as a path that stays good for a process elsewhere.
///
/// # Errors
/// The path cannot be resolved.
pub fn chosen(said: impl IntoIterator<Item = Option<PathBuf>>) -> anyhow::Result<Option<PathBuf>> {
    let said = said.into_iter().flatten().next();
    let key =
        said.or_else(|| std::env::var_os(KEY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from));
    key.map(|path| std::path::absolute(path).context("cannot resolve the key file's path")).transpose()
}
