//! The `cuttlefs` command: a table of subcommands, each in its own file.
//!
//! * `up`, `down`: a server and a mount on this machine, in one command.
//! * `mount`, `umount`: a mount of a server that runs somewhere.
//! * `status`: a server's figures.
//! * `defragment`: moves of files' pages to fewer places of the pool.
//! * `preload`: a program that reads files of mounts past FUSE.
//! * `swap`: a program whose memory beyond a limit lies at a memory node.
//! * `bench`: the speed of a mount; another program measures it (`bench`).
//!
//! Long-running commands run in the foreground; without `--foreground` the command starts itself once more, detached,
//! and relays that process's reports (`background`). Running processes are written down in the runtime directory
//! (`run_state`), so that they can be found and ended by process id and start time, never by name.
//!
//! The code that connects to servers comes in through `Backend`, so that all of this is tested without a server.

mod background;
mod bench;
mod busy;
mod connect;
mod connection;
mod defragment;
mod down;
mod figures;
mod key;
mod last_sync;
mod made;
mod memory_status;
mod mount;
mod mount_helper;
mod mount_options;
mod mountpoint;
mod preload;
mod process;
pub mod programs;
mod remount;
mod run_state;
mod server_process;
mod status;
mod summary;
mod swap;
mod unmount;
mod up;
mod watchdog;
mod wrapped;
mod written;

pub use connect::{Backend, Network, NotThere, Trust, VolumeOptions, device};
pub use key::{chosen as chosen_key, of_mount as mount_trust};
pub use mount_options::MountOptions;

use clap::{Parser, Subcommand};
use cuttlefs_common::explain::explain;
use cuttlefs_common::log_limit::Limited;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// The names under which mount(8) calls this command; see `mount_helper`.
const HELPER_NAMES: [&str; 2] = ["mount.fuse.cuttlefs", "mount.cuttlefs"];
/// The variable that chooses what is logged, in tracing-subscriber's syntax, such as `debug` or `cuttlefs_client::fuse=debug`.
const LOG_VARIABLE: &str = "CUTTLEFS_LOG";

/// A distributed file system that turns servers' SSDs into RDMA-attached memory.
#[derive(Parser)]
#[command(name = "cuttlefs", version, long_version = cuttlefs_common::rdma::VERSION, max_term_width = 100)]
#[command(after_help = "Examples:
  cuttlefs up ~/cuttle                             serve ./cuttlefs-data and mount it
  cuttlefs down ~/cuttle                           end both
  cuttlefs mount tcp://box:7950 /mnt --key FILE    mount what another machine serves
  cuttlefs status /mnt                             ask the server behind a mount

Environment:
  CUTTLEFS_LOG   what is logged, such as debug or cuttlefs_client::fuse=debug
  CUTTLEFS_KEY   the key file to show over tcp:// and rdma://, where --key and -o key= say none
  CUTTLEFSD      the server's binary, if it is not beside this one or in PATH")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a pool on this machine and mount it; makes the pool if there is none
    Up(up::UpArgs),
    /// Unmount what `up` mounted and stop its server
    Down(down::DownArgs),
    /// Mount what a server serves
    Mount(mount::MountArgs),
    /// Unmount
    Umount(unmount::UmountArgs),
    /// Show what a server says of itself
    Status(status::StatusArgs),
    /// Move files' pages to fewer places of the server's pool
    Defragment(defragment::DefragmentArgs),
    /// Run a program that reads files of mounts past FUSE
    Preload(preload::PreloadArgs),
    /// Run a program whose memory beyond a limit lies at a memory node
    Swap(swap::SwapArgs),
    /// Measure how fast a mount is
    #[command(disable_help_flag = true)]
    Bench(bench::BenchArgs),
    /// Called by mount(8)
    #[command(hide = true, disable_help_flag = true)]
    MountHelper(mount_helper::HelperArgs),
    /// Called by a mount, for its end
    #[command(hide = true)]
    MountWatchdog(watchdog::WatchdogArgs),
}

