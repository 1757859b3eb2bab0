//! A log that many processes append to, by the native API: each append is whole, whoever else appends, and none is lost.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example native_log -- unix:///run/cuttlefsd/b.sock append "one line"
//! cargo run --release -p cuttlefs-client --example native_log -- unix:///run/cuttlefsd/b.sock append-many 1000 "line of me"
//! cargo run --release -p cuttlefs-client --example native_log -- unix:///run/cuttlefsd/b.sock read
//! ```
//! Over `tcp://` the key's file is named by `CUTTLEFS_KEY`.

use cuttlefs_client::native::{Buffer, ConnectOptions, Done, OpenOptions, Queue, Session, Trust};
use std::error::Error;
use std::io::Write;
use std::time::Duration;

/// Appends that are under way at once.
const DEPTH: usize = 32;
const LINE_MAX: usize = 4096;
const LONG: Duration = Duration::from_secs(60);

/// Appends the line so often, many at once, and makes all of them durable at the end.
fn append_many(session: &Session, count: usize, line: &str) -> Result<(), Box<dyn Error>> {
    let file = session.open("log", OpenOptions::CREATE)?;
    let mut queue = Queue::new(session, DEPTH)?;
    let buffer = Buffer::new(session, LINE_MAX)?;
    let line = format!("{}\n", line.replace('\n', " "));
    buffer.write(0, line.as_bytes())?;
    let (mut posted, mut ends) = (0, Vec::new());
    while posted < count || queue.outstanding() > 0 {
        while posted < count && queue.outstanding() < DEPTH {
            // All of them take the same bytes, which nobody changes.
            queue.post_append(posted as u64, &file, (&buffer, 0, line.len()))?;
            posted += 1;
        }
        queue.wait(&mut ends, DEPTH, LONG);
        for end in ends.drain(..) {
            match end.result? {
                Done::Written { len, .. } if len == line.len() => {}
                other => return Err(format!("append {}: {other:?}", end.token).into()),
            }
        }
    }
    Ok(file.sync()?)
}

fn read(session: &Session) -> Result<(), Box<dyn Error>> {
    let file = session.open("log", OpenOptions::READ)?;
    let (mut at, mut bytes) = (0, vec![0; 1 << 20]);
    loop {
        let got = file.read_at(at, &mut bytes)?;
        if got == 0 {
            return Ok(());
        }
        std::io::stdout().write_all(&bytes[..got])?;
        at += got as u64;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let trust = Trust { key: std::env::var_os("CUTTLEFS_KEY").map(Into::into), server_user: None };
    let connect = |url: &str| Session::connect(url, ConnectOptions { trust, ..ConnectOptions::default() });
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [url, "append", line] => append_many(&connect(url)?, 1, line),
        [url, "append-many", count, line] => append_many(&connect(url)?, count.parse()?, line),
        [url, "read"] => read(&connect(url)?),
        _ => Err("usage: native_log URL append LINE | URL append-many COUNT LINE | URL read".into()),
    }
}
