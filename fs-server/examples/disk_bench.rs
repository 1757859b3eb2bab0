//! Random 4 KiB reads through a worker and its io_uring, as the server does them: one task for each read in flight.
//!
//! `disk_bench [DIRECTORY] [SIZE]`: makes a file of SIZE (default 512M) in DIRECTORY (default the current one), fills it,
//! reads it at several depths with O_DIRECT, once into registered frames and once into bounce buffers, prints
//! operations a second and the CPU the worker's thread used for each, and removes the file.

use anyhow::{Context, Result};
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::{Random, SeededRandom, SystemClock};
use cuttlefs_server::pool::{
    AlignedBuf, Disk, FormatOptions, IoBuffer, IoKind, IoRequest, UringDisk, format, open,
};
use cuttlefs_server::worker::Worker;
use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEPTHS: [u32; 5] = [1, 4, 32, 64, 128];
const RUN: Duration = Duration::from_secs(2);
const FILL_BYTES: usize = 1 << 20;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let place = PathBuf::from(arguments.next().unwrap_or_else(|| ".".to_owned()));
    let size: ByteSize = arguments.next().unwrap_or_else(|| "512M".to_owned()).parse()?;
    let dir = tempfile::tempdir_in(&place).context("making a directory for the pool")?;
    let options = FormatOptions { dir: dir.path().to_owned(), size: size.0, ..FormatOptions::default() };
    format(&options, &|_, _| Ok(()))?;
    let pool = open(dir.path())?;
    let frames = Arc::new(SharedMemory::new("frames", 256 * PAGE_SIZE)?);
    let disk = Rc::new(UringDisk::new(pool.data_files().clone(), frames)?);
    let worker = Worker::new(Vec::new(), Some(disk.clone()), Arc::new(SystemClock::new()))?;
    fill(&disk, size.0)?;

    let direct = pool.data_files().files()[0].is_direct();
    println!("{size} file, direct IO: {direct}, registered frames: {}", disk.has_registered_frames());
    println!("{:<10}{:>7}{:>12}{:>14}{:>14}", "memory", "depth", "reads/s", "mean us", "CPU us/read");
    for fixed in [true, false] {
        for depth in DEPTHS {
            let cpu_before = thread_cpu();
            let began = Instant::now();
            let reads = run(&worker, &disk, pool.pages(), depth, fixed)?;
            let (elapsed, cpu) = (began.elapsed(), thread_cpu() - cpu_before);
            println!(
                "{:<10}{depth:>7}{:>12.0}{:>14.1}{:>14.2}",
                if fixed { "frames" } else { "bounce" },
                reads as f64 / elapsed.as_secs_f64(),
                elapsed.as_secs_f64() * 1e6 * f64::from(depth) / reads as f64,
                cpu.as_secs_f64() * 1e6 / reads as f64,
            );
        }
    }
    Ok(())
}

/// Writes all of the file: a device does not read blocks that were never written.
fn fill(disk: &UringDisk, size: u64) -> Result<()> {
    let random = SeededRandom::new(1);
    for offset in (0..size / PAGE_SIZE_U64 * PAGE_SIZE_U64).step_by(FILL_BYTES) {
        let len = FILL_BYTES.min((size - offset) as usize);
        let mut buffer = AlignedBuf::zeroed(len);
        random.fill(buffer.as_mut_slice());
        let write = IoRequest { kind: IoKind::Write, offset, buffer: IoBuffer::Owned(buffer) };
        for done in disk.block_on(disk.submit(vec![write]))? {
            done.result?;
        }
    }
    disk.block_on(disk.sync())??;
    Ok(())
}

fn run(worker: &Worker, disk: &Rc<UringDisk>, pages: u64, depth: u32, fixed: bool) -> Result<u64> {
    let (reads, failed) = (Rc::new(Cell::new(0u64)), Rc::new(Cell::new(false)));
    let (spawner, disk) = (worker.spawner(), disk.clone());
    let (counted, failing) = (reads.clone(), failed.clone());
    let all = async move {
        let until = Instant::now() + RUN;
        let mut tasks = Vec::new();
        for task in 0..depth {
            let disk = disk.clone();
            let (reads, failed) = (counted.clone(), failing.clone());
            tasks.extend(spawner.spawn_join(async move {
                let random = SeededRandom::new(u64::from(task));
                while Instant::now() < until && !failed.get() {
                    let buffer = match fixed {
                        true => IoBuffer::Frames(vec![FrameIndex(3 + task)]),
                        false => IoBuffer::Owned(AlignedBuf::unfilled(PAGE_SIZE)),
                    };
                    let offset = random.next_u64() % pages * PAGE_SIZE_U64;
                    let read = IoRequest { kind: IoKind::Read, offset, buffer };
                    for done in disk.submit(vec![read]).await {
                        failed.set(failed.get() | done.result.is_err());
                    }
                    reads.set(reads.get() + 1);
                }
            }));
        }
        for task in tasks {
            task.await;
        }
    };
    worker.block_on(all)?;
    anyhow::ensure!(!failed.get(), "a read failed");
    Ok(reads.get())
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
