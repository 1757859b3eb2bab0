//! Who keeps a mount, as far as `/proc` tells: processes that use its files (open files, working and root directories, programs, mappings), and
//! copies of the mount in other mount namespaces, which an unmount here leaves.
//!
//! # Failure
//! A process that hangs in the kernel may hang whoever looks at its mappings. So a thread of its own looks, and after [`LOOK_LIMIT`] the answer is what
//! is known by then.

use crate::deadline::within;
use crate::fuse::{MountEntry, MountTable};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The most processes that an error names.
const MAX_NAMED: usize = 8;
/// How long a look at all processes may take. It takes milliseconds.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// A copy of a mount in another mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    /// `major:minor` of the mount's device.
    pub device: String,
    /// A process of that namespace, and where it has the mount, as a line for people.
    pub text: String,
}

/// The processes that use a file at or below a mount point, as text for people; `None` if none can be seen.
pub(super) fn users(mountpoint: &Path) -> Option<String> {
    let at = mountpoint.to_owned();
    let (found, is_whole) = gather(LOOK_LIMIT, move |add| each_user(&at, add));
    let mut lines = shorten(found);
    if !is_whole {
        lines.push("  maybe more: a process that hangs does not let itself be looked at".to_owned());
    }
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// The copies of the mounts that `is_meant` in mount namespaces other than this process's. Only those of processes that can be seen.
pub(super) fn copies(is_meant: impl Fn(&MountEntry) -> bool + Send + 'static) -> Vec<Copy> {
    gather(LOOK_LIMIT, move |add| each_copy(&is_meant, add)).0
}

/// The lines of copies, as text for people.
pub(super) fn copies_text(copies: &[Copy]) -> String {
    shorten(copies.iter().map(|copy| copy.text.clone()).collect()).join("\n")
}

fn shorten(mut lines: Vec<String>) -> Vec<String> {
    if lines.len() > MAX_NAMED {
        let more = lines.len() - MAX_NAMED;
        lines.truncate(MAX_NAMED);
        lines.push(format!("  and {more} more"));
    }
    lines
}

/// What `look` adds within the limit, and whether it came to its end.
fn gather<T: Clone + Send + 'static>(
    limit: Duration,
    look: impl FnOnce(&mut dyn FnMut(T)) + Send + 'static,
) -> (Vec<T>, bool) {
    let found = Arc::new(Mutex::new(Vec::new()));
    let adding = Arc::clone(&found);
    let ended = within(limit, move || look(&mut |one| adding.lock().push(one)));
    let found = found.lock().clone();
    (found, matches!(ended, Ok(Some(()))))
}

/// The processes in `/proc`: their numbers and directories.
fn processes() -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
}

fn command_of(process: &Path) -> String {
    fs::read_to_string(process.join("comm")).unwrap_or_default().trim_end().to_owned()
}

fn each_user(mountpoint: &Path, add: &mut dyn FnMut(String)) {
    for (pid, process) in processes() {
        let Some(used) = used_by(&process, mountpoint) else { continue };
        if pid == std::process::id() && std::env::current_dir().is_ok_and(|at| at == used) {
            add(format!("  this command, which was started in {}; go elsewhere first", used.display()));
        } else {
            add(format!("  {} (process {pid}) uses {}", command_of(&process), used.display()));
        }
    }
}

fn each_copy(is_meant: &dyn Fn(&MountEntry) -> bool, add: &mut dyn FnMut(Copy)) {
    // One process of each namespace is enough.
    let mut seen: HashSet<PathBuf> = fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    for (pid, process) in processes() {
        let Ok(namespace) = fs::read_link(process.join("ns/mnt")) else { continue };
        if !seen.insert(namespace) {
            continue;
        }
        let Ok(table) = MountTable::of(pid) else { continue };
        for entry in table.cuttlefs().filter(|entry| is_meant(entry)) {
            let (command, at) = (command_of(&process), entry.mountpoint.display());
            let text = format!("  {command} (process {pid}) has it at {at}");
            add(Copy { device: entry.device.clone(), text });
        }
    }
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
        let name = format!("process {}", std::process::id());
        assert!(users(&path).is_none_or(|text| !text.contains(&name)));
        let _open = fs::File::create(path.join("f")).expect("create");
        let found = users(&path).expect("found");
        assert!(found.contains(&name), "{found}");
    }

    #[test]
    fn a_look_that_hangs_tells_what_it_has_found() {
        let (keep, never) = std::sync::mpsc::channel::<()>();
        let (found, is_whole) = gather(Duration::from_millis(200), move |add| {
            add(7);
            let _ = never.recv();
            add(8);
        });
        // On a slow machine the thread may not have begun.
        assert!(!is_whole && !found.contains(&8));
        drop(keep);
        assert_eq!(gather(Duration::from_secs(60), |add| add(9)), (vec![9], true));
    }
}
