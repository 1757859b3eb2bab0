//! A log that many processes append to, by the native API: each append is whole, whoever else appends. Under a write grant an append is one verb of the
//! server's RNIC, which finds the end of the file itself; over a link without such verbs it is a request. What was printed to be appended is durable.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example native_log -- unix:///run/cuttlefsd/b.sock append "one line"
//! cargo run --release -p cuttlefs-client --example native_log -- unix:///run/cuttlefsd/b.sock append-many 1000 "line of me"
//! cargo run --release -p cuttlefs-client --example native_log -- unix:///run/cuttlefsd/b.sock read
//! ```
//! Over `tcp://` the key's file is named by `CUTTLEFS_KEY`.

use cuttlefs_client::native::{
    Buffer, ConnectOptions, Done, NativeError, OpenOptions, Queue, Session, Trust,
};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// Appends that are under way at once.
const DEPTH: usize = 32;
const LINE_MAX: usize = 4096;
/// Space behind the end of the log that is made ready at once, for all appends of this process. Beyond it they go on, a little slower.
const GRANTED: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// Appends the line so often, many at once, and makes all of them durable at the end.
fn append_many(session: &Session, count: usize, line: &str) -> Result<(), Box<dyn Error>> {
    let file = session.open("log", OpenOptions::CREATE)?;
    let mut queue = Queue::new(session, DEPTH)?;
    let buffer = Buffer::new(session, LINE_MAX)?;
    let line = format!("{}\n", line.replace('\n', " "));
    buffer.write(0, line.as_bytes())?;
    let grant = match file.grant_write(file.len()?, GRANTED) {
        Ok(grant) => Some(grant),
        Err(error) => {
            eprintln!("no write grant, so each append is a request: {error}");
            None
        }
    };
    let (mut posted, mut ends, mut unknown) = (0, Vec::new(), 0);
    let requests_before = requests(session);
    while posted < count || queue.outstanding() > 0 {
        while posted < count && queue.outstanding() < DEPTH {
            // All of them take the same bytes, which nobody changes.
            queue.post_append(posted as u64, &file, (&buffer, 0, line.len()))?;
            posted += 1;
        }
        queue.wait(&mut ends, DEPTH, LONG);
        for end in ends.drain(..) {
            match end.result {
                Ok(Done::Written { len, .. }) if len == line.len() => {}
                // The server was killed meanwhile. To append again might append twice.
                Err(NativeError::MayBeDone) => unknown += 1,
                other => return Err(format!("append {}: {other:?}", end.token).into()),
            }
        }
    }
    let requests = requests(session) - requests_before;
    file.sync()?;
    println!(
        "{} appended{} with {requests} requests",
        count - unknown,
        if unknown > 0 { format!(" ({unknown} may be or not)") } else { String::new() }
    );
    drop(grant);
    Ok(())
}

fn requests(session: &Session) -> u64 {
    session.figures().into_iter().find(|(name, _)| *name == "rpc_requests").map_or(0, |(_, count)| count)
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

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("native_log: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
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
