//! `-o`: the options of a mount, by the names people know.

use super::connect::{Trust, VolumeOptions};
use crate::fuse::{FuseSettings, MAX_THREADS};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest time that is accepted: more than a year must be a typing error. No time up to this overflows anything.
const MAX_SECONDS: f64 = 365.0 * 24.0 * 3600.0;
/// Shown by `--help` and with every error.
pub(super) const KNOWN: &str =
    "\x20 attr_cache=S, entry_cache=S   seconds attributes and names are cached (1; fractions work)
  negative_cache=S              seconds a missing name is taken for missing (1)
  cache=none|auto               none: go to the server each time, past the page cache
  locks=cluster|local           local: locks (flock, fcntl) are those of this mount only
  key=FILE                      show this key over tcp:// and rdma://
  server-user=UID               believe this user's server over unix:// and shm://, too
  retry=S                       seconds to wait for a server that is not there (0; from fstab 30)
  subdir=PATH                   mount this directory of the export
  ro, rw                        refuse changes, or not (rw)
  allow_other, noallow_other    let other users in, or not (in for root)
  suid, dev, nosuid, nodev      honour set-id bits, open devices, or not (not)
  allow_suid, allow_dev         suid and dev for mount(8) and fstab, which pass neither on
  exec, noexec, atime, noatime
  max_background=N              requests of readahead and asynchronous IO in flight (64)
  threads=N                     threads that serve the mount (8)
  remount                       change ro, suid, dev, exec or atime of the mount that is there
  nonempty                      mount over a directory that has entries
  default_permissions, relatime, nodiratime, _netdev, nofail, noauto, user, defaults, x-*
                                accepted; `user` means noexec, the rest nothing";

/// Why an option is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// There is no such option.
    #[error("`{0}` is no mount option; known are:\n{KNOWN}")]
    Unknown(String),
    /// The value is not valid.
    #[error("`{option}`: {reason}")]
    Value {
        /// The option as it was given.
        option: String,
        /// How to write a valid value.
        reason: &'static str,
    },
}

/// All options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// The settings of the FUSE edge.
    pub fuse: FuseSettings,
    /// The directory of the export to mount; empty: the whole export.
    pub subtree: String,
    /// Whether to mount over a directory that has entries.
    pub nonempty: bool,
    /// How the right server is recognized.
    pub trust: Trust,
    /// How long to wait for a server that is not there.
    pub retry: Duration,
}

impl MountOptions {
    /// The defaults for root or another user.
    pub fn new(is_root: bool) -> Self {
        // For other users fusermount3 always sets nosuid and nodev, and gives allow_other only by its own configuration.
        let fuse = FuseSettings { allow_other: is_root, ..FuseSettings::default() };
        Self { fuse, subtree: String::new(), nonempty: false, trust: Trust::default(), retry: Duration::ZERO }
    }

    /// Applies comma-separated lists, in order: the last of two that contradict each other counts.
    ///
    /// # Errors
    /// An option is unknown, or its value is not valid.
    pub fn parse(is_root: bool, lists: &[String]) -> Result<Self, OptionError> {
        let mut options = Self::new(is_root);
        let mut uncached = false;
        for option in lists.iter().flat_map(|list| list.split(',')).filter(|option| !option.is_empty()) {
            options.apply(option, &mut uncached)?;
        }
        if uncached {
            options.fuse = options.fuse.without_cache();
        }
        Ok(options)
    }

