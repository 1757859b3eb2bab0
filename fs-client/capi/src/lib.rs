//! The native API for C: `libcuttlefs.so`, with `include/cuttlefs.h`, which says what each function does.
//!
//! Here is translation only: pointers to references, errors to negative errnos, and nothing else. It is the one place of the native API with errnos and
//! with `unsafe`. A panic does not cross into C: functions are `extern "C"`, so a panic ends the process. `tests/c_program.rs` compiles a C
//! program with the header and runs it.
//!
//! * `session`, `file`, `defragment` (of files, too), `regions` (keys and grants), `buffer`, `queue`: the functions, by handle.
//! * `forked`: a child of fork(2), which has nothing of it. `pointers`: what C hands over, checked. `errors`: errnos, and the words for people. `layout`: structs that both sides know.

mod buffer;
mod defragment;
mod errors;
mod file;
mod forked;
mod layout;
mod pointers;
mod queue;
mod regions;
mod session;
