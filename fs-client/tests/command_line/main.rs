//! The `cuttlefs` command, end to end: real processes and real mounts, over an in-memory volume.
//!
//! This program has three parts: the tests; the command itself, if `CUTTLEFS_TEST_COMMAND` is set in its environment, with a backend that needs no
//! server, so that detached processes are this program again; and, with the arguments of `cuttlefsd`, a server that only starts and stops.

mod backend;
mod calling;
mod hard_ends;
// Each test program uses a part of this module.
#[allow(dead_code)]
#[path = "../memory_volume/mod.rs"]
mod memory_volume;
mod mounts;
mod other_programs;
mod place;
mod up;

use backend::{InMemory, fake_format, fake_serve};
use calling::COMMAND_VARIABLE;
use cuttlefs_client::cli::run_with;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    match arguments.get(1).and_then(|first| first.to_str()) {
        Some("format") => {
            fake_format(&arguments[2..].iter().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>())
        }
        Some("serve") => {
            fake_serve(&arguments[2..].iter().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>())
        }
        _ if std::env::var_os(COMMAND_VARIABLE).is_some() => run_with(&InMemory, arguments),
        _ => run_tests(&arguments[1..]),
    }
}

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("mount_and_umount", mounts::mount_and_umount),
    ("a_refused_connection_leaves_nothing", mounts::a_refused_connection_leaves_nothing),
    ("a_dead_mount_is_mounted_again", mounts::a_dead_mount_is_mounted_again),
    ("a_watchdog_is_there_as_long_as_its_mount", mounts::a_watchdog_is_there_as_long_as_its_mount),
    ("a_place_is_mounted_again_at_once", mounts::a_place_is_mounted_again_at_once),
    ("a_mount_that_hangs_is_forced_off", hard_ends::a_mount_that_hangs_is_forced_off),
    ("umount_8_does_not_wait_for_the_server", other_programs::umount_8_does_not_wait_for_the_server),
    ("a_hanging_mount_hangs_no_command", hard_ends::a_hanging_mount_hangs_no_command),
    (
        "a_mount_that_dies_while_the_kernel_waits_for_it_frees_programs",
        hard_ends::a_mount_that_dies_while_the_kernel_waits_for_it_frees_programs,
    ),
    ("benchmarks_are_another_program", other_programs::benchmarks_are_another_program),
    (
        "unsynced_changes_are_not_thrown_away_silently",
        hard_ends::unsynced_changes_are_not_thrown_away_silently,
    ),
    ("a_mount_that_ends_says_what_is_lost", hard_ends::a_mount_that_ends_says_what_is_lost),
    ("copies_in_other_mount_namespaces_are_named", hard_ends::copies_in_other_mount_namespaces_are_named),
    ("without_proc_commands_ask_for_it", hard_ends::without_proc_commands_ask_for_it),
    ("foreground_ends_by_ctrl_c", mounts::foreground_ends_by_ctrl_c),
    ("mount_8_calls_the_helper", other_programs::mount_8_calls_the_helper),
    ("mount_8_waits_for_the_server", other_programs::mount_8_waits_for_the_server),
    ("a_remount_changes_flags", mounts::a_remount_changes_flags),
    ("status_while_the_server_is_away", mounts::status_while_the_server_is_away),
    ("up_and_down", up::up_and_down),
    ("up_in_the_foreground_stops_its_server", up::up_in_the_foreground_stops_its_server),
    ("what_a_shell_has_open_is_not_kept", up::what_a_shell_has_open_is_not_kept),
    ("up_starts_a_server_that_died_again", up::up_starts_a_server_that_died_again),
    ("a_signal_ends_a_start_and_its_server", up::a_signal_ends_a_start_and_its_server),
    ("down_ends_a_start", up::down_ends_a_start),
    ("an_error_that_stays_ends_a_start", up::an_error_that_stays_ends_a_start),
    ("a_server_that_dies_shows_its_log", up::a_server_that_dies_shows_its_log),
    ("down_stops_what_a_killed_mount_left", up::down_stops_what_a_killed_mount_left),
];

/// Runs the tests of an optional filter, with the options of cargo and nextest for test programs.
fn run_tests(arguments: &[std::ffi::OsString]) -> ExitCode {
    let has = |option: &str| arguments.iter().any(|argument| argument == option);
    if has("--ignored") {
        // No test is ignored.
        return ExitCode::SUCCESS;
    }
    if has("--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("NOT TESTED: root and /dev/fuse are needed");
        let required = std::env::var_os("CUTTLEFS_REQUIRE_FUSE").is_some();
        return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let filter =
        arguments.iter().filter_map(|argument| argument.to_str()).find(|text| !text.starts_with('-'));
    let is_meant = |name: &str| match filter {
        Some(filter) if has("--exact") => name == filter,
        Some(filter) => name.contains(filter),
        None => true,
    };
    let mut failed = 0;
    for (name, test) in TESTS.iter().filter(|(name, _)| is_meant(name)) {
        let ok = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        failed += usize::from(!ok);
    }
    println!("test result: {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
