//! The `cuttlefs` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    cuttlefs_common::panic_ends::install("cuttlefs");
    cuttlefs_common::memory::limit_heaps();
    cuttlefs_client::cli::run()
}
