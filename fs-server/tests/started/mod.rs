//! A server's process, started: waits until it serves.

use cuttlefs_common::rdma::Endpoint;
use std::io::{BufRead, BufReader};
use std::process::Child;

/// Reads what the process says until it serves, and lets it say more. Gives the last endpoint that it listens at, and what it said.
///
/// # Panics
/// If it ends before.
pub fn until_it_serves(child: &mut Child) -> (Endpoint, String) {
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let (mut log, mut endpoint) = (String::new(), None);
    loop {
        let Some(Ok(line)) = lines.next() else { panic!("it did not start: {log}") };
        log.push_str(&line);
        log.push('\n');
        if let Some((_, at)) = line.split_once("listening endpoint=") {
            endpoint = Some(at.trim().parse().expect("an endpoint"));
        } else if line.contains(" serving ") {
            break;
        }
    }
    // Its messages must go somewhere.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("{line}")));
    (endpoint.expect("it listens"), log)
}
