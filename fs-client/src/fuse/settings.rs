//! What a mount can be told. The names people use for these are in `cli/mount_options.rs`.

use std::time::Duration;

/// Threads that read `/dev/fuse`. Each serves one request at a time and waits for the server with it, so this
/// bounds the requests in flight.
///
/// Measured with the null file system on a busy machine of two cores, random direct 4 KiB reads, best of seven runs
/// in thousands a second at one / four jobs: 1 thread 67 / 96, 2 threads 60 / 117, 4 threads 64 / 84, 8 threads
/// 71 / 104, 16 threads 45 / 86. Up to 8 the difference is noise, so it is as many as cost nothing while they idle.
/// Descriptors of their own (`clone_fd`) made no difference that could be told from noise either.
/// `fixtures/nullfs/measure.sh` measures again.
pub const DEFAULT_THREADS: usize = 8;
/// Most threads that can be asked for: a session has 64 slots, more threads would only wait for one.
pub const MAX_THREADS: usize = cuttlefs_common::rpc::SLOTS_PER_SESSION as usize;
/// Readahead and asynchronous direct requests the kernel keeps in flight. The kernel's 12 and fuser's 16 starve
/// several sequential readers; mountpoint-s3 measured 65 -> 99 Gbit/s from 16 -> 64.
pub const DEFAULT_MAX_BACKGROUND: u16 = 64;
/// How far the kernel reads ahead of a sequential reader: one request of the largest size.
pub const DEFAULT_READAHEAD_BYTES: u32 = cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
/// How long attributes and names may be cached while there are no leases (close-to-open).
pub const DEFAULT_CACHE: Duration = Duration::from_secs(1);

/// Settings of one FUSE mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuseSettings {
    /// How long the kernel may use attributes without asking.
    pub attr_cache: Duration,
    /// How long the kernel may use a name without asking.
    pub entry_cache: Duration,
    /// How long the kernel may take a name for missing without asking.
    pub negative_cache: Duration,
    /// Open every file past the page cache, and cache nothing (`cache=none`).
    pub uncached: bool,
    /// Refuse changes in the kernel already.
    pub read_only: bool,
    /// Let users other than the one who mounted in.
    pub allow_other: bool,
    /// Honour set-user-id and set-group-id bits.
    pub suid: bool,
    /// Let device nodes be opened.
    pub dev: bool,
    /// Let files be executed.
    pub exec: bool,
    /// Do not keep access times.
    pub no_atime: bool,
    /// Background requests in flight.
    pub max_background: u16,
    /// Threads reading `/dev/fuse`.
    pub threads: usize,
    /// Give each thread its own `/dev/fuse` descriptor.
    pub clone_fd: bool,
    /// Bytes the kernel reads ahead.
    pub readahead_bytes: u32,
}

impl Default for FuseSettings {
    /// Those of root. Other users get `nosuid,nodev` and no `allow_other` from `fusermount3`.
    fn default() -> Self {
        Self {
            attr_cache: DEFAULT_CACHE,
            entry_cache: DEFAULT_CACHE,
            negative_cache: DEFAULT_CACHE,
            uncached: false,
            read_only: false,
            allow_other: true,
            suid: true,
            dev: true,
            exec: true,
            no_atime: false,
            max_background: DEFAULT_MAX_BACKGROUND,
            threads: DEFAULT_THREADS,
            clone_fd: true,
            readahead_bytes: DEFAULT_READAHEAD_BYTES,
        }
    }
}

impl FuseSettings {
    /// The settings as `cache=none` changes them.
    pub fn without_cache(mut self) -> Self {
        self.attr_cache = Duration::ZERO;
        self.entry_cache = Duration::ZERO;
        self.negative_cache = Duration::ZERO;
        self.uncached = true;
        self
    }
}
