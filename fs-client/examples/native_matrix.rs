//! A matrix that processes share, by the native API: it multiplies two matrices in files by several processes, each of which reads what it needs, a queue of
//! rows at a time, and writes its rows of the product. The processes open no names: each gets region keys, two for reading the factors and one for
//! writing its own rows and nothing else; and it writes them under a write grant, past the server's workers where the link has such verbs.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example native_matrix -- unix:///run/cuttlefsd/b.sock 512 4
//! ```
//! makes matrices of 512 rows, multiplies them by four processes, checks some elements, and tells how many reads were one-sided. Over `tcp://` the key's
//! file is named by `CUTTLEFS_KEY`.

use cuttlefs_client::native::{
    Buffer, ConnectOptions, Done, File, OpenOptions, Queue, RegionKey, Rights, Session, Trust,
};
use std::error::Error;
use std::process::Command;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const DEPTH: usize = 32;
const LONG: Duration = Duration::from_secs(60);
const NUMBER: usize = size_of::<f64>();

/// The element of a factor: small whole numbers, so that sums are exact.
fn element(which: &str, row: usize, column: usize) -> f64 {
    let salt = if which == "a" { 7 } else { 13 };
    ((row * salt + column * 3) % 11) as f64
}

/// Reads rows, many at once, and hands each to `take`.
fn rows(
    session: &Session,
    file: &File,
    size: usize,
    wanted: std::ops::Range<usize>,
    mut take: impl FnMut(usize, &[f64]),
) -> Result<(), Box<dyn Error>> {
    let row_len = size * NUMBER;
    let mut queue = Queue::new(session, DEPTH)?;
    let buffer = Buffer::new(session, DEPTH * row_len)?;
    let mut free: Vec<usize> = (0..DEPTH).collect();
    let (mut next, mut ends, mut bytes) = (wanted.start, Vec::new(), vec![0; row_len]);
    while next < wanted.end || queue.outstanding() > 0 {
        while next < wanted.end
            && let Some(place) = free.pop()
        {
            let token = (next * DEPTH + place) as u64;
            queue.post_read(token, file, (next * row_len) as u64, (&buffer, place * row_len, row_len))?;
            next += 1;
        }
        queue.wait(&mut ends, DEPTH, LONG);
        for end in ends.drain(..) {
            let (row, place) = (end.token as usize / DEPTH, end.token as usize % DEPTH);
            if end.result? != Done::Read(row_len) {
                return Err(format!("row {row} ends early").into());
            }
            buffer.read(place * row_len, &mut bytes)?;
            let numbers: Vec<f64> =
                bytes.as_chunks::<NUMBER>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
            take(row, &numbers);
            free.push(place);
        }
    }
    Ok(())
}

fn bytes_of(row: &[f64]) -> Vec<u8> {
    row.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// The rows of one process.
fn part_of(size: usize, part: usize, of: usize) -> std::ops::Range<usize> {
    size * part / of..size * (part + 1) / of
}

/// One process: multiplies the rows that its last key is for.
fn work(session: &Session, size: usize, keys: [&str; 3]) -> Result<(), Box<dyn Error>> {
    let [a, b, product] = keys.map(str::parse::<RegionKey>);
    let (a, b, product) = (session.redeem(&a?)?, session.redeem(&b?)?, session.redeem(&product?)?);
    let row_len = (size * NUMBER) as u64;
    let range = product.region().ok_or("it was opened by a key")?;
    let (first, end) = ((range.offset / row_len) as usize, (range.end() / row_len) as usize);
    let mut mine = vec![vec![0.0; size]; end - first];
    let mut left = vec![Vec::new(); end - first];
    rows(session, &a, size, first..end, |row, numbers| left[row - first] = numbers.to_vec())?;
    // Row k of b adds to each row of the product, times element k of that row of a.
    rows(session, &b, size, 0..size, |k, numbers| {
        for (sums, factors) in mine.iter_mut().zip(&left) {
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += factors[k] * number);
        }
    })?;
    let requests_before = figure(session, "rpc_requests");
    // It is held until the rows are there. A server without memory for it takes them by requests.
    let granted = product.grant_write(range.offset, range.len);
    for (row, sums) in (first..).zip(&mine) {
        product.write_at(row as u64 * row_len, &bytes_of(sums))?;
    }
    let requests = figure(session, "rpc_requests") - requests_before;
    product.sync()?;
    println!(
        "rows {first} to {end}: {} one-sided reads; {requests} requests to write {} rows{}",
        figure(session, "onesided_reads"),
        mine.len(),
        granted.err().map_or_else(String::new, |error| format!(" (no grant: {error})"))
    );
    Ok(())
}

