//! A matrix that processes share, by the native API: it multiplies two matrices in files by several processes, each of which reads what it needs, a queue of
//! rows at a time, and writes its rows of the product.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example native_matrix -- unix:///run/cuttlefsd/b.sock 512 4
//! ```
//! makes matrices of 512 rows, multiplies them by four processes, checks some elements, and tells how many reads were one-sided. Over `tcp://` the key's
//! file is named by `CUTTLEFS_KEY`.

use cuttlefs_client::native::{Buffer, ConnectOptions, Done, File, OpenOptions, Queue, Session, Trust};
use std::error::Error;
use std::process::Command;
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

/// One process's part: rows `part`, `part + of`, ... would be scattered, so it takes a block of them.
fn work(session: &Session, size: usize, part: usize, of: usize) -> Result<(), Box<dyn Error>> {
    let open = |name: &str, options| session.open(format!("matrix.{name}"), options);
    let (a, b) = (open("a", OpenOptions::READ)?, open("b", OpenOptions::READ)?);
    let product = open("product", OpenOptions::READ_WRITE)?;
    let (first, end) = (size * part / of, size * (part + 1) / of);
    let mut mine = vec![vec![0.0; size]; end - first];
    let mut left = vec![Vec::new(); end - first];
    rows(session, &a, size, first..end, |row, numbers| left[row - first] = numbers.to_vec())?;
    // Row k of b adds to each row of the product, times element k of that row of a.
    rows(session, &b, size, 0..size, |k, numbers| {
        for (sums, factors) in mine.iter_mut().zip(&left) {
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += factors[k] * number);
        }
    })?;
    for (row, sums) in (first..).zip(&mine) {
        product.write_at((row * size * NUMBER) as u64, &bytes_of(sums))?;
    }
    product.sync()?;
    let reads = session.figures().into_iter().find(|(name, _)| *name == "onesided_reads");
    println!("process {part}: {} one-sided reads", reads.map_or(0, |(_, count)| count));
    Ok(())
}

fn multiply(session: &Session, url: &str, size: usize, processes: usize) -> Result<(), Box<dyn Error>> {
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
    }
    let since = Instant::now();
    let program = std::env::current_exe()?;
    let start = |part: usize| {
        let numbers = [size, processes, part].map(|number| number.to_string());
        Command::new(&program).arg(url).args(numbers).spawn()
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

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let trust = Trust { key: std::env::var_os("CUTTLEFS_KEY").map(Into::into), server_user: None };
    let connect = |url: &str| Session::connect(url, ConnectOptions { trust, ..ConnectOptions::default() });
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [url, size, processes] => match (size.parse()?, processes.parse()?) {
            (size @ 1..=4096, processes @ 1..=64) => multiply(&connect(url)?, url, size, processes),
            _ => Err("a size is 1 to 4096, and the processes 1 to 64".into()),
        },
        [url, size, processes, part] => {
            work(&connect(url)?, size.parse()?, part.parse()?, processes.parse()?)
        }
        _ => Err("usage: native_matrix URL SIZE PROCESSES".into()),
    }
}
