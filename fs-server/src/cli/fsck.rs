//! `cuttlefsd fsck`: checks a pool that is not being served. Exit codes are those of fsck(8).

use crate::fsck::{FsckOptions, fsck};
use clap::Args;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Exit code for errors that do not concern the pool.
const OPERATIONAL_ERROR: u8 = 8;
/// How often progress is printed.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefsd fsck --pool /srv/cuttle              looks only
  cuttlefsd fsck --pool /srv/cuttle --repair     docs/fsck.md says what it does with each finding

Exit codes: 0 clean, 1 all repaired, 4 errors are left, 8 nothing could be checked, 16 usage")]
pub(super) struct FsckArgs {
    /// Directory of the pool
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// Repair what can be; without it no byte of the pool changes
    #[arg(long)]
    repair: bool,
    /// Do not read the pages that hold bytes; only records are checked
    #[arg(long)]
    no_data: bool,
    /// Serve pages that rotted as they are from now on, instead of as errors
    #[arg(long, requires = "repair", conflicts_with = "no_data")]
    accept_rotten: bool,
    /// Where a copy of the metadata goes; a store writes whenever it is opened [default: the system's temporary directory]
    #[arg(long, value_name = "DIR", conflicts_with = "repair")]
    scratch: Option<PathBuf>,
    /// For programs
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: FsckArgs) -> ExitCode {
    let options = FsckOptions {
        pool: args.pool,
        repair: args.repair,
        checksums: !args.no_data,
        accept_rotten: args.accept_rotten,
        scratch: args.scratch,
    };
    let shows = std::io::stderr().is_terminal();
    let mut told = Instant::now();
    let mut progress = |what: &str, done: u64, all: u64| {
        if all > 0 && told.elapsed() >= PROGRESS_INTERVAL {
            told = Instant::now();
            let end = if shows { "\r" } else { "\n" };
            cuttlefs_common::terminal::write(
                std::io::stderr(),
                format_args!("fsck: {what}: {done} of {all} ({}%){end}", done * 100 / all),
            );
        }
    };
    let report = match fsck(&options, &mut progress) {
        Ok(report) => report,
        Err(error) => {
            cuttlefs_common::tell!("cuttlefsd: {}", cuttlefs_common::explain::explain(&error));
            return ExitCode::from(OPERATIONAL_ERROR);
        }
    };
    let text = if args.json { report.json().to_string() } else { report.lines().join("\n") };
    // The reader of the output may have gone. The exit code has the result all the same.
    let _ = writeln!(std::io::stdout(), "{text}");
    ExitCode::from(report.exit_code())
}
