//! What to do when the system or an RNIC refuses something: one text for each cause that a user can mend.
//!
//! The libraries' errors are an errno and no more. What is behind it is looked up when the error is there: whether there is a device, whether this
//! process may open its files, whether libibverbs has a driver for it, how much memory the process has pinned and may pin.

use crate::rdma::verbs::RdmaError;
use crate::size::ByteSize;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// What to do when nobody answers.
pub(super) const NO_ANSWER: &str =
    "look whether the server runs, and whether firewalls let RDMA through (RoCE v2: UDP port 4791)";

/// The action that failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// To find the device of an endpoint.
    Find,
    /// To make an object of the RNIC, for which it pins some memory.
    Make,
    /// To register so many bytes.
    Register(u64),
    /// To reach a server.
    Connect,
}

/// The facts of this machine and this process that tell causes apart.
#[derive(Debug, Default)]
struct Facts {
    has_device: bool,
    /// The first file of RDMA that is not there, or that this process may not open.
    file: Option<(PathBuf, ErrorKind)>,
    /// libibverbs has a list of drivers.
    has_drivers: bool,
    /// Ports that are not active, for people.
    down: Vec<String>,
    /// What this process has pinned, and may pin if that is bounded.
    pinned: u64,
    bound: Option<u64>,
}

impl Facts {
    fn of_this_machine() -> Self {
        let bound = super::port::pinned_bound();
        Self { bound, ..Self::below(Path::new("/")) }
    }

    /// The facts that are files below a root.
    fn below(root: &Path) -> Self {
        let names = |folder: &str| {
            let entries = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
            let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
            names.sort();
            names
        };
        // sysfs names the files that there should be; in a container they may be missing.
        let verbs = names("sys/class/infiniband_verbs").into_iter();
        let verbs = verbs.filter(|name| name.to_string_lossy().starts_with("uverbs"));
        let files = std::iter::once("rdma_cm".into())
            .chain(verbs)
            .map(|name| Path::new("/dev/infiniband").join(name));
        let closed = |file: PathBuf| {
            let below = root.join(file.strip_prefix("/").unwrap_or(&file));
            let error = File::options().read(true).write(true).open(below).err()?;
            Some((file, error.kind()))
        };
        let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
        let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:")?.trim().strip_suffix("kB"));
        Self {
            has_device: !names("sys/class/infiniband").is_empty(),
            file: files.into_iter().find_map(closed),
            down: down_ports(&root.join("sys/class/infiniband")),
            has_drivers: names("etc/libibverbs.d")
                .iter()
                .any(|name| name.to_string_lossy().ends_with(".driver")),
            pinned: pinned.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(0, |kib| kib << 10),
            bound: None,
        }
    }

    /// What to do about an error; empty: nothing is known. Behind an address for which no device is found there may be one whose port is down: its
    /// interface has no route then.
    fn advice(&self, task: Task, error: &io::Error) -> String {
        let advice = self.advice_on(task, error);
        let is_found = error.kind() == ErrorKind::AddrInUse;
        if !matches!(task, Task::Find) || is_found || self.down.is_empty() || self.file.is_some() {
            return advice;
        }
        let down = format!(
            "{} not active: if that is the one, look at the cable and `ip link`",
            self.down.join(", ")
        );
        if advice.is_empty() { down } else { format!("{advice}; {down}") }
    }

