//! The places of programs that this one starts: named by a variable, beside it, or in `PATH`.

use anyhow::Context;
use std::path::PathBuf;

/// The server's program: the value of `CUTTLEFSD`, or `cuttlefsd`.
///
/// # Errors
/// The path of this program's own file is not known, as without /proc.
pub fn server() -> anyhow::Result<PathBuf> {
    match std::env::var_os("CUTTLEFSD") {
        Some(named) => Ok(named.into()),
        None => beside("cuttlefsd"),
    }
}

/// The program of the `cuttlefs` command.
///
/// # Errors
/// As [`server`].
pub fn client() -> anyhow::Result<PathBuf> {
    beside("cuttlefs")
}

/// The program that `cuttlefs bench` runs.
///
/// # Errors
/// As [`server`].
pub fn bench() -> anyhow::Result<PathBuf> {
    beside("cuttlefs-bench")
}

/// The library that `cuttlefs preload` loads into programs.
///
/// # Errors
/// It is not beside this program.
pub fn preload_library() -> anyhow::Result<PathBuf> {
    library("libcuttlefs_preload.so", "cuttlefs-preload")
}

/// The library that `cuttlefs swap` loads into programs.
///
/// # Errors
/// It is not beside this program.
pub fn swap_library() -> anyhow::Result<PathBuf> {
    library("libcuttlefs_swapped.so", "cuttlefs-swapped")
}

fn library(name: &str, package: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    let library = own.with_file_name(name);
    // Not by name alone: the loader would look for it elsewhere, and only warn if it finds none.
    if !library.exists() {
        anyhow::bail!(
            "{name} is not beside {}; copy it there from target/release, or build it: cargo build --release -p {package}",
            own.display()
        );
    }
    Ok(library)
}

fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    let sibling = own.with_file_name(name);
    Ok(if sibling.exists() { sibling } else { name.into() })
}
