//! Tests of tiering IO on a simulated disk and metadata twin: a whole server's storage in one thread.

mod answers;
mod concurrent;
mod crash;
mod harness;
mod images;
mod policies;
mod promotion;
mod records;
mod reference;
mod scenarios;
mod scrub;
mod several_writers;