    fn advice_on(&self, task: Task, error: &io::Error) -> String {
        let refused = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
        match (task, error.kind(), error.raw_os_error()) {
            (_, _, Some(libc::EMFILE | libc::ENFILE)) => "raise the limit of open files (ulimit -n, LimitNOFILE=)".to_owned(),
            (Task::Make | Task::Register(_), _, Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM)) => self.memory(task),
            (Task::Register(_), _, Some(libc::EOPNOTSUPP | libc::EFAULT | libc::EINVAL)) => {
                "an RNIC cannot have this memory; files of disks cannot be registered (docs/rdma.md, \"Memory that an RNIC can have\")".to_owned()
            }
            (Task::Find, _, _) if !self.has_device => "this machine has no RDMA device (`rdma link` lists them; \
                `rdma link add rxe0 type rxe netdev ETH` makes a software one)"
                .to_owned(),
            (Task::Find, ErrorKind::AddrInUse, _) => {
                "another program listens there; stop it, or take another port".to_owned()
            }
            (Task::Find | Task::Connect, ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable, _) => {
                "there is no way to that address: `ip route get ADDRESS` and `ping ADDRESS` say why".to_owned()
            }
            (Task::Find, ErrorKind::TimedOut, _) => {
                "nobody has that address: `ping ADDRESS` says whether the machine is there".to_owned()
            }
            (Task::Connect, _, Some(libc::ENODEV)) => {
                "the address must be one of an RNIC of the server, also on its own machine; 127.0.0.1 and `localhost` are none (`rdma link` and \
                 `ip addr` list them)"
                    .to_owned()
            }
            (Task::Connect, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset, _) => {
                "no server listens at that address and port".to_owned()
            }
            (Task::Connect, ErrorKind::TimedOut, _) => {
                NO_ANSWER.to_owned()
            }
            (Task::Find | Task::Make, _, _) if self.file.is_some() => self.closed_file(),
            (Task::Find, _, Some(libc::ENODEV)) if !self.has_drivers => {
                "libibverbs has no driver for the device; install ibverbs-providers and rdma-core".to_owned()
            }
            (Task::Find, ErrorKind::AddrNotAvailable, _) | (Task::Find, _, Some(libc::ENODEV)) => {
                "the address must be one of an interface with an RDMA device (`rdma link` and `ip addr` list them); if it is, `ibv_devices` must \
                 list the device, too (packages ibverbs-providers and rdma-core)"
                    .to_owned()
            }
            _ if refused => "this user may not do that; `ls -l /dev/infiniband` shows who may".to_owned(),
            _ => String::new(),
        }
    }

    /// The limit of pinned memory: the usual reason why it is refused.
    fn memory(&self, task: Task) -> String {
        let Some(bound) = self.bound else {
            return "the machine or the RNIC has no more to give; `dmesg` may say of what".to_owned();
        };
        let asked = match task {
            Task::Register(bytes) => format!(", this asks for {} more", ByteSize(bytes)),
            _ => String::new(),
        };
        format!(
            "the limit of pinned memory is {}; {} are pinned{asked}. Raise it (ulimit -l, LimitMEMLOCK= of a service), or give a mount fewer threads \
             (-o threads=N), a server less --memory, which counts once for each worker thread, too: docs/rdma.md has the sums",
            ByteSize(bound),
            ByteSize(self.pinned),
        )
    }

    fn closed_file(&self) -> String {
        let Some((file, why)) = &self.file else { return String::new() };
        let name = file.display();
        if *why == ErrorKind::NotFound {
            let module = if file.ends_with("rdma_cm") { "rdma_ucm" } else { "ib_uverbs" };
            return format!(
                "{name} is missing: `modprobe {module}`; give a container the host's (--device /dev/infiniband)"
            );
        }
        format!(
            "this user may not open {name} (`ls -l` shows its group and mode): join that group, or let a udev rule open it: \
             SUBSYSTEM==\"infiniband_verbs\", GROUP=\"rdma\", MODE=\"0660\", and the same for KERNEL==\"rdma_cm\""
        )
    }
}

/// The ports below a folder as `/sys/class/infiniband` that are not active.
fn down_ports(class: &Path) -> Vec<String> {
    let entries = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    let mut down = Vec::new();
    for device in entries(class) {
        let ports = class.join(&device).join("ports");
        for port in entries(&ports) {
            let state = fs::read_to_string(ports.join(&port).join("state")).unwrap_or_default();
            if !state.is_empty() && !state.contains("ACTIVE") {
                down.push(format!("port {port} of {device} is"));
            }
        }
    }
    down
}

/// An error with the advice behind it. Its kind stays. An error that is this program's own has its advice already.
fn advised(task: Task, error: io::Error) -> io::Error {
    if error.get_ref().is_some() {
        return error;
    }
    // A mount that connects again and again opens no files for it.
    let facts = match task {
        Task::Connect => Facts::default(),
        Task::Find | Task::Make | Task::Register(_) => Facts::of_this_machine(),
    };
    with(facts.advice(task, &error), error)
}

fn with(advice: String, error: io::Error) -> io::Error {
    if advice.is_empty() { error } else { io::Error::new(error.kind(), format!("{error}; {advice}")) }
}

