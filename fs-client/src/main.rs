//! The `cuttlefs` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    cuttlefs_client::cli::run()
}