    fn apply(&mut self, option: &str, uncached: &mut bool) -> Result<(), OptionError> {
        let value_error = |reason| OptionError::Value { option: option.to_owned(), reason };
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let fuse = &mut self.fuse;
        match (name, value) {
            ("attr_cache", Some(value)) => fuse.attr_cache = seconds(value).map_err(value_error)?,
            ("entry_cache", Some(value)) => fuse.entry_cache = seconds(value).map_err(value_error)?,
            ("negative_cache", Some(value)) => fuse.negative_cache = seconds(value).map_err(value_error)?,
            ("cache", Some("none")) => *uncached = true,
            ("cache", Some("auto")) => *uncached = false,
            ("cache", Some(_)) => return Err(value_error("write cache=none or cache=auto")),
            ("locks", Some("cluster")) => fuse.cluster_locks = true,
            ("locks", Some("local")) => fuse.cluster_locks = false,
            ("locks", Some(_)) => return Err(value_error("write locks=cluster or locks=local")),
            ("key", Some("")) => return Err(value_error("write the path of a key file")),
            ("key", Some(value)) => self.trust.key = Some(PathBuf::from(value)),
            ("server-user", Some(value)) => {
                let user = value.parse().ok().filter(|uid| *uid != u32::MAX);
                let user = user.ok_or_else(|| value_error("write the number of a user"))?;
                self.trust.server_user = Some(user);
            }
            ("retry", Some(value)) => self.retry = seconds(value).map_err(value_error)?,
            ("subdir", Some(value)) => self.subtree = subtree(value).map_err(value_error)?,
            ("max_background", Some(value)) => {
                fuse.max_background = value
                    .parse()
                    .ok()
                    .filter(|number| *number > 0)
                    .ok_or_else(|| value_error("write a number from 1 to 65535"))?;
            }
            ("threads", Some(value)) => {
                fuse.threads = value
                    .parse()
                    .ok()
                    .filter(|number| (1..=MAX_THREADS).contains(number))
                    .ok_or_else(|| value_error("write a number from 1 to 61"))?;
            }
            ("ro", None) => fuse.read_only = true,
            ("rw", None) => fuse.read_only = false,
            ("allow_other", None) => fuse.allow_other = true,
            ("noallow_other", None) => fuse.allow_other = false,
            ("suid" | "allow_suid", None) => fuse.suid = true,
            ("nosuid", None) => fuse.suid = false,
            ("dev" | "allow_dev", None) => fuse.dev = true,
            ("nodev", None) => fuse.dev = false,
            ("exec", None) => fuse.exec = true,
            ("noexec", None) => fuse.exec = false,
            ("atime", None) => fuse.no_atime = false,
            ("noatime", None) => fuse.no_atime = true,
            ("nonempty", None) => self.nonempty = true,
            // mount(8) adds these for `user`: users other than root get no more than this.
            ("user" | "users", None) => (fuse.suid, fuse.dev, fuse.exec) = (false, false, false),
            (
                "default_permissions"
                | "relatime"
                | "strictatime"
                | "nodiratime"
                | "diratime"
                | "_netdev"
                | "nofail"
                | "auto"
                | "noauto"
                | "defaults"
                | "nouser"
                | "async",
                None,
            ) => {}
            ("user" | "comment", Some(_)) => {}
            (name, _) if name.starts_with("x-") => {}
            _ => return Err(OptionError::Unknown(option.to_owned())),
        }
        Ok(())
    }

    /// The options for the volume.
    pub fn volume(&self, mountpoint: &Path) -> VolumeOptions {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        VolumeOptions {
            subtree: self.subtree.clone().into_bytes(),
            label: format!("{host}:{}", mountpoint.display()),
            read_only: self.fuse.read_only,
            uncached: self.fuse.uncached,
            threads: self.fuse.threads,
            trust: self.trust.clone(),
        }
    }
}

fn seconds(value: &str) -> Result<Duration, &'static str> {
    let error = "write seconds, such as 1 or 0.5, at most 31536000 (a year)";
    let seconds: f64 = value.parse().map_err(|_| error)?;
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        return Err(error);
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| error)
}

