//! Waits until the process of a server serves.

use cuttlefs_common::rdma::Endpoint;
use std::io::{BufRead, BufReader};
use std::process::Child;

/// Reads the messages of a server's process until it serves, and keeps reading the later ones. Returns the last endpoint at which it listens, and the
/// messages so far.
///
/// # Panics
/// If the process ends before it serves.
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
    // A thread must read the later messages, or the full pipe makes the server wait.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("{line}")));
    (endpoint.expect("it listens"), log)
}
