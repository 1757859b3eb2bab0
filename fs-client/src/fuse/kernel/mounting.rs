//! Mounts: by mount(2), or by `fusermount3` for users who may not call it.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::ffi::CString;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// The program that mounts for users other than root.
const FUSERMOUNT: &str = "fusermount3";
/// The variable that tells `fusermount3` over which descriptor to send the device.
const FUSERMOUNT_SOCKET: &str = "_FUSE_COMMFD";

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct MountOptions {
    /// The device that `/proc/mounts` shows.
    pub source: String,
    /// The part after `fuse.` in the type.
    pub subtype: String,
    pub read_only: bool,
    pub suid: bool,
    pub dev: bool,
    pub exec: bool,
    pub no_atime: bool,
    pub allow_other: bool,
    /// The largest READ in bytes.
    pub max_read: u32,
}

impl MountOptions {
    /// The options for FUSE itself.
    fn own(&self) -> Vec<String> {
        let mut own = vec!["default_permissions".to_owned(), format!("max_read={}", self.max_read)];
        if self.allow_other {
            own.push("allow_other".to_owned());
        }
        own.push(format!("subtype={}", self.subtype));
        own
    }

    fn flags(&self) -> MountFlags {
        let set = |on: bool, flag| if on { flag } else { MountFlags::empty() };
        set(self.read_only, MountFlags::RDONLY)
            | set(!self.suid, MountFlags::NOSUID)
            | set(!self.dev, MountFlags::NODEV)
            | set(!self.exec, MountFlags::NOEXEC)
            | set(self.no_atime, MountFlags::NOATIME)
    }

    /// All options, as words for `fusermount3`.
    fn words(&self) -> String {
        let either = |on: bool, yes: &str, no: &str| if on { yes.to_owned() } else { no.to_owned() };
        let mut words = vec![
            either(self.read_only, "ro", "rw"),
            either(self.suid, "suid", "nosuid"),
            either(self.dev, "dev", "nodev"),
            either(self.exec, "exec", "noexec"),
        ];
        if self.no_atime {
            words.push("noatime".to_owned());
        }
        // A comma would end the option.
        words.push(format!("fsname={}", self.source.replace(',', "_")));
        words.extend(self.own());
        words.join(",")
    }
}

/// Mounts, and returns the session's device.
///
/// # Errors
/// The mount point or FUSE cannot be used.
pub(super) fn mount(mountpoint: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let mountpoint = mountpoint.canonicalize()?;
    match mount_directly(&mountpoint, options) {
        Err(Errno::PERM | Errno::ACCESS) => mount_by_helper(&mountpoint, options),
        result => Ok(result?),
    }
}

fn mount_directly(mountpoint: &Path, options: &MountOptions) -> Result<OwnedFd, Errno> {
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let root_mode = std::fs::metadata(mountpoint).map_err(errno)?.mode();
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={}",
        device.as_raw_fd(),
        root_mode & libc::S_IFMT,
        user.as_raw(),
        group.as_raw()
    );
    for own in options.own() {
        data.push(',');
        data.push_str(&own);
    }
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(options.source.as_str(), mountpoint, "fuse", options.flags(), data.as_c_str())?;
    Ok(device)
}

/// Unmounts a mount that nobody will serve.
pub fn unmount(mountpoint: &Path) {
    if let Err(Errno::PERM) = rustix::mount::unmount(mountpoint, UnmountFlags::DETACH) {
        // If this fails, too, nothing else can be tried.
        let _ = Command::new(FUSERMOUNT).args(["-u", "-q", "-z", "--"]).arg(mountpoint).status();
    }
}

fn mount_by_helper(mountpoint: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let (ours, helpers) = UnixStream::pair()?;
    // The helper must inherit this end.
    fcntl_setfd(&helpers, FdFlags::empty())?;
    let mut helper = Command::new(FUSERMOUNT)
        .args(["-o", &options.words(), "--"])
        .arg(mountpoint)
        .env(FUSERMOUNT_SOCKET, helpers.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("cannot run {FUSERMOUNT}: {error}")))?;
    drop(helpers);
    let device = receive_device(&ours);
    let mut said = String::new();
    if let Some(mut stderr) = helper.stderr.take() {
        // The helper's messages are needed only if it failed.
        let _ = stderr.read_to_string(&mut said);
    }
    helper.wait()?;
    match device {
        Ok(Some(device)) => {
            fcntl_setfd(&device, FdFlags::CLOEXEC)?;
            Ok(device)
        }
        Ok(None) => Err(io::Error::new(io::ErrorKind::PermissionDenied, said.trim().to_owned())),
        Err(error) => Err(error.into()),
    }
}

/// Receives a descriptor over a socket. `None`: the other end was closed.
fn receive_device(socket: &UnixStream) -> Result<Option<OwnedFd>, Errno> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(descriptors.flatten().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> MountOptions {
        MountOptions {
            source: "tcp://a,b:1".to_owned(),
            subtype: "cuttlefs".to_owned(),
            read_only: false,
            suid: false,
            dev: false,
            exec: true,
            no_atime: true,
            allow_other: true,
            max_read: 4096,
        }
    }

    #[test]
    fn options_are_said_in_both_ways() {
        let options = options();
        assert_eq!(options.flags(), MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME);
        assert_eq!(
            options.words(),
            "rw,nosuid,nodev,exec,noatime,fsname=tcp://a_b:1,default_permissions,max_read=4096,allow_other,\
             subtype=cuttlefs"
        );
    }

    #[test]
    fn a_helper_that_ends_without_a_device_is_noticed() {
        let (ours, helpers) = UnixStream::pair().expect("sockets");
        drop(helpers);
        assert!(matches!(receive_device(&ours), Ok(None)));
    }
}
