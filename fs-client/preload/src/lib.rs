//! The library that `cuttlefs preload` loads into programs: reads of files of cuttlefs mounts get their bytes by the native API, past FUSE.
//!
//! **The kernel does everything else, and everything that is in doubt.** It opens (so names, rights, `O_TRUNC` are as ever), writes, maps, locks, and
//! keeps the file offset, which may be shared with other descriptors and processes. So nothing has to be followed: each read asks the kernel which file
//! a descriptor is ([`descriptor`]), and moves the offset there. `docs/native.md`, "Preload", says what programs can rely on.
//!
//! * `edge` has the C library's functions that are replaced: the only module with pointers of programs.
//! * `kernel` calls the functions that were replaced; `descriptor` asks what a descriptor is.
//! * `reader` decides about a read, and does it; `files` remembers files; `maps` remembers which are mapped for writing.
//! * `engine` is the thread that connects and opens. It has a descriptor table of its own: programs close descriptors that they do not know.
//! * `state` is what all of it shares, and what a fork leaves of it.
//!
//! # Signals, forks, exec
//! All threads block all signals. A handler that reads in the middle of a read leaves it to the kernel. A forked process leaves all to the kernel if
//! its parent had a session: threads and connections are the parent's. A program that is started anew begins anew.

mod descriptor;
mod edge;
mod engine;
mod files;
mod kernel;
mod maps;
mod reader;
mod state;
