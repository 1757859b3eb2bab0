//! Tests of files on a simulated disk, with metadata in memory: the storage of a whole server in one thread.

mod answers;
mod behind_appends;
mod change_word;
mod concurrent;
mod crash;
mod defragment;
mod free_pages;
mod granted_races;
mod grants;
mod harness;
mod images;
mod policies;
mod promotion;
mod records;
mod reference;
mod scenarios;
mod scrub;
mod several_writers;
