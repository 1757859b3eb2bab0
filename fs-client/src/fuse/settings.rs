//! The settings of a mount. `cli/mount_options.rs` has their names as mount options.

use std::time::Duration;

/// The number of threads that read `/dev/fuse`. Each serves one request at a time and waits for the server with it, so this bounds the requests in
/// flight.
///
/// Measured over `shm` on two cores, MiB/s of one and four sequential readers and thousands of direct 4 KiB reads a second
/// with 32 in flight: 2 threads 2,741 / 3,614 / 356, 4 threads 2,840 / 3,546 / 344, 8 threads 2,764 / 3,541 / 315, 16
/// threads 2,676 / 3,410 / 289 (`scripts/measure-mount.sh`). Fewer are a little faster on data in memory; but each waits
/// with its request for the server's disk, and eight keep a disk busy that two would leave idle.
pub const DEFAULT_THREADS: usize = 8;
/// The most threads that can be set: more would wait for a lane.
pub const MAX_THREADS: usize = crate::session::MAX_CALLER_LANES;
/// The number of readahead and asynchronous direct requests that the kernel keeps in flight. Thousands of direct 4 KiB reads per second over `shm`,
/// with 32 in flight: 12 (the kernel's default) 273, 64 333, 256 332 (`scripts/measure-mount.sh`, two cores).
pub const DEFAULT_MAX_BACKGROUND: u16 = 64;
/// How far the kernel reads ahead of a sequential reader: one request of the largest size. One reader of cold files over
/// `shm`, MiB/s: 128 KiB 2,249, 1 MiB 2,794, 4 MiB 3,042, but more than a request only takes memory from others
/// (`scripts/measure-mount.sh`).
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
    /// Whether every file is opened past the page cache, and nothing is cached (`cache=none`).
    pub uncached: bool,
    /// Whether locks hold between mounts; otherwise the kernel keeps them for this mount (`locks=local`).
    pub cluster_locks: bool,
    /// Whether the kernel refuses all changes.
    pub read_only: bool,
    /// Whether users other than the one who mounted may use the mount.
    pub allow_other: bool,
    /// Whether set-user-id and set-group-id bits count.
    pub suid: bool,
    /// Whether device nodes can be opened.
    pub dev: bool,
    /// Whether files can be executed.
    pub exec: bool,
    /// Whether access times are not kept.
    pub no_atime: bool,
    /// The number of background requests in flight.
    pub max_background: u16,
    /// The number of threads that read `/dev/fuse`.
    pub threads: usize,
    /// The number of bytes that the kernel reads ahead.
    pub readahead_bytes: u32,
}

impl Default for FuseSettings {
    /// The settings for mounts of root. `fusermount3` does not give `allow_other` to other users.
    ///
    /// Set-id bits and devices count only if the options ask for them: otherwise everybody who may write to the server would be root here.
    fn default() -> Self {
        Self {
            attr_cache: DEFAULT_CACHE,
            entry_cache: DEFAULT_CACHE,
            negative_cache: DEFAULT_CACHE,
            uncached: false,
            cluster_locks: true,
            read_only: false,
            allow_other: true,
            suid: false,
            dev: false,
            exec: true,
            no_atime: false,
            max_background: DEFAULT_MAX_BACKGROUND,
            threads: DEFAULT_THREADS,
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
