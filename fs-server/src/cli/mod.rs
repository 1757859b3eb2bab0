//! The `cuttlefsd` command: `format` makes a pool, `serve` serves it, `fsck` checks it; `key` makes keys for clients; `memory` lends memory.

mod format;
mod fsck;
mod key;
mod machine_memory;
mod memory;
mod pinned_memory;
mod serve;

use clap::{Parser, Subcommand};
use cuttlefs_common::explain::explain;
use cuttlefs_common::log_limit::Limited;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// fsck(8)'s exit code for wrong arguments.
const FSCK_USAGE: u8 = 16;
/// The environment variable that chooses what is logged, in tracing-subscriber's syntax.
const LOG_VARIABLE: &str = "CUTTLEFS_LOG";

/// The cuttlefs server: turns SSDs into RDMA-attached memory and serves it as a file system.
#[derive(Parser)]
#[command(name = "cuttlefsd", version, long_version = cuttlefs_common::rdma::VERSION, max_term_width = 100)]
#[command(after_help = "Examples:
  cuttlefsd format --pool /srv/cuttle --size 64G
  cuttlefsd format --pool /srv/cuttle --data /dev/nvme1n1 --data /dev/nvme2n1
  cuttlefsd serve --pool /srv/cuttle --memory 8G --listen shm:///run/cuttlefsd/a.sock
  cuttlefsd fsck --pool /srv/cuttle --repair

Environment:
  CUTTLEFS_LOG   what is logged, such as info (default), debug or cuttlefs_server::pages=debug")]
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
    /// Check a pool that nobody serves, and repair it
    Fsck(fsck::FsckArgs),
    /// Make a key by which clients and server know each other over tcp:// and rdma://, or show which one a file holds
    Key(key::KeyArgs),
    /// Lend memory to `cuttlefs swap` until SIGTERM or Ctrl-C
    Memory(memory::MemoryArgs),
}

/// The command's definition, for programs that look at its help.
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Runs the command with this process's arguments.
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let is_fsck = std::env::args().nth(1).is_some_and(|command| command == "fsck");
            let _ = error.print();
            return match error.exit_code() {
                0 => ExitCode::SUCCESS,
                _ if is_fsck => ExitCode::from(FSCK_USAGE),
                code => ExitCode::from(code as u8),
            };
        }
    };
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colours are for terminals; `up` redirects this output to a file.
        .with_ansi(std::io::stderr().is_terminal())
        // A message that cannot be written is dropped: reporting that on stderr would panic if stderr is what fails.
        .log_internal_errors(false)
        .event_format(Limited::default())
        .init();
    let result = match cli.command {
        Command::Format(args) => format::run(&args),
        Command::Serve(args) => serve::run(args),
        Command::Fsck(args) => return fsck::run(args),
        Command::Key(args) => key::run(&args),
        Command::Memory(args) => memory::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cuttlefs_common::tell!("cuttlefsd: {}", explain(error.as_ref()));
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