/// Runs the command of this process's arguments over the network.
pub fn run() -> ExitCode {
    run_with(&Network, std::env::args_os().collect())
}

/// Runs a command. `arguments` start with the program's name.
pub fn run_with(backend: &dyn Backend, arguments: Vec<OsString>) -> ExitCode {
    let cli = Cli::parse_from(as_helper(arguments));
    start_logging();
    let result = match cli.command {
        Command::Up(args) => up::run(backend, args),
        Command::Down(args) => down::run(&args),
        Command::Mount(args) => mount::run(backend, args),
        Command::Umount(args) => unmount::run(&args),
        Command::Status(args) => status::run(backend, &args),
        Command::Defragment(args) => defragment::run(&args),
        // Its exit code is the program's.
        Command::Preload(args) => match preload::run(args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Swap(args) => match swap::run(args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Bench(args) => bench::run(&args),
        Command::MountHelper(args) => mount_helper::run(&args),
        Command::MountWatchdog(args) => watchdog::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cuttlefs_common::tell!("cuttlefs: {}", explain(error.as_ref()));
            error
                .downcast_ref::<wrapped::NotStarted>()
                .map_or(ExitCode::FAILURE, wrapped::NotStarted::exit_code)
        }
    }
}

/// Turns a call as `mount.fuse.cuttlefs SPEC DIR ...` into `cuttlefs mount-helper SPEC DIR ...`, and also `cuttlefs SPEC DIR ...`, because libfuse's
/// mount.fuse3 runs the part of a type after `fuse.` in this way. So `mount -t fuse.cuttlefs` works wherever libfuse is installed, and needs no file
/// of ours but the command itself.
fn as_helper(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let name = arguments.first().map(std::path::Path::new).and_then(|path| path.file_name());
    let is_helper = name.is_some_and(|name| HELPER_NAMES.iter().any(|helper| name == *helper));
    // Neither a subcommand nor an option contains a scheme.
    let has_endpoint =
        arguments.get(1).and_then(|first| first.to_str()).is_some_and(|first| first.contains("://"));
    if is_helper || has_endpoint {
        arguments.insert(1, "mount-helper".into());
    }
    arguments
}

const DEFAULT_FILTER: &str = "warn";

/// Starts the log on stderr, filtered as the environment says.
pub fn start_logging() {
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    // Fails only if a test has started one before, which serves as well.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // The log of a background process is a file.
        .with_ansi(std::io::stderr().is_terminal())
        // If a line cannot be written, go on without it: a message about that on stderr would be a panic where stderr is what fails.
        .log_internal_errors(false)
        .event_format(Limited::default())
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_table_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_of_every_command_is_whole() {
        // The commands of both programs.
        let mut commands = vec![Cli::command(), cuttlefs_server::cli::command()];
        while let Some(command) = commands.pop() {
            let name = command.get_name().to_owned();
            let text = command.clone().render_long_help().to_string();
            assert!(command.has_subcommands() || text.contains("Examples:"), "{name} has no example");
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                assert!(argument.get_help().is_some(), "{name}: {}", argument.get_id());
            }
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let long: Vec<_> = after.lines().filter(|line| line.len() > 100).collect();
            assert!(long.is_empty(), "{name}: too long: {long:#?}");
            commands.extend(command.get_subcommands().filter(|one| !one.is_hide_set()).cloned());
        }
    }

    #[test]
    fn a_call_by_mount_is_recognised() {
        let call = |name: &str| as_helper(vec![name.into(), "tcp://a".into(), "/mnt".into()]);
        assert_eq!(call("/sbin/mount.fuse.cuttlefs")[1], "mount-helper");
        assert_eq!(call("/usr/bin/cuttlefs")[1..3], ["mount-helper", "tcp://a"], "by mount.fuse3");
        let plain = as_helper(vec!["cuttlefs".into(), "status".into(), "tcp://a".into()]);
        assert_eq!(plain[1], "status");
    }
}
