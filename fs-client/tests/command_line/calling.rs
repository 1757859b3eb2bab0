//! Running the command, and what it says.

use std::io::BufRead;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

pub const COMMAND_VARIABLE: &str = "CUTTLEFS_TEST_COMMAND";
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn command(arguments: &[&str]) -> Command {
    let own = std::env::current_exe().expect("own path");
    let mut command = Command::new(&own);
    command.args(arguments).env(COMMAND_VARIABLE, "1").env("CUTTLEFSD", &own).stdin(Stdio::null());
    command
}

pub fn output(arguments: &[&str]) -> Output {
    command(arguments).output().expect("run")
}

#[track_caller]
pub fn succeeds(arguments: &[&str]) -> String {
    let output = output(arguments);
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

#[track_caller]
pub fn fails(arguments: &[&str]) -> String {
    let output = output(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} succeeded");
    assert!(text.starts_with("cuttlefs: ") || text.contains("\ncuttlefs: "), "{text}");
    text
}

/// Runs a command, and kills it if it hangs. Returns its output, and its standard error as text.
#[track_caller]
pub fn in_time(arguments: &[&str]) -> (Output, String) {
    ended_in_time(command(arguments))
}

#[track_caller]
pub fn ended_in_time(mut command: Command) -> (Output, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn");
    let started = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if started.elapsed() > LIMIT {
            child.kill().expect("kill");
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().expect("output");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, text)
}

#[track_caller]
pub fn fails_in_time(arguments: &[&str]) -> String {
    let (output, text) = in_time(arguments);
    assert!(!output.status.success(), "{arguments:?} succeeded");
    text
}

#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < LIMIT, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reads what a process says until it has said these words.
pub fn hears(said: &mut impl BufRead, words: &str) -> String {
    let mut all = String::new();
    while !all.contains(words) {
        assert!(said.read_line(&mut all).expect("read") > 0, "it ended without {words:?}: {all}");
    }
    all
}
