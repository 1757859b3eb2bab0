//! The replay of the log's files at a start.
//!
//! # How it works
//! All whole records of the log's life are collected from `tail-*` and `direct-*` and sorted by number. Those behind the checkpoint, up to the first
//! gap, are put into overlays. Then there are two cases:
//! * The files are *as a process leaves them*: all of these records are in `tail-*`, those of one file behind those of the other, and nothing is
//!   behind the gap. Then the store goes on where that process was: with the same life, files and layers. The records of the file that the process
//!   had filled first are the frozen layer, of which a checkpoint is made. So a start after a kill writes nothing.
//! * They are not, because the power failed. Then all of these records go into a checkpoint, and the log is begun anew, with another life.
//!
//! # Why going on is right
//! A number is given out again only if no whole record has it in any of the files: a record that a kill cut off is overwritten in its place, and can
//! never become whole. A power loss may leave whole records behind a gap; then another life begins, and they are never read again. So in one life one
//! number is one batch. The invariants of numbers, files and checkpoints (`tail`, `direct`) hold over a start as they do between two checkpoints.
//!
//! # Failure
//! A durable record that is missing is an error: see the table in `tail`.
//!
//! # Bound
//! The files' bytes (128 MiB; a longer file than any log can be is refused), and the overlays.

use super::direct;
use super::logged::{self, LogError};
use super::overlay::{Overlay, Records};
use super::tail::{self, FILE_MOST_BYTES, FILES, HEADER_BYTES, Left, Record};
use crate::meta::record::RecordError;
use std::path::Path;

/// The result of a replay.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// The number of the last batch, in the checkpoint or behind it.
    pub last: u64,
    /// The number of batches behind the checkpoint.
    pub batches: u64,
    /// The bytes of these batches.
    pub bytes: u64,
    /// The layer of which the process before was making a checkpoint, and its last batch.
    pub frozen: Option<(Overlay, u64)>,
    /// The other changes.
    pub active: Overlay,
    /// Where the log goes on; `None` if it must be begun anew, behind a checkpoint of all batches.
    pub left: Option<Left>,
}

/// A record, and where it was found.
struct Found<'a> {
    number: u64,
    batch: &'a [u8],
    /// The index of its `tail-*`; the files after these are `direct-*`.
    file: usize,
    /// The offset behind it.
    end: u64,
}

/// Reads the files of `directory`, whose checkpoint has all batches up to `applied`.
///
/// # Errors
/// If a durable batch is missing, a whole record does not parse, or the log is of another version.
pub(super) fn read(directory: &Path, applied: u64) -> Result<Replay, LogError> {
    let [first, second] = FILES.map(|name| logged::read(directory, name, FILE_MOST_BYTES));
    let tails = [first?, second?];
    if let Some(found) = tails.iter().find_map(|bytes| tail::other_version_of(bytes)) {
        return Err(LogError::Version { found, known: tail::VERSION });
    }
    let lives = tails.each_ref().map(|bytes| tail::life_of(bytes));
    let Some(any) = lives[0].or(lives[1]) else { return Ok(Replay { last: applied, ..Replay::default() }) };
    let direct = direct::read(directory)?;
    let in_tails = tails.iter().enumerate().flat_map(|(file, bytes)| {
        let records = tail::records(lives[file].unwrap_or(any), bytes);
        records.into_iter().map(move |(end, record)| (file, end, record))
    });
    let in_direct = direct.iter().flat_map(|bytes| direct::records(any, bytes));
    let in_direct = in_direct.map(|record| (FILES.len(), 0, record));
    let (mut found, mut durable) = (Vec::new(), 0);
    for (file, end, Record { persistent, batch }) in in_tails.chain(in_direct) {
        durable = durable.max(persistent);
        let number = logged::number(batch)?;
        // Most of a file may be batches that the checkpoint has.
        if number > applied {
            found.push(Found { number, batch, file, end: end as u64 });
        }
    }
    let (found, last, has_gap) = without_gap(found, applied);
    if durable > last {
        return Err(LogError::Damaged { missing: last + 1, durable });
    }
    let (frozen, active) =
        found.split_at(found.iter().position(|next| next.file != found[0].file).unwrap_or(0));
    let left = (!has_gap).then(|| left(&tails, lives, frozen, active)).flatten();
    let bytes = found.iter().map(|found| found.batch.len() as u64).sum();
    let mut replay = Replay { last, batches: found.len() as u64, bytes, left, ..Replay::default() };
    if let Some(turned) = frozen.last().filter(|_| replay.left.is_some()) {
        replay.frozen = Some((Overlay::of(records_of(frozen)?), turned.number));
        replay.active = Overlay::of(records_of(active)?);
    } else {
        replay.active = Overlay::of(records_of(&found)?);
    }
    Ok(replay)
}

/// The records that these batches make, computed by two threads if a second one can be had.
fn records_of(batches: &[Found<'_>]) -> Result<Records, RecordError> {
    let (older, newer) = batches.split_at(batches.len() / 2);
    let (mut records, mut later) = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("replay".to_owned()).spawn_scoped(scope, || put(newer));
        let older = put(older);
        // A process that gets no thread does it alone.
        let newer = thread.map_or_else(
            |_| put(newer),
            |thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        );
        Ok::<_, RecordError>((older?, newer?))
    })?;
    records.append(&mut later);
    Ok(records)
}

