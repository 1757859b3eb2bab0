//! Running mounts: one small file for each, in the runtime directory.
//!
//! The runtime directory is `/run/cuttlefs` for root, and `$XDG_RUNTIME_DIR/cuttlefs` for other users. If that variable is not set, it is
//! `/run/user/UID/cuttlefs` or `/tmp/cuttlefs-UID`. All of these are gone after a reboot, like the processes. In /tmp another user can take the name
//! first; from then on the directory is `.cuttlefs-HOST` in the user's home (`Places`). A directory to which another user may write is never used.
//! Root of a user namespace that is not the machine's is treated as any other user, unless it has a `/run` of its own.
//!
//! Other users may go through the directory, to the sockets in it. Only its owner may read its files, which tell of pools, keys and servers. Files
//! are named by a hash of the mount point, because a mount point may be longer than a file name, and a Unix socket's path must be shorter than 108
//! bytes.
//!
//! After an unmount the mount point may be mounted again before the process that served it has ended. So a process that removes a file makes
//! sure that it is its own, under the directory's lock (`locked`).

use super::connect::Trust;
use super::last_sync::Lost;
use super::process::ProcessId;
use anyhow::{Context, bail};
use cuttlefs_common::{regular_file, socket_file};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The mode of files that describe running mounts: other users may not read them.
const PRIVATE_MODE: u32 = 0o600;
/// More than any state has.
const STATE_BYTES_MAX: u64 = 1 << 20;

/// The processes that serve one mount point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunState {
    /// The mount point.
    pub mountpoint: PathBuf,
    /// The server's endpoint.
    pub source: String,
    /// How the right server is recognized.
    pub trust: Trust,
    /// The directory of the export that is mounted; empty: the export's root.
    #[serde(default)]
    pub subtree: Vec<u8>,
    /// The process that serves the mount.
    pub mount: ProcessId,
    /// The server that `up` started for the mount.
    pub server: Option<ProcessId>,
    /// That server's pool.
    pub pool: Option<PathBuf>,
    /// That server's memory in bytes.
    #[serde(default)]
    pub memory: Option<u64>,
    /// What was lost with the mount, if it has ended and changes were lost.
    #[serde(default)]
    pub lost: Option<String>,
    /// Whether `up` has not mounted yet. Its process, `mount`, ends the server that it starts; the server is not written down here.
    #[serde(default)]
    pub starting: bool,
}

impl RunState {
    /// Writes the state to its file. A reader sees all of it or none.
    pub(super) fn save(&self) -> anyhow::Result<()> {
        let path = file(&self.mountpoint, "json")?;
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(self).context("cannot encode the state")?;
        locked(|| {
            private(File::options().write(true).create(true).truncate(true), &new)
                .and_then(|mut file| file.write_all(&text))
                .and_then(|()| fs::rename(&new, &path))
                .with_context(|| format!("cannot write {}", path.display()))
        })
    }

