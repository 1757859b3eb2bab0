//! What the disk alone can do, by fio: the bound of everything that is not in memory.

use super::pool::ScratchPool;
use crate::bench::fio_job::{self, FioJob};
use anyhow::{Context as _, bail};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Seconds of one run of fio.
const SECONDS: u32 = 2;
/// Bytes of the file that writes go to.
const WRITE_FILE_BYTES: u64 = 256 << 20;

/// Random IO in blocks of a size, so many at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    write: bool,
    block_bytes: u64,
    depth: usize,
}

/// What fio measured, asked for once each.
#[derive(Debug)]
pub(super) struct Disk {
    known: HashMap<Key, f64>,
    write_file: PathBuf,
    /// Why there are no figures.
    pub(super) missing: Option<String>,
}

impl Disk {
    /// Of a pool's disk.
    pub(super) fn new(pool: &ScratchPool) -> Self {
        Self { known: HashMap::new(), write_file: pool.directory().join("disk-writes"), missing: None }
    }

    /// Random reads a second, each of a value rounded up to whole pages. `None` if fio cannot say.
    pub(super) fn reads_per_second(
        &mut self,
        pool: &ScratchPool,
        value_bytes: u64,
        depth: usize,
    ) -> Option<f64> {
        self.rate(pool, Key { write: false, block_bytes: block_bytes(value_bytes), depth })
    }

    /// Random writes a second; not of a device given by name, where only the pool may write.
    pub(super) fn writes_per_second(
        &mut self,
        pool: &ScratchPool,
        value_bytes: u64,
        depth: usize,
    ) -> Option<f64> {
        if pool.is_device() {
            return None;
        }
        self.rate(pool, Key { write: true, block_bytes: block_bytes(value_bytes), depth })
    }

    fn rate(&mut self, pool: &ScratchPool, key: Key) -> Option<f64> {
        if self.missing.is_some() {
            return None;
        }
        if let Some(&known) = self.known.get(&key) {
            return Some(known);
        }
        match self.measure(pool, key) {
            Ok(rate) => {
                self.known.insert(key, rate);
                Some(rate)
            }
            Err(error) => {
                self.missing = Some(format!("{error:#}"));
                None
            }
        }
    }

    fn measure(&self, pool: &ScratchPool, key: Key) -> anyhow::Result<f64> {
        let path = if key.write { &self.write_file } else { pool.data() };
        if key.write && !path.exists() {
            // Blocks that were never written are not what a pool's pages are.
            fio(
                &[
                    "--rw=write",
                    "--bs=1M",
                    "--iodepth=4",
                    &format!("--size={WRITE_FILE_BYTES}"),
                    "--end_fsync=1",
                ],
                path,
                FioJob::SequentialWrite,
            )?;
        }
        let (rw, job) =
            if key.write { ("randwrite", FioJob::RandomWrite) } else { ("randread", FioJob::RandomRead) };
        let size = if key.write { WRITE_FILE_BYTES } else { pool.file_bytes() };
        let mut arguments = vec![
            format!("--rw={rw}"),
            format!("--bs={}", key.block_bytes),
            format!("--size={size}"),
            format!("--iodepth={}", key.depth),
            "--time_based=1".to_owned(),
            format!("--runtime={SECONDS}"),
            "--norandommap=1".to_owned(),
            "--randrepeat=0".to_owned(),
        ];
        if !key.write {
            arguments.push("--readonly".to_owned());
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        fio(&arguments, path, job)
    }
}

/// Runs fio on a file; its operations a second.
fn fio(arguments: &[&str], path: &std::path::Path, job: FioJob) -> anyhow::Result<f64> {
    let output = Command::new("fio")
        .args(["--name=disk", "--ioengine=libaio", "--direct=1", "--thread=1", "--fallocate=none"])
        .args(["--output-format=json", "--eta=never", "--allow_file_create=1"])
        .arg(format!("--filename={}", path.display()))
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!(
                "fio is missing; install it (apt-get install fio) to have the disk's own figures and the bound"
            )
        }
        Err(error) => return Err(error).context("cannot run fio"),
    };
    if !output.status.success() {
        bail!("fio failed on {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(fio_job::parse(job, &String::from_utf8_lossy(&output.stdout))?.operations_per_second)
}

/// Bytes a disk moves for a value: whole pages.
fn block_bytes(value_bytes: u64) -> u64 {
    value_bytes.div_ceil(PAGE_SIZE_U64).max(1) * PAGE_SIZE_U64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_move_pages() {
        assert_eq!([1, 64, 4096, 4097, 16384].map(block_bytes), [4096, 4096, 4096, 8192, 16384]);
    }
}