fn put(batches: &[Found<'_>]) -> Result<Records, RecordError> {
    let mut records = Records::new();
    for found in batches {
        for change in logged::changes(found.batch)? {
            let (key, value) = change?;
            records.insert(key.into(), value.map(Into::into));
        }
    }
    Ok(records)
}

/// The batches that follow `applied` up to a gap, in order and once each; the last number; and whether there is a gap.
fn without_gap(mut found: Vec<Found<'_>>, applied: u64) -> (Vec<Found<'_>>, u64, bool) {
    found.sort_by_key(|found| found.number);
    // A copy of a record is that of a direct write, or is in the contents of a file: the bytes of a torn record are searched as well.
    found.dedup_by_key(|found| found.number);
    let is_next = |(next, found): (u64, &Found<'_>)| found.number == next;
    let len = (applied + 1..).zip(&found).take_while(|pair| is_next(*pair)).count();
    let (last, gap) = (applied + len as u64, found.get(len));
    if let Some(Found { number, .. }) = gap {
        tracing::warn!(
            expected = last + 1,
            found = number,
            "metadata's log has a gap; what follows it was never durable"
        );
    }
    let has_gap = gap.is_some();
    found.truncate(len);
    (found, last, has_gap)
}

/// The place at which the log goes on. `None` if the log must be begun anew: if its files are not of one life, if the frozen or the active records
/// lie in more than one file, or if a record is one of a direct write.
fn left(
    tails: &[Vec<u8>; 2],
    lives: [Option<u64>; 2],
    frozen: &[Found<'_>],
    active: &[Found<'_>],
) -> Option<Left> {
    let [Some(life), Some(other)] = lives else { return None };
    let file_of = |found: &[Found<'_>]| found.last().map(|last| (last.file, last.end));
    let is_one = |found: &[Found<'_>]| found.iter().all(|next| next.file == found[0].file);
    let is_left = life == other && is_one(frozen) && is_one(active);
    let mut lens = [HEADER_BYTES as u64; 2];
    for (file, end) in file_of(frozen).into_iter().chain(file_of(active)) {
        // A record of `direct-*` has no place here.
        *lens.get_mut(file)? = end;
    }
    let current = file_of(active).map_or(0, |(file, _)| file);
    let filled = tails.each_ref().map(|bytes| bytes.len() as u64);
    is_left.then_some(Left { life, current, lens, filled })
}

#[cfg(test)]
mod tests {
    use super::super::made::{self, DIRECT, LIFE, TAILS};
    use super::*;
    use crate::meta::store::Batch;

    fn whole(number: u64) -> Vec<u8> {
        let mut batch = Batch::default();
        batch.put([number as u8], vec![7; 40]);
        made::record(LIFE, 0, number, &batch)
    }

    /// The replay of files with these batches, behind a checkpoint of batches 1 and 2.
    fn found(files: [(&str, &[u64]); 2]) -> Replay {
        let directory = tempfile::tempdir().expect("directory");
        for (name, numbers) in files {
            let records: Vec<_> = numbers.iter().map(|number| whole(*number)).collect();
            let bytes =
                if DIRECT.contains(&name) { made::direct(&records) } else { made::tail(LIFE, &records) };
            std::fs::write(directory.path().join(name), bytes).expect("write");
        }
        read(directory.path(), 2).expect("replays")
    }

    fn keys(overlay: &Overlay) -> Vec<u8> {
        let mut keys = Vec::new();
        let visited = overlay.visit(|key, _| {
            keys.push(key[0]);
            Ok::<_, std::convert::Infallible>(())
        });
        visited.map_or_else(|never| match never {}, |()| keys)
    }

    /// The other file is overwritten after the next switch, so a checkpoint must have all of its batches by then.
    #[test]
    fn what_no_checkpoint_has_of_the_file_that_was_turned_from_is_a_layer_of_its_own() {
        for [older, newer] in [[0, 1], [1, 0]] {
            let replay = found([(TAILS[older], &[3, 4]), (TAILS[newer], &[5, 6])]);
            let (frozen, turned) = replay.frozen.expect("a checkpoint is to be made of it");
            assert_eq!((keys(&frozen), turned, keys(&replay.active)), (vec![3, 4], 4, vec![5, 6]));
            let left = replay.left.expect("it is as a process leaves it");
            assert_eq!((left.current, replay.last, replay.batches), (newer, 6, 4));
            // A file whose batches are all in the checkpoint makes no layer: it may be overwritten.
            let replay = found([(TAILS[older], &[1, 2]), (TAILS[newer], &[3, 4])]);
            assert!(replay.frozen.is_none() && keys(&replay.active) == [3, 4]);
            assert_eq!(replay.left.expect("as a process leaves it").current, newer);
        }
        // All batches go into one checkpoint, behind which the log is begun anew.
        let replay = found([(TAILS[0], &[3, 4]), (DIRECT[0], &[5])]);
        assert!(replay.frozen.is_none() && replay.left.is_none() && keys(&replay.active) == [3, 4, 5]);
    }
}