    /// The state that is written down for a mount point.
    pub(super) fn load(mountpoint: &Path) -> anyhow::Result<Option<Self>> {
        let path = file(mountpoint, "json")?;
        let mut text = Vec::new();
        match regular_file::open(&path).and_then(|file| file.take(STATE_BYTES_MAX).read_to_end(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let state: Self = serde_json::from_slice(&text)
            .with_context(|| format!("{} is damaged; remove it if nothing runs", path.display()))?;
        // The file may be of another mount point with the same hash, however unlikely.
        Ok((state.mountpoint == mountpoint).then_some(state))
    }

    /// The mount has ended: removes its state. What was lost with the mount stays written down for the one who unmounted it, or until the next mount
    /// at its place.
    pub(super) fn end(mut self, result: &anyhow::Result<()>) {
        let Some(lost) = result.as_ref().err().and_then(|error| error.downcast_ref::<Lost>()) else {
            return self.forget();
        };
        let is_last = Self::load(&self.mountpoint).is_ok_and(|state| state.as_ref() == Some(&self));
        self.lost = Some(lost.to_string());
        // The log has it in any case.
        let _ = if is_last { self.save() } else { Ok(()) };
    }

    /// Removes the file of this state, and its log if that is empty. Keeps what a later mount at the same place has written down.
    pub(super) fn forget(&self) {
        // Nothing depends on the removal: readers of these files notice that the mount does not exist.
        let _ = locked(|| {
            if Self::load(&self.mountpoint)?.as_ref() != Some(self) {
                return Ok(());
            }
            let path = file(&self.mountpoint, "json")?;
            fs::remove_file(&path)?;
            let log = path.with_extension("log");
            if log.metadata()?.len() == 0 {
                fs::remove_file(log)?;
            }
            Ok(())
        });
    }
}

/// Runs `something` while no other process removes or replaces a file of the runtime directory.
pub(super) fn locked<T>(something: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let path = directory()?;
    let directory = fs::File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    // The lock ends when this is closed.
    rustix::fs::flock(&directory, rustix::fs::FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", path.display()))?;
    something()
}

/// The path of a file for a mount point or pool, in the runtime directory, which is made if it is missing.
pub(super) fn file(of: &Path, extension: &str) -> anyhow::Result<PathBuf> {
    Ok(directory()?.join(format!("{:016x}.{extension}", fnv1a(of.as_os_str().as_bytes()))))
}

/// Removes the sockets with these extensions that killed processes have left in the runtime directory. Both this, and making such sockets, take its lock:
/// a new one is nobody's for a moment.
pub(super) fn remove_left_behind(extensions: &[&str]) -> anyhow::Result<()> {
    remove_left_behind_in(&directory()?, extensions)
}

fn remove_left_behind_in(directory: &Path, extensions: &[&str]) -> anyhow::Result<()> {
    let files = fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for path in files.filter_map(|file| Some(file.ok()?.path())) {
        let is_of_these = extensions.iter().any(|one| path.extension().is_some_and(|found| found == *one));
        if is_of_these && socket_file::is_left_behind(&path).unwrap_or(false) {
            // Nothing depends on it; a later one tries again.
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Opens a regular file and makes it readable by its owner only, even if others could read it before. Does not follow a
/// symlink of another user: the directory may be his.
pub(super) fn private(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let link = fs::symlink_metadata(path).ok().filter(|found| found.is_symlink());
    if link.is_some_and(|link| ![0, rustix::process::geteuid().as_raw()].contains(&link.uid())) {
        return Err(std::io::Error::other("it is a symlink that another user has made; remove it"));
    }
    let file = regular_file::open_by(options.mode(PRIVATE_MODE), path)?;
    file.set_permissions(fs::Permissions::from_mode(PRIVATE_MODE))?;
    Ok(file)
}

fn directory() -> anyhow::Result<PathBuf> {
    let user = rustix::process::geteuid();
    let of_user = || match named_directory(std::env::var_os("XDG_RUNTIME_DIR")) {
        Some(runtime) => make(runtime.join("cuttlefs")),
        None => Places::of(user.as_raw()).choose(),
    };
    if !user.is_root() {
        return of_user();
    }
    match make(PathBuf::from("/run/cuttlefs")) {
        Err(refused) if !is_machines_root() => of_user().with_context(|| {
            format!("root of a user namespace who is not the machine's has no /run/cuttlefs ({refused:#})")
        }),
        made => made,
    }
}

/// The directory that a variable names. An empty value and a relative path are as none (XDG Base Directory Specification 0.8).
fn named_directory(variable: Option<OsString>) -> Option<PathBuf> {
    variable.map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Whether user 0 of this process is user 0 of the machine. In a user namespace (user_namespaces(7)) it may be any user.
fn is_machines_root() -> bool {
    // A kernel without user namespaces has no such file.
    fs::read_to_string("/proc/self/uid_map").map_or(true, |map| maps_root_to_root(&map))
}

/// Each line has the first user inside, the first user outside, and the number of users.
fn maps_root_to_root(map: &str) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace();
        (numbers.next(), numbers.next()) == (Some("0"), Some("0"))
    })
}

/// The possible places of a user's runtime directory, if `XDG_RUNTIME_DIR` is not set.
struct Places {
    /// The directory that a login makes for the user.
    login: PathBuf,
    /// A place where every user can make a directory.
    shared: PathBuf,
    /// A place that no other user can take.
    home: Option<PathBuf>,
}

impl Places {
    fn of(uid: u32) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().replace('/', "_");
        let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
        Self {
            login: PathBuf::from(format!("/run/user/{uid}")),
            shared: PathBuf::from(format!("/tmp/cuttlefs-{uid}")),
            // Machines may share home directories, but not processes.
            home: home.map(|home| home.join(format!(".cuttlefs-{host}"))),
        }
    }

    /// Returns the same place as long as it exists, whatever other users do at the other places: so a process finds what an earlier one wrote down.
    fn choose(self) -> anyhow::Result<PathBuf> {
        if is_own(&self.login)? {
            return make(self.login.join("cuttlefs"));
        }
        match self.home {
            Some(home) if is_own(&home)? => Ok(home),
            Some(home) => make(self.shared).or_else(|_| make(home)),
            None => make(self.shared),
        }
        .context("set XDG_RUNTIME_DIR to a directory that only you can write, or HOME")
    }
}

/// Whether this is a directory of this user to which nobody else can write.
fn is_own(path: &Path) -> anyhow::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) => {
            let user = rustix::process::geteuid().as_raw();
            Ok(found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0)
        }
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Makes a directory to which only this user can write, or finds it.
fn make(path: PathBuf) -> anyhow::Result<PathBuf> {
    // 0755: other users may connect to the sockets in it, which check who they are; only its owner writes.
    match fs::DirBuilder::new().mode(0o755).create(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error).with_context(|| format!("cannot make {}", path.display())),
    }
    if !is_own(&path)? {
        bail!("{} is not a directory that only you can write; remove it and try again", path.display());
    }
    Ok(path)
}

/// FNV-1a, 64 bit (draft-eastlake-fnv): the same in every build, which std's hashers do not promise.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_vectors() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_variable_names_a_directory_or_is_none() {
        let named = |text: &str| named_directory(Some(text.into()));
        assert_eq!(named("/run/user/7"), Some("/run/user/7".into()));
        assert_eq!((named(""), named("run"), named_directory(None)), (None, None, None));
    }

    #[test]
    fn a_place_that_somebody_else_took_is_passed_over_for_good() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let [login, shared, home] = ["login", "shared", "home"].map(|name| directory.path().join(name));
        let choose = || {
            Places { login: login.clone(), shared: shared.clone(), home: Some(home.clone()) }
                .choose()
                .expect("a place")
        };
        let open_to_all = |path: &Path| {
            fs::create_dir(path).expect("directory");
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("mode");
        };
        assert_eq!(choose(), shared);
        assert_eq!(choose(), shared, "it is there");
        fs::remove_dir(&shared).expect("remove");
        open_to_all(&shared);
        assert_eq!(choose(), home);
        // What others do at their place changes nothing any more.
        fs::remove_dir(&shared).expect("remove");
        assert_eq!(choose(), home);
        assert!(!shared.exists());
        open_to_all(&login);
        assert_eq!(choose(), home, "anybody may write to that");
        fs::set_permissions(&login, fs::Permissions::from_mode(0o700)).expect("mode");
        assert_eq!(choose(), login.join("cuttlefs"));
        fs::remove_dir_all(&login).expect("remove");
        // The only places left are those that others took.
        fs::remove_dir(&home).expect("remove");
        open_to_all(&shared);
        std::os::unix::fs::symlink(directory.path(), &home).expect("symlink");
        let refused =
            Places { login: login.clone(), shared: shared.clone(), home: Some(home.clone()) }.choose();
        assert!(format!("{:#}", refused.expect_err("not his")).contains("XDG_RUNTIME_DIR"));
        assert!(Places { login, shared, home: None }.choose().is_err());
    }

    #[test]
    fn a_private_file_is_a_file_and_no_link_of_another_user() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let [file, link, pipe] = ["file", "link", "pipe"].map(|name| directory.path().join(name));
        let open = |path: &Path| private(File::options().create(true).append(true), path);
        assert!(open(&file).is_ok());
        std::os::unix::fs::symlink(&file, &link).expect("symlink");
        assert!(open(&link).is_ok(), "an own link");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(&link, Some(65534), None).expect("given away");
            assert!(open(&link).expect_err("not his").to_string().contains("another user"));
        }
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a pipe");
        // Nobody reads from it.
        assert!(open(&pipe).is_err());
    }

    #[test]
    fn sockets_of_killed_processes_are_removed() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let [live, dead, other] = ["a.swap", "b.swap", "c.figures"].map(|name| directory.path().join(name));
        let bind = |path| std::os::unix::net::UnixListener::bind(path).expect("bound");
        let _listener = bind(&live);
        // Their files stay.
        drop([&dead, &other].map(bind));
        remove_left_behind_in(directory.path(), &["swap", "memory"]).expect("looked at");
        assert_eq!([live, dead, other].map(|path| path.exists()), [true, false, true]);
    }

    #[test]
    fn root_of_a_user_namespace_is_told_from_the_machines() {
        assert!(maps_root_to_root("         0          0 4294967295\n"));
        assert!(maps_root_to_root("0 0 1\n"));
        assert!(maps_root_to_root("1000 1000 1\n0 0 1\n"));
        assert!(!maps_root_to_root("         0       1000          1\n"));
        assert!(!maps_root_to_root("0 100000 65536\n"));
        assert!(!maps_root_to_root(""), "nobody is mapped yet");
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let state = RunState {
            mountpoint: dir.path().to_owned(),
            source: "tcp://a:1".to_owned(),
            trust: Trust { key: Some("/etc/key".into()), server_user: Some(7) },
            subtree: b"sub".to_vec(),
            mount: ProcessId { pid: 1, start_ticks: 2 },
            server: None,
            pool: None,
            memory: None,
            lost: None,
            starting: false,
        };
        assert_eq!(RunState::load(dir.path()).expect("load"), None);
        // A file that an older version left there, readable by all, must not stay so.
        let path = file(dir.path(), "json").expect("path");
        fs::write(path.with_extension("new"), b"for all to read").expect("write");
        state.save().expect("save");
        assert_eq!(path.metadata().expect("there").mode() & 0o777, PRIVATE_MODE);
        assert_eq!(RunState::load(dir.path()).expect("load"), Some(state.clone()));
        fs::write(file(dir.path(), "json").expect("path"), b"{").expect("write");
        assert!(RunState::load(dir.path()).expect_err("damaged").to_string().contains("damaged"));
        state.save().expect("save");
        state.forget();
        assert_eq!(RunState::load(dir.path()).expect("load"), None);
    }

    #[test]
    fn a_mount_forgets_itself_and_not_the_next_one_at_its_place() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let before = RunState {
            mountpoint: dir.path().to_owned(),
            source: "tcp://a:1".to_owned(),
            trust: Trust { key: Some("/etc/key".into()), server_user: None },
            subtree: Vec::new(),
            mount: ProcessId { pid: 1, start_ticks: 2 },
            server: None,
            pool: None,
            memory: None,
            lost: None,
            starting: false,
        };
        let after = RunState { mount: ProcessId { pid: 1, start_ticks: 3 }, ..before.clone() };
        before.save().expect("save");
        after.save().expect("save");
        before.forget();
        assert_eq!(RunState::load(dir.path()).expect("load"), Some(after.clone()));
        after.forget();
        assert_eq!(RunState::load(dir.path()).expect("load"), None);
    }
}
