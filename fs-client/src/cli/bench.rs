//! `cuttlefs bench`: hands over to `cuttlefs-bench`, which is a program of its own, so that a machine that only mounts needs
//! no benchmarks.

use super::programs;
use anyhow::anyhow;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Measure how fast a mount is, by the program cuttlefs-bench
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  cuttlefs bench --help          what can be measured
  cuttlefs bench mount /mnt      how fast a mount is")]
pub struct BenchArgs {
    /// What to measure, and how: `cuttlefs bench --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Replaces this process by `cuttlefs-bench`.
///
/// # Errors
/// The program does not exist, or does not start.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let program = programs::bench()?;
    let error = Command::new(&program).args(&args.arguments).exec();
    Err(match error.kind() {
        ErrorKind::NotFound => anyhow!(
            "cuttlefs-bench is neither beside this program nor in PATH; build it: cargo build --release -p cuttlefs-bench"
        ),
        _ => anyhow!(error).context(format!("cannot run {}", program.display())),
    })
}