fn figure(session: &Session, name: &str) -> u64 {
    session.figures().into_iter().find(|(found, _)| *found == name).map_or(0, |(_, count)| count)
}

fn multiply(session: &Session, url: &str, size: usize, processes: usize) -> Result<(), Box<dyn Error>> {
    let mut files = Vec::new();
    for name in ["a", "b", "product"] {
        let options = OpenOptions { truncate: true, ..OpenOptions::CREATE };
        let file = session.open(format!("matrix.{name}"), options)?;
        let row = |row| (0..size).map(|column| element(name, row, column)).collect::<Vec<_>>();
        if name == "product" {
            file.set_len((size * size * NUMBER) as u64)?;
        } else {
            let all: Vec<u8> = (0..size).flat_map(|index| bytes_of(&row(index))).collect();
            file.write_at(0, &all)?;
        }
        files.push(file);
    }
    // The keys are good as long as these files are open here.
    let row_len = (size * NUMBER) as u64;
    let (reading, both) = (Rights { read: true, write: false }, Rights { read: true, write: true });
    let of_factor = |file: &File| file.bind(0, size as u64 * row_len, reading, None);
    let factors = [of_factor(&files[0])?.to_string(), of_factor(&files[1])?.to_string()];
    let since = Instant::now();
    let program = std::env::current_exe()?;
    let start = |part: usize| -> Result<_, Box<dyn Error>> {
        let rows = part_of(size, part, processes);
        let key = files[2].bind(rows.start as u64 * row_len, rows.len() as u64 * row_len, both, None)?;
        let arguments = [size.to_string(), key.to_string()];
        Ok(Command::new(&program).args(["work", url]).args(&arguments).args(&factors).spawn()?)
    };
    let started = (0..processes).map(start).collect::<Result<Vec<_>, _>>()?;
    for mut process in started {
        if !process.wait()?.success() {
            return Err("a process failed".into());
        }
    }
    println!("{size} by {size} by {processes} processes in {:.2?}", since.elapsed());
    let product = session.open("matrix.product", OpenOptions::READ)?;
    for (row, column) in [(0, 0), (size / 2, size / 3), (size - 1, size - 1)] {
        let mut bytes = [0; NUMBER];
        product.read_at(((row * size + column) * NUMBER) as u64, &mut bytes)?;
        let expected: f64 = (0..size).map(|k| element("a", row, k) * element("b", k, column)).sum();
        if f64::from_le_bytes(bytes) != expected {
            return Err(format!("element {row}, {column} is wrong").into());
        }
    }
    println!("the product is right");
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("native_matrix: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let trust = Trust { key: std::env::var_os("CUTTLEFS_KEY").map(Into::into), server_user: None };
    let connect = |url: &str| Session::connect(url, ConnectOptions { trust, ..ConnectOptions::default() });
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [url, size, processes] => match (size.parse()?, processes.parse()?) {
            (size @ 1..=4096, processes @ 1..=64) if processes <= size => {
                multiply(&connect(url)?, url, size, processes)
            }
            _ => Err("a size is 1 to 4096, and the processes 1 to 64, a row or more for each".into()),
        },
        ["work", url, size, rows, a, b] => work(&connect(url)?, size.parse()?, [a, b, rows]),
        _ => Err("usage: native_matrix URL SIZE PROCESSES".into()),
    }
}