/// The error of an action on `what`, with advice.
pub(super) fn failed(task: Task, action: &'static str, what: String, error: io::Error) -> RdmaError {
    RdmaError::Io { action, endpoint: what, source: advised(task, error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn put(root: &Path, file: &str, text: &str) -> PathBuf {
        let file = root.join(file);
        fs::create_dir_all(file.parent().expect("a folder")).expect("folder");
        fs::write(&file, text).expect("file");
        file
    }

    #[test]
    fn each_error_says_what_to_do() {
        let device = || Facts { has_device: true, has_drivers: true, ..Facts::default() };
        let bounded = Facts { pinned: 64 << 20, bound: Some(96 << 20), ..device() };
        let down = || Facts { down: vec!["port 1 of rxe0 is".to_owned()], ..device() };
        let closed = |why| Facts { file: Some(("/dev/infiniband/uverbs0".into(), why)), ..device() };
        for (facts, task, errno, words) in [
            (Facts::default(), Task::Find, libc::ENODEV, "no RDMA device"),
            (device(), Task::Find, libc::ENODEV, "interface with an RDMA device"),
            (device(), Task::Find, libc::EADDRNOTAVAIL, "interface with an RDMA device"),
            (Facts { has_drivers: false, ..device() }, Task::Find, libc::ENODEV, "install ibverbs-providers"),
            (
                closed(ErrorKind::PermissionDenied),
                Task::Find,
                libc::ENODEV,
                "may not open /dev/infiniband/uverbs0",
            ),
            (closed(ErrorKind::PermissionDenied), Task::Make, libc::EACCES, "GROUP=\"rdma\""),
            (closed(ErrorKind::NotFound), Task::Find, libc::ENOENT, "modprobe ib_uverbs"),
            (device(), Task::Find, libc::ETIMEDOUT, "ping"),
            (device(), Task::Find, libc::ENETUNREACH, "ip route get"),
            (device(), Task::Find, libc::EMFILE, "ulimit -n"),
            (device(), Task::Find, libc::EADDRINUSE, "another port"),
            (device(), Task::Connect, libc::ECONNREFUSED, "no server listens"),
            (device(), Task::Connect, libc::ETIMEDOUT, "4791"),
            (device(), Task::Connect, libc::EPERM, "ls -l /dev/infiniband"),
            (device(), Task::Connect, libc::ENODEV, "one of an RNIC of the server"),
            (down(), Task::Find, libc::ENETUNREACH, "port 1 of rxe0 is not active: if that is the one"),
            (down(), Task::Find, libc::ENETUNREACH, "ip route get"),
            (down(), Task::Find, libc::EINVAL, "port 1 of rxe0 is not active"),
            (device(), Task::Make, libc::ENOMEM, "dmesg"),
            (device(), Task::Register(1), libc::EFAULT, "files of disks"),
        ] {
            let advice = facts.advice(task, &io::Error::from_raw_os_error(errno));
            assert!(advice.contains(words), "{facts:?} {task:?} {errno}: {advice}");
        }
        for errno in [libc::ENOMEM, libc::EPERM] {
            let advice = bounded.advice(Task::Register(24 << 20), &io::Error::from_raw_os_error(errno));
            for words in ["is 96M", "64M are pinned, this asks for 24M", "--memory", "threads=N", "ulimit -l"]
            {
                assert!(advice.contains(words), "{advice}");
            }
            assert!(bounded.advice(Task::Make, &io::Error::from_raw_os_error(errno)).contains("ulimit -l"));
        }
        assert_eq!(device().advice(Task::Connect, &io::Error::other("?")), "");
    }

    #[test]
    fn an_error_keeps_its_kind_and_its_words() {
        let error = with("do this".to_owned(), io::Error::from_raw_os_error(libc::ETIMEDOUT));
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let text = error.to_string();
        assert!(text.contains("timed out") && text.ends_with("; do this"), "{text}");
        let own = io::Error::new(ErrorKind::TimedOut, "late; look there");
        assert_eq!(advised(Task::Connect, own).to_string(), "late; look there");
        let plain = with(String::new(), io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(plain.raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn facts_are_read_from_files() {
        let root = tempfile::tempdir().expect("folder");
        let bare = Facts::below(root.path());
        assert!(!bare.has_device && !bare.has_drivers);
        assert_eq!(bare.file, Some(("/dev/infiniband/rdma_cm".into(), ErrorKind::NotFound)));
        put(root.path(), "sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
        put(root.path(), "sys/class/infiniband/rxe1/ports/1/state", "1: DOWN\n");
        put(root.path(), "sys/class/infiniband_verbs/uverbs0", "");
        put(root.path(), "sys/class/infiniband_verbs/abi_version", "");
        put(root.path(), "etc/libibverbs.d/rxe.driver", "");
        put(root.path(), "proc/self/status", "VmLck:\t 0 kB\nVmPin:\t   65536 kB\n");
        put(root.path(), "dev/infiniband/rdma_cm", "");
        let verbs = put(root.path(), "dev/infiniband/uverbs0", "");
        let open = Facts::below(root.path());
        assert!(open.has_device && open.has_drivers && open.file.is_none());
        assert_eq!((open.pinned, open.down), (64 << 20, vec!["port 1 of rxe1 is".to_owned()]));
        fs::set_permissions(&verbs, fs::Permissions::from_mode(0o000)).expect("mode");
        // Root may open it all the same.
        if let Some((file, why)) = Facts::below(root.path()).file {
            assert_eq!((file, why), ("/dev/infiniband/uverbs0".into(), ErrorKind::PermissionDenied));
        }
    }
}
