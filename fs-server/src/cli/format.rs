//! `cuttlefsd format`: the pool's directory, data files and empty metadata.

use crate::meta::{Caller, DiskOptions, DiskStore, Format, HashKey, Meta};
use crate::pool::{self, FormatOptions};
use clap::Args;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::{Random, SystemClock, SystemRandom};
use std::path::PathBuf;

/// Permission bits of a new root directory: as `mkfs` leaves it.
const ROOT_MODE: u16 = 0o755;

#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefsd format --pool /srv/cuttle --size 64G
  cuttlefsd format --pool /srv/cuttle --size 64G --data /ssd1/data --data /ssd2/data
  cuttlefsd format --pool /srv/cuttle --data /dev/nvme1n1

The pool's settings are then in its cuttlefs.toml (docs/operations.md). Its size cannot be changed.")]
pub(super) struct FormatArgs {
    /// Directory of the pool; made if it is not there
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// Space for files, such as 64G, taken from the disk at once; not needed if every --data is a device
    #[arg(long, default_value = "0", hide_default_value = true)]
    size: ByteSize,
    /// Data file or block device; may be given several times [default: DIR/data]
    #[arg(long, value_name = "FILE-OR-DEVICE")]
    data: Vec<PathBuf>,
    /// Destroy a pool that is there already, and what the data files hold
    #[arg(long)]
    force: bool,
}

pub(super) fn run(args: &FormatArgs) -> anyhow::Result<()> {
    let options = FormatOptions {
        dir: args.pool.clone(),
        size: args.size.0,
        data: args.data.clone(),
        force: args.force,
    };
    let report = pool::format(&options, &|dir, uuid| {
        let store = DiskStore::open(dir, DiskOptions::default())?;
        let mut key = [0; 16];
        SystemRandom.fill(&mut key);
        let format = Format {
            uuid: uuid.0,
            hash_key: HashKey(key),
            // The user who formats owns the root directory, so that a user's own pool is the user's.
            root: Caller {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                ..Caller::default()
            },
            root_mode: ROOT_MODE,
        };
        Ok(Meta::format(&store, &SystemClock::new(), &format)?)
    })?;
    if report.was_cut_off {
        cuttlefs_common::say!("an earlier format was cut off; the pool was made from the beginning");
    }
    cuttlefs_common::say!(
        "made pool {} of {} in {}",
        report.uuid,
        ByteSize(report.pages * PAGE_SIZE_U64),
        args.pool.display()
    );
    cuttlefs_common::say!("its data files take that much of the disk from now on; it does not grow");
    cuttlefs_common::say!(
        "serve it with: cuttlefsd serve --pool {} --memory 1G --listen tcp://127.0.0.1:7950",
        args.pool.display()
    );
    Ok(())
}
