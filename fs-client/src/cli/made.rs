//! Directories that a command makes, and removes again if it fails.

use anyhow::Context;
use std::path::{Path, PathBuf};

/// The directories that were made for a path. If this is dropped they are removed, unless `keep` was called or they are not empty.
#[derive(Debug)]
pub(super) struct Made(Vec<PathBuf>);

impl Made {
    /// No directories.
    pub(super) fn nothing() -> Self {
        Self(Vec::new())
    }

    /// Makes a directory and its missing parents.
    pub(super) fn directory(path: &Path) -> anyhow::Result<Self> {
        let path = std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
        let missing = |place: &&Path| std::fs::symlink_metadata(place).is_err();
        let made = Self(path.ancestors().take_while(missing).map(Path::to_owned).collect());
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(made)
    }

    /// Keeps the directories.
    pub(super) fn keep(mut self) {
        self.0.clear();
    }

    /// Removes the contents of the directory, too, if the directory was made here. Only for contents that this command alone has put there, in vain.
    pub(super) fn remove_with_contents(self) {
        if let Some(path) = self.0.first() {
            // The error for which this is called matters more.
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_dir(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_made_here_is_taken_away_and_only_while_nobody_else_uses_it() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let (outer, inner) = (directory.path().join("a"), directory.path().join("a/b/c"));
        drop(Made::directory(&inner).expect("made"));
        assert!(!outer.exists() && directory.path().exists());
        Made::directory(&inner).expect("made").keep();
        assert!(inner.exists());
        drop(Made::directory(&inner).expect("there"));
        Made::directory(&inner).expect("there").remove_with_contents();
        assert!(inner.exists(), "it was there before");
        let deeper = inner.join("d");
        let made = Made::directory(&deeper).expect("made");
        std::fs::write(deeper.join("f"), "").expect("write");
        drop(made);
        assert!(deeper.join("f").exists(), "somebody has put something there");
        let (vain, full) = (inner.join("e"), inner.join("e/f"));
        let made = Made::directory(&full).expect("made");
        std::fs::write(full.join("half"), "").expect("write");
        made.remove_with_contents();
        assert!(!vain.exists() && inner.exists());
    }
}
