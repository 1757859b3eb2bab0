//! Directories that a command makes, and removes again if it fails.

use anyhow::Context;
use std::path::{Path, PathBuf};

/// What was made of a path. Dropped, it is removed, unless it was kept or somebody has put something there.
#[derive(Debug)]
pub(super) struct Made(Vec<PathBuf>);

impl Made {
    /// Nothing.
    pub(super) fn nothing() -> Self {
        Self(Vec::new())
    }

    /// Makes a directory and those it is in, where they are missing.
    pub(super) fn directory(path: &Path) -> anyhow::Result<Self> {
        let path = std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
        let missing = |place: &&Path| std::fs::symlink_metadata(place).is_err();
        let made = Self(path.ancestors().take_while(missing).map(Path::to_owned).collect());
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(made)
    }

    /// It is wanted.
    pub(super) fn keep(mut self) {
        self.0.clear();
    }

    /// Removes also what is in the directory, if that was made here. For what was put there in vain, and by nobody else.
    pub(super) fn remove_with_contents(self) {
        if let Some(path) = self.0.first() {
            // Why this is called is what matters.
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
