//! `cuttlefsd`: the cuttlefs server.

use std::process::ExitCode;

fn main() -> ExitCode {
    cuttlefs_common::panic_ends::install("cuttlefsd");
    cuttlefs_server::cli::run()
}
