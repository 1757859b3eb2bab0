//! The present mounts, out of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
//!
//! Reading it touches no file system, so it answers even where the daemon behind a mount is dead or hangs.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The part after `fuse.` in the type of our mounts.
pub(super) const SUBTYPE: &str = "cuttlefs";

/// The most symlinks that are followed on the way to one path, as in the kernel.
const MOST_LINKS: usize = 40;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// `major:minor` of the mount's device.
    pub device: String,
    /// The mount point.
    pub mountpoint: PathBuf,
    /// The kernel's options of this mount, such as `rw,nosuid,relatime`.
    pub options: String,
    /// File system type with its subtype, such as `fuse.cuttlefs`.
    pub fs_type: String,
    /// The source, as the file system names it: for cuttlefs the server's endpoint.
    pub source: String,
}

impl MountEntry {
    /// Whether this is a cuttlefs mount.
    pub fn is_cuttlefs(&self) -> bool {
        self.fs_type.strip_prefix("fuse.") == Some(SUBTYPE)
    }
}

/// The mounts of a mount namespace, in the order they were made.
#[derive(Clone, Debug, Default)]
pub struct MountTable {
    entries: Vec<MountEntry>,
}

impl MountTable {
    /// Reads the kernel's table.
    ///
    /// # Errors
    /// `/proc` is not mounted: the error says what to do, and is no `NotFound`, which would be taken for the mount point's.
    pub fn read() -> io::Result<Self> {
        const TABLE: &str = "/proc/self/mountinfo";
        let table = std::fs::read(TABLE).map_err(|error| {
            io::Error::other(format!(
                "cannot read {TABLE}: {error}; is /proc mounted? (mount -t proc proc /proc)"
            ))
        })?;
        Ok(Self::parse(&table))
    }

    /// The path of a mount point, or of a file in a mount, as the kernel names it.
    ///
    /// Nothing in a cuttlefs mount is accessed, and of other mounts not the mount point itself, not even by `lstat`: the mount may be dead, or hang
    /// because its server is away, and the caller may be the command that is to end it. So the path is followed step by step here, and the part of it
    /// that is in a cuttlefs mount is taken as it is written.
    ///
    /// # Errors
    /// A directory on the way cannot be accessed.
    pub fn resolve(&self, path: &Path) -> io::Result<PathBuf> {
        let absolute = std::path::absolute(path)?;
        let components =
            |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
        // The components that are still to be followed, in reverse order.
        let mut ahead = components(&absolute);
        let mut resolved = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = ahead.pop() {
            if part == ".." {
                resolved.pop();
                continue;
            }
            // If the component is the root directory, it replaces the whole path.
            resolved.push(&part);
            let is_in_cuttlefs = self.containing(&resolved).is_some_and(MountEntry::is_cuttlefs);
            // A mount point is no symlink.
            if part == "." || is_in_cuttlefs || self.at(&resolved).is_some() {
                continue;
            }
            match resolved.symlink_metadata() {
                Ok(found) if found.is_symlink() => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(rustix::io::Errno::LOOP.into());
                    }
                    let target = resolved.read_link()?;
                    resolved.pop();
                    ahead.extend(components(&target));
                }
                Ok(_) => {}
                // The last component need not exist: the caller decides about that.
                Err(error) if error.kind() == io::ErrorKind::NotFound && ahead.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(resolved)
    }

    /// Reads the table of another process's mount namespace, as far as that process sees it.
    ///
    /// # Errors
    /// The process is gone, or may not be looked at.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self::parse(&std::fs::read(format!("/proc/{pid}/mountinfo"))?))
    }

    fn parse(table: &[u8]) -> Self {
        Self { entries: table.split(|&b| b == b'\n').filter_map(parse_line).collect() }
    }

    /// The mount at exactly this (canonical) path; the topmost, if there are several.
    pub fn at(&self, mountpoint: &Path) -> Option<&MountEntry> {
        self.entries.iter().rev().find(|entry| entry.mountpoint == mountpoint)
    }

    /// The mount that contains a (canonical) path.
    pub fn containing(&self, path: &Path) -> Option<&MountEntry> {
        path.ancestors().find_map(|ancestor| self.at(ancestor))
    }

    /// All mounts of cuttlefs.
    pub fn cuttlefs(&self) -> impl Iterator<Item = &MountEntry> {
        self.entries.iter().filter(|entry| entry.is_cuttlefs())
    }
}

/// `id parent major:minor root mountpoint options [tag...] - type source super-options`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&b| b == b' ');
    let device = fields.nth(2)?;
    let mountpoint = fields.nth(1)?;
    let options = fields.next()?;
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let fs_type = rest.next()?;
    let source = rest.next()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(&unescape(bytes)).into_owned();
    Some(MountEntry {
        device: text(device),
        mountpoint: PathBuf::from(OsString::from_vec(unescape(mountpoint))),
        options: text(options),
        fs_type: text(fs_type),
        source: text(source),
    })
}