/// A path within the export: without `.`, `..`, doubled or outer slashes.
fn subtree(value: &str) -> Result<String, &'static str> {
    let parts: Vec<&str> = value.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") || value.contains('\0') {
        return Err("write a path below the export's root, without `..`");
    }
    Ok(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<MountOptions, OptionError> {
        MountOptions::parse(true, &[text.to_owned()])
    }

    #[test]
    fn options_as_people_write_them() {
        let options =
            parse("rw,noatime,attr_cache=0.5,entry_cache=2,negative_cache=0,subdir=/a//b/,_netdev,threads=3")
                .expect("valid");
        assert_eq!(options.fuse.attr_cache, Duration::from_millis(500));
        assert_eq!(options.fuse.entry_cache, Duration::from_secs(2));
        assert_eq!(options.fuse.negative_cache, Duration::ZERO);
        assert_eq!((options.subtree.as_str(), options.fuse.threads), ("a/b", 3));
        assert!(options.fuse.no_atime && options.fuse.allow_other && !options.fuse.read_only);
        assert_eq!(parse("key=a,key=/b").expect("valid").trust.key, Some("/b".into()));
        assert_eq!(parse("server-user=65534").expect("valid").trust.server_user, Some(65_534));
        assert_eq!(parse("retry=30,retry=1.5").expect("valid").retry, Duration::from_millis(1500));
        assert_eq!(parse("").expect("empty"), MountOptions::new(true));
        let plain = MountOptions::new(true).fuse;
        assert!(!plain.suid && !plain.dev && plain.exec);
        let asked = parse("suid,dev").expect("valid").fuse;
        assert!(asked.suid && asked.dev);
        assert!(!MountOptions::parse(false, &[]).expect("user").fuse.allow_other);
        assert_eq!(
            parse("defaults,x-systemd.automount,nofail,comment=hi,user=joe").expect("fstab"),
            parse("").expect("empty")
        );
    }

    #[test]
    fn the_last_of_two_counts_and_none_beats_times() {
        assert!(parse("ro,rw,ro").expect("valid").fuse.read_only);
        let none = parse("cache=none,attr_cache=5").expect("valid").fuse;
        assert!(none.uncached && none.attr_cache.is_zero() && none.entry_cache.is_zero());
        assert!(!parse("cache=none,cache=auto").expect("valid").fuse.uncached);
        assert!(parse("").expect("valid").fuse.cluster_locks);
        assert!(!parse("locks=cluster,locks=local").expect("valid").fuse.cluster_locks);
        let lists = ["ro".to_owned(), "rw,suid,nosuid".to_owned()];
        let options = MountOptions::parse(true, &lists).expect("several -o");
        assert!(!options.fuse.read_only && !options.fuse.suid);
        // What mount(8) leaves of `suid,dev`, and the names that it passes on.
        let plain = parse("rw").expect("valid").fuse;
        assert!(!plain.suid && !plain.dev);
        let asked = parse("rw,allow_suid,allow_dev").expect("valid").fuse;
        assert!(asked.suid && asked.dev);
    }

    #[test]
    fn errors_say_what_to_write() {
        let unknown = parse("ro,atr_cache=1").expect_err("unknown").to_string();
        assert!(unknown.contains("`atr_cache=1`") && unknown.contains("attr_cache=S"), "{unknown}");
        for bad in [
            "attr_cache=",
            "attr_cache=-1",
            "attr_cache=nan",
            "entry_cache=1e300",
            "cache=some",
            "early=off",
            "threads=0",
            "threads=65",
            "max_background=65536",
            "subdir=a/../b",
            "ro=1",
            "attr_cache",
            "subdir",
            "retry=",
            "retry",
            "retry=-1",
            "key=",
            "key",
            "server-user=root",
            "server-user=4294967295",
            "server-user",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_options_or_an_error(text in "[a-z_]{0,14}=?[-0-9.a-z/]{0,8}(,[a-z_=0-9./]{0,12}){0,3}") {
            if let Ok(options) = MountOptions::parse(true, &[text]) {
                proptest::prop_assert!((1..=MAX_THREADS).contains(&options.fuse.threads));
                proptest::prop_assert!(!options.subtree.split('/').any(|part| part == ".."));
            }
        }

        #[test]
        fn cache_times_are_kept(tenths in 0u32..100_000) {
            let options = parse(&format!("attr_cache={}", f64::from(tenths) / 10.0)).expect("valid");
            let kept = options.fuse.attr_cache.as_secs_f64() * 10.0;
            proptest::prop_assert!((kept - f64::from(tenths)).abs() < 1e-3);
        }
    }
}
