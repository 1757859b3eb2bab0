//! A scratch pool: a directory, one data file or device, one big file in it. Removed at the end, also after an error.
//!
//! The pool is formatted and filled once and then served again and again, by servers with other flags.

use super::content;
use super::interrupt;
use super::policy::Policy;
use super::server::{RegionServer, ServerOptions};
use crate::bench::link::Link;
use crate::cli::server_binary;
use crate::file::volume::{OpenHow, Volume};
use anyhow::{Context as _, bail, ensure};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use cuttlefs_common::size::ByteSize;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Pool space beyond the file: a pool that is full to the last page would measure how space is found.
const MARGIN_BYTES: u64 = 64 << 20;
/// Name of the file that is measured.
pub(super) const FILE_NAME: &str = "region";
/// Memory of the server that fills the pool. What is filled goes to disk anyway.
const FILL_MEMORY_BYTES: u64 = 256 << 20;

/// A pool in a directory of our own.
#[derive(Debug)]
pub(super) struct ScratchPool {
    directory: PathBuf,
    /// Where the pages are.
    data: PathBuf,
    /// Bytes of the file that is measured.
    file_bytes: u64,
    /// The data path is a device, which stays; a file is removed.
    is_device: bool,
}

impl ScratchPool {
    /// Formats a pool below `parent`, for a file of `wanted_bytes`; on `data` if given, which must not be in use.
    ///
    /// # Errors
    /// If there is too little space, or `cuttlefsd format` says so.
    pub(super) fn format(parent: &Path, data: Option<&Path>, wanted_bytes: u64) -> anyhow::Result<Self> {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let device_bytes = data.map(device_bytes).transpose()?.flatten();
        let file_bytes = match device_bytes {
            Some(bytes) => wanted_bytes.min(bytes.saturating_sub(2 * MARGIN_BYTES)),
            None => wanted_bytes,
        } / PAGE_SIZE_U64
            * PAGE_SIZE_U64;
        ensure!(file_bytes > 0, "--size {} is too little for a pool", ByteSize(wanted_bytes));
        if device_bytes.is_none() {
            let beside =
                data.and_then(Path::parent).filter(|path| !path.as_os_str().is_empty()).unwrap_or(parent);
            let space = rustix::fs::statvfs(beside)
                .with_context(|| format!("cannot ask {} for its space", beside.display()))?;
            let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
            ensure!(
                free_bytes >= file_bytes + 2 * MARGIN_BYTES,
                "{} has {} free and the benchmark needs {}; use a smaller --size, or --scratch elsewhere",
                beside.display(),
                ByteSize(free_bytes),
                ByteSize(file_bytes + 2 * MARGIN_BYTES)
            );
            if let Some(data) = data {
                ensure!(
                    !data.exists(),
                    "{} exists; name a file that can be made and removed",
                    data.display()
                );
            }
        }
        let directory = parent.join(format!("cuttlefs-bench.{}", std::process::id()));
        std::fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let directory =
            directory.canonicalize().with_context(|| format!("cannot resolve {}", directory.display()))?;
        let pool = Self {
            data: data.map_or_else(|| directory.join("data"), Path::to_owned),
            directory,
            file_bytes,
            is_device: device_bytes.is_some(),
        };
        let mut command = Command::new(server_binary()?);
        command.arg("format").arg("--pool").arg(&pool.directory);
        if let Some(data) = data {
            command.arg("--data").arg(data);
        }
        if pool.is_device {
            // Its help says that all on it is lost; a benchmark before this one left a pool there.
            command.arg("--force");
        } else {
            command.args(["--size", &(file_bytes + MARGIN_BYTES).to_string()]);
        }
        let output = command.stdin(Stdio::null()).output().context("cannot run cuttlefsd format")?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            bail!("cannot make a pool in {}: {}", pool.directory.display(), text.trim_end());
        }
        Ok(pool)
    }

    /// Writes the file, through a server of its own that has written everything back when this returns.
    ///
    /// # Errors
    /// If the server fails, or on Ctrl-C.
    pub(super) fn fill(&self) -> anyhow::Result<()> {
        self.with_filler(|volume| fill_file(volume, FILE_NAME, self.file_bytes))
    }

    /// Runs `work` with a server that serves the pool as cuttlefs does, to put data there.
    ///
    /// # Errors
    /// What `work` says, or the server.
    pub(super) fn with_filler(
        &self,
        work: impl FnOnce(&dyn Volume) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let options = ServerOptions {
            policy: Policy::Term,
            link: Link::Unix,
            memory_bytes: FILL_MEMORY_BYTES,
            workers: None,
        };
        let server = RegionServer::start(self, &options)?;
        let volume = server.connect(1)?;
        let done = work(volume.as_ref());
        volume.shut_down();
        server.stop()?;
        done
    }

    /// Makes the kernel forget the data file's pages, so that no server begins with another one's cache.
    pub(super) fn drop_page_cache(&self) -> anyhow::Result<()> {
        let file = std::fs::File::open(&self.data)
            .with_context(|| format!("cannot open {}", self.data.display()))?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .with_context(|| format!("cannot drop the cache of {}", self.data.display()))
    }

    /// The pool's directory.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The data file or device.
    pub(super) fn data(&self) -> &Path {
        &self.data
    }

    /// Whether the data is on a device given by name, where nothing else may be written.
    pub(super) fn is_device(&self) -> bool {
        self.is_device
    }

    /// Bytes of the file that is measured.
    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Bytes of the pool: what holds everything.
    pub(super) fn pool_bytes(&self) -> u64 {
        self.file_bytes + MARGIN_BYTES
    }
}

