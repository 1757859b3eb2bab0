//! The `cuttlefsd` command: `format` makes a pool, `serve` serves it.

mod format;
mod serve;

use clap::{Parser, Subcommand};
use cuttlefs_common::explain::explain;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Chooses what is logged, in tracing-subscriber's syntax.
const LOG_VARIABLE: &str = "CUTTLEFS_LOG";

/// The cuttlefs server: turns SSDs into RDMA-attached memory and serves it as a file system.
#[derive(Parser)]
#[command(name = "cuttlefsd", version, max_term_width = 100)]
#[command(after_help = "Examples:
  cuttlefsd format --pool /srv/cuttle --size 64G
  cuttlefsd format --pool /srv/cuttle --data /dev/nvme1n1 --data /dev/nvme2n1
  cuttlefsd serve --pool /srv/cuttle --memory 8G --listen shm:///run/cuttlefs/a.sock

Environment:
  CUTTLEFS_LOG   what is logged, such as info (default), debug or cuttlefs_server::tier=debug")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a pool
    Format(format::FormatArgs),
    /// Serve a pool until SIGTERM or Ctrl-C
    Serve(serve::ServeArgs),
}

/// Runs the command of this process's arguments.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colours are for terminals; `up` sends this to a file.
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let result = match cli.command {
        Command::Format(args) => format::run(&args),
        Command::Serve(args) => serve::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuttlefsd: {}", explain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_table_is_well_formed() {
        Cli::command().debug_assert();
    }
}
