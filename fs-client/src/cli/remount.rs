//! `mount -o remount,...`: changes the kernel's flags of a live mount.
//!
//! Only flags that the kernel itself enforces can change: `ro`, `suid`, `dev`, `exec`, `atime` and their opposites. The
//! options of the serving process (cache times, threads, the subtree) are fixed until the next mount; mount(8) passes
//! those along from `/etc/fstab`, so they are named in a note and are no error. Nothing here talks to the server or
//! looks into the mount.

use super::mount_options::MountOptions;
use crate::fuse::{FuseSettings, MountTable};
use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};
use std::path::Path;

/// The option that asks for a remount.
const REMOUNT: &str = "remount";
/// Options that the kernel shows for every FUSE mount and that mount(8) passes back. None of them can change.
const SHOWN_BY_KERNEL: [&str; 7] =
    ["fd", "rootmode", "user_id", "group_id", "max_read", "blksize", "subtype"];

/// Whether these options ask for a remount.
pub(super) fn is_wanted(lists: &[String]) -> bool {
    words(lists).any(|option| option == REMOUNT)
}

fn words(lists: &[String]) -> impl Iterator<Item = &str> {
    lists.iter().flat_map(|list| list.split(','))
}

/// Remounts with the mount's present flags, as these options change them.
pub(super) fn run(path: &Path, lists: &[String]) -> anyhow::Result<()> {
    let table = MountTable::read()?;
    let mountpoint = table.resolve(path).with_context(|| format!("there is no {}", path.display()))?;
    let Some(entry) = table.at(&mountpoint).filter(|entry| entry.is_cuttlefs()) else {
        bail!(
            "cuttlefs is not mounted at {}; mount it first, without the option `remount`",
            mountpoint.display()
        );
    };
    let wanted = Remount::parse(&entry.options, lists)?;
    if !wanted.fixed.is_empty() {
        cuttlefs_common::tell!(
            "not changed by a remount: {}; for that: cuttlefs umount {}, and mount it again",
            wanted.fixed.join(","),
            mountpoint.display()
        );
    }
    match mount_remount(&mountpoint, wanted.flags, c"") {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => {
            bail!("{} has files open for writing; close them and try again", mountpoint.display())
        }
        Err(Errno::PERM) => bail!("only root can remount {}", mountpoint.display()),
        Err(error) => Err(error).with_context(|| format!("cannot remount {}", mountpoint.display())),
    }
}

/// A remount, as its options ask for it.
#[derive(Debug, PartialEq, Eq)]
struct Remount {
    flags: MountFlags,
    /// Options that were given and cannot change.
    fixed: Vec<String>,
}

impl Remount {
    /// `current`: the kernel's options of the mount, as in mountinfo.
    fn parse(current: &str, lists: &[String]) -> anyhow::Result<Self> {
        let ours = |option: &&str| {
            let name = option.split_once('=').map_or(*option, |(name, _)| name);
            name != REMOUNT && !SHOWN_BY_KERNEL.contains(&name)
        };
        let given: Vec<&str> = words(lists).filter(ours).collect();
        // The present options come first, so that the given ones count. The kernel shows `nosuid` and `nodev`, and does not show `suid` and `dev`.
        let all = ["suid,dev".to_owned(), current.to_owned(), given.join(",")];
        let flags = flags_of(&MountOptions::parse(true, &all)?.fuse);
        // An option is fixed if it changes anything but flags.
        let plain = MountOptions::new(true);
        let mut fixed = Vec::new();
        for option in given {
            let alone = MountOptions::parse(true, &[option.to_owned()])?;
            let flagless = FuseSettings {
                read_only: plain.fuse.read_only,
                suid: plain.fuse.suid,
                dev: plain.fuse.dev,
                exec: plain.fuse.exec,
                no_atime: plain.fuse.no_atime,
                ..alone.fuse.clone()
            };
            // `retry` has no meaning here: a remount waits for no server.
            if (MountOptions { fuse: flagless, retry: plain.retry, ..alone }) != plain {
                fixed.push(option.to_owned());
            }
        }
        Ok(Self { flags, fixed })
    }
}

fn flags_of(fuse: &FuseSettings) -> MountFlags {
    [
        (fuse.read_only, MountFlags::RDONLY),
        (!fuse.suid, MountFlags::NOSUID),
        (!fuse.dev, MountFlags::NODEV),
        (!fuse.exec, MountFlags::NOEXEC),
        (fuse.no_atime, MountFlags::NOATIME),
    ]
    .into_iter()
    .filter_map(|(on, flag)| on.then_some(flag))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(current: &str, given: &str) -> Remount {
        Remount::parse(current, &[given.to_owned()]).expect("valid")
    }

    #[test]
    fn flags_stay_unless_told_otherwise() {
        assert!(is_wanted(&["rw".to_owned(), "noatime,remount,ro".to_owned()]));
        assert!(!is_wanted(&["ro".to_owned()]));
        let ro = parse("rw,nosuid,relatime", "remount,ro");
        assert_eq!(ro.flags, MountFlags::RDONLY | MountFlags::NOSUID);
        assert_eq!(parse("ro,nosuid,relatime", "remount,rw").flags, MountFlags::NOSUID);
        assert_eq!(parse("ro,noexec", "remount,suid,exec").flags, MountFlags::RDONLY);
        assert_eq!(
            parse("rw,relatime", "remount,ro").flags,
            MountFlags::RDONLY,
            "what it grants it goes on granting"
        );
        assert_eq!(ro.fixed, Vec::<String>::new());
    }

    #[test]
    fn what_cannot_change_is_named() {
        let from_kernel = "rw,user_id=0,group_id=0,default_permissions,allow_other,remount,ro";
        assert_eq!(parse("rw", from_kernel).fixed, Vec::<String>::new());
        let from_fstab = "remount,attr_cache=5,_netdev,nofail,retry=9,subdir=a,cache=none,ro";
        let wanted = parse("rw", from_fstab);
        assert_eq!(wanted.fixed, ["attr_cache=5", "subdir=a", "cache=none"]);
        assert_eq!(wanted.flags, MountFlags::RDONLY);
        assert!(Remount::parse("rw", &["remount,bogus".to_owned()]).is_err());
    }
}
