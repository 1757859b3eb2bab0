//! Threads that the system does not give.

/// What is said when no thread can be started.
pub(crate) const NO_THREAD: &str =
    "cannot start a thread; raise the limit of processes (ulimit -u, pids.max, TasksMax=)";
