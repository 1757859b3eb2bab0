//! The processes that keep a mount busy, as far as `/proc` tells: open files, working and root directories, programs,
//! mappings.

use std::fs;
use std::path::{Path, PathBuf};

/// The most processes that an error names.
const MAX_NAMED: usize = 8;

/// The processes that use a file at or below a mount point, as text for people; `None` if none can be seen.
pub(super) fn users(mountpoint: &Path) -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?;
    let mut found: Vec<String> = processes
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let used = used_by(&entry.path(), mountpoint)?;
            if pid == std::process::id() && std::env::current_dir().is_ok_and(|at| at == used) {
                return Some(format!(
                    "  this command, which was started in {}; go elsewhere first",
                    used.display()
                ));
            }
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            Some(format!("  {} (process {pid}) uses {}", name.trim_end(), used.display()))
        })
        .collect();
    if found.len() > MAX_NAMED {
        let more = found.len() - MAX_NAMED;
        found.truncate(MAX_NAMED);
        found.push(format!("  and {more} more"));
    }
    (!found.is_empty()).then(|| found.join("\n"))
}

/// The first path at or below the mount point that a process uses. Links in `/proc` are read, never followed, so
/// that a hanging mount does not hang us.
fn used_by(process: &Path, mountpoint: &Path) -> Option<PathBuf> {
    let links = ["cwd", "root", "exe"].map(|name| process.join(name));
    let directory_links =
        ["fd", "map_files"].into_iter().filter_map(|name| fs::read_dir(process.join(name)).ok());
    links
        .into_iter()
        .chain(directory_links.flatten().flatten().map(|entry| entry.path()))
        .filter_map(|link| fs::read_link(link).ok())
        .find(|target| target.starts_with(mountpoint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_this_process() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().canonicalize().expect("canonical");
        assert_eq!(users(&path), None);
        let _open = fs::File::create(path.join("f")).expect("create");
        let found = users(&path).expect("found");
        assert!(found.contains(&format!("process {}", std::process::id())), "{found}");
    }
}