impl Drop for ScratchPool {
    fn drop(&mut self) {
        if !self.is_device && !self.data.starts_with(&self.directory) {
            let _ = std::fs::remove_file(&self.data);
        }
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            cuttlefs_common::tell!("{} could not be removed: {error}", self.directory.display());
        }
    }
}

/// Makes a file and fills it with words that say where they are.
pub(super) fn fill_file(volume: &dyn Volume, name: &str, file_bytes: u64) -> anyhow::Result<()> {
    let mut buffer = vec![0; MAX_TRANSFER_BYTES as usize];
    fill_by(volume, name, file_bytes, |offset, len| {
        content::fill(&mut buffer[..len], offset, 0);
        buffer[..len].to_vec()
    })
}

/// Makes a file of what `piece` gives for each offset and length.
pub(super) fn fill_by(
    volume: &dyn Volume,
    name: &str,
    file_bytes: u64,
    mut piece: impl FnMut(u64, usize) -> Vec<u8>,
) -> anyhow::Result<()> {
    let how = OpenHow { read: true, write: true, ..OpenHow::default() };
    let caller = super::volume::caller();
    let (_, file) = volume
        .create(&caller, volume.root(), name.as_bytes(), 0o600, true, how)
        .with_context(|| format!("cannot create {name}"))?;
    let mut offset = 0;
    while offset < file_bytes {
        interrupt::check()?;
        let len = u64::from(MAX_TRANSFER_BYTES).min(file_bytes - offset);
        let bytes = piece(offset, len as usize);
        volume.write(&caller, file.handle, offset, &bytes).context("cannot fill the pool")?;
        offset += len;
    }
    // It stays open until the session ends.
    volume.fsync(&caller, file.handle, false).context("cannot fill the pool")
}

/// The size of a block device; `None` if the path is none.
fn device_bytes(path: &Path) -> anyhow::Result<Option<u64>> {
    use std::os::unix::fs::FileTypeExt as _;
    let Ok(found) = path.metadata() else {
        return Ok(None);
    };
    if !found.file_type().is_block_device() {
        return Ok(None);
    }
    let mut device = std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let bytes =
        device.seek(std::io::SeekFrom::End(0)).with_context(|| format!("cannot size {}", path.display()))?;
    Ok(Some(bytes))
}

/// The end of a file from `start` on, for an error about it.
pub(super) fn tail(path: &Path, most_bytes: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = std::fs::File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(std::io::SeekFrom::Start(len.saturating_sub(most_bytes)))?;
        let mut bytes = Vec::new();
        file.take(most_bytes).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    };
    read().unwrap_or_else(|error| format!("(its log cannot be read: {error})"))
}