/// Undoes the kernel's `\ooo` for space, tab, newline and backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(value) => {
                out.push(value);
                rest = &tail[3..];
            }
            None => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    out
}

/// [`MountTable::resolve`] by the table of now.
///
/// # Errors
/// As there, and of [`MountTable::read`].
pub fn resolve_mountpoint(path: &Path) -> io::Result<PathBuf> {
    MountTable::read()?.resolve(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        40 22 0:35 / /mnt/a\\040b rw,nosuid shared:5 master:1 - fuse.cuttlefs tcp://[::1]:7950 rw,user_id=0\n\
        41 22 0:36 / /mnt/x rw - tmpfs none rw\n\
        42 41 0:37 / /mnt/x rw - fuse.cuttlefs shm:///run/a.sock rw\n\
        not a line\n\n";

    #[test]
    fn finds_mounts() {
        let table = MountTable::parse(TABLE);
        let spaced = table.at(Path::new("/mnt/a b")).expect("escaped space");
        assert_eq!((spaced.source.as_str(), spaced.device.as_str()), ("tcp://[::1]:7950", "0:35"));
        assert!(spaced.is_cuttlefs());
        assert_eq!(spaced.options, "rw,nosuid");
        assert_eq!(table.at(Path::new("/mnt/x")).expect("topmost").source, "shm:///run/a.sock");
        assert_eq!(table.containing(Path::new("/mnt/x/deep/er")).expect("inside").device, "0:37");
        assert_eq!(table.containing(Path::new("/mnt/xyz")).expect("root").mountpoint, Path::new("/"));
        assert_eq!(table.at(Path::new("/mnt")), None);
        assert_eq!(table.cuttlefs().count(), 2);
    }

    #[test]
    fn escapes() {
        assert_eq!(unescape(b"a\\040b\\134c\\"), b"a b\\c\\");
        assert_eq!(unescape(b"\\9zz\\777"), b"\\9zz\\777");
    }

    #[test]
    fn reads_the_kernels_table() {
        assert!(MountTable::read().expect("/proc").containing(Path::new("/")).is_some());
    }

    #[test]
    fn a_mountpoint_is_resolved_by_its_parent() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let real = dir.path().canonicalize().expect("canonical");
        std::fs::create_dir(dir.path().join("sub")).expect("mkdir");
        assert_eq!(resolve_mountpoint(&dir.path().join("sub/")).expect("resolve"), real.join("sub"));
        assert_eq!(resolve_mountpoint(Path::new("/")).expect("root"), Path::new("/"));
        std::os::unix::fs::symlink("sub", dir.path().join("link")).expect("symlink");
        assert_eq!(resolve_mountpoint(&dir.path().join("link")).expect("symlink"), real.join("sub"));
        assert!(resolve_mountpoint(&dir.path().join("none/sub")).is_err());
        assert_eq!(resolve_mountpoint(&dir.path().join("none")).expect("missing"), real.join("none"));
        std::os::unix::fs::symlink("loop", dir.path().join("loop")).expect("symlink");
        assert!(resolve_mountpoint(&dir.path().join("loop")).is_err());
    }

    #[test]
    fn nothing_in_a_cuttlefs_mount_is_looked_at() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let real = dir.path().canonicalize().expect("canonical");
        // The directories do not exist, so an access would fail.
        let line = format!("1 2 0:3 / {}/mnt rw - fuse.cuttlefs tcp://a rw", real.display());
        let table = MountTable::parse(line.as_bytes());
        std::os::unix::fs::symlink("mnt/deep", real.join("link")).expect("symlink");
        let resolved = |path: &str| table.resolve(&real.join(path)).expect(path);
        assert_eq!(resolved("mnt/a/b"), real.join("mnt/a/b"));
        assert_eq!(resolved("./mnt/a/../b/."), real.join("mnt/b"));
        assert_eq!(resolved("link/er"), real.join("mnt/deep/er"));
        assert_eq!(resolved("mnt/../other"), real.join("other"));
        assert!(table.resolve(&real.join("elsewhere/a")).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_to_something(table in proptest::collection::vec(0u8..=255, 0..400)) {
            let _ = MountTable::parse(&table);
        }

        #[test]
        fn escaped_mountpoints_come_back(name in "[ \\t\\\\a-z]{1,20}") {
            let escaped: String = name
                .bytes()
                .map(|b| if b.is_ascii_lowercase() { (b as char).to_string() } else { format!("\\{b:03o}") })
                .collect();
            let line = format!("1 2 0:3 / /{escaped} rw - fuse.cuttlefs tcp://a rw");
            let table = MountTable::parse(line.as_bytes());
            let path = PathBuf::from(format!("/{name}"));
            proptest::prop_assert!(table.at(&path).is_some());
        }
    }
}
