//! The kernel's file by which a FUSE connection is ended, whoever serves it: `abort`, in the file system `fusectl`. It belongs to the user who has mounted.
//!
//! An open file means its connection for ever: when that has ended, writing has no effect, also if another connection has got its number.

use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io::{ErrorKind, Write};

/// Where `fusectl` is mounted, on most machines.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Opens the file of the connection behind a mount's device, `major:minor`. `None`: the connection has ended.
pub(super) fn abort_file(device: &str) -> anyhow::Result<Option<File>> {
    // The kernel names the connection by the minor number.
    let name = format!("{}/abort", device.rsplit(':').next().unwrap_or(device));
    let path = format!("{CONNECTIONS}/{name}");
    let opened = match File::options().write(true).open(&path) {
        // Containers often lack the file system, or have it read-only. If it was there, the connection has ended.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ReadOnlyFilesystem) => {
            open_apart(&name).with_context(|| {
                format!("cannot open {path}; let root mount it with: mount -t fusectl fusectl {CONNECTIONS}")
            })?
        }
        opened => opened,
    };
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot open {path}")),
    }
}

/// Opens a file of `fusectl` by a mount of it that is nowhere in the tree. That needs root.
fn open_apart(name: &str) -> std::io::Result<std::io::Result<File>> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let opened = rustix::fs::openat(&root, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    Ok(opened.map(File::from).map_err(Into::into))
}

/// Ends the connection: requests that wait in it fail, and so do all later ones.
pub(super) fn abort(mut file: impl Write) -> std::io::Result<()> {
    file.write_all(b"1")?;
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither way knows it. Without root the second one is an error.
    #[test]
    fn a_connection_that_has_ended_is_none() {
        match open_apart("4294967295/abort") {
            Ok(opened) => {
                assert_eq!(opened.expect_err("no such number").kind(), ErrorKind::NotFound);
                assert!(abort_file("0:4294967295").expect("looked").is_none());
            }
            Err(error) => eprintln!("NOT TESTED: {error}"),
        }
    }
}
