//! The library that `cuttlefs swap` loads into programs: their anonymous memory comes under a userfaultfd, and leaves when the swapper asks for it.
//! `docs/odrp.md`, "Remote swap", says what programs can rely on; `cuttlefs_client::swap` is the other end.
//!
//! # Which memory
//! * **malloc(3) of the C library**: it gets one large heap at the beginning, and is told to take everything from there (`begin`).
//! * **mmap(2) of anonymous private memory**, where a program calls the C library for it: from an arena of addresses (`arena`, `edge`). What is unmapped
//!   there is given up and kept, so no other mapping ever takes the place of one that is just being moved.
//!
//! Stacks, static variables, files, memory that programs share or may execute: the kernel's, as ever.
//!
//! # The parts
//! `begin` runs before the program; `fork` in a child that was forked; `servant` is the thread that moves pages, and ends the process if the swapper is
//! gone; `edge` has the C library's functions that are replaced; `arena` finds addresses.
//!
//! # Invariants
//! Nothing in `edge`, `arena` and `servant` allocates: they run inside of allocators, and where the memory of allocators is missing.

mod arena;
mod begin;
mod edge;
mod fork;
mod servant;
