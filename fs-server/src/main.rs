//! `cuttlefsd`: the cuttlefs server.

use std::process::ExitCode;

fn main() -> ExitCode {
    cuttlefs_server::cli::run()
}
