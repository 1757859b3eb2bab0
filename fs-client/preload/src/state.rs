//! What the library knows in this process, and what a fork leaves of it.

use crate::descriptor::Regular;
use crate::engine::Engine;
use crate::files::Files;
use crate::kernel;
use crate::maps::Mapped;
use cuttlefs_client::preload::{Count, Counts, OTHER_BUILD, PLAN_VARIABLE, Plan};
use cuttlefs_client::signals::{self, Signals};
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static STATE: OnceLock<State> = OnceLock::new();

/// Whether this process was forked from one with an engine, or in the middle of something, or is about to end (release; acquire).
static FORKED: AtomicBool = AtomicBool::new(false);

/// Whether an engine was started, or is about to be (release; acquire).
static STARTED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether the thread is in this library: a handler of a fault (SIGSEGV) that calls in again finds it set. Threads of the library's own have it set for good.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The state; see the module.
pub(crate) struct State {
    pub(crate) plan: Plan,
    pub(crate) files: Files,
    pub(crate) mapped: Mapped,
    counts: Option<Counts>,
    engine: OnceLock<Option<Engine>>,
}

/// While it lives, the thread is in this library, and no handler of a signal runs: it could leave by siglongjmp(3), with locks held for ever.
pub(crate) struct Inside {
    signals: Signals,
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
        signals::block_only(self.signals);
    }
}

/// Reads the plan. Called when the library is loaded, before the program begins.
pub(crate) fn begin() {
    kernel::look_up_all();
    // SAFETY: the function may run in a forked process: it loads and stores flags, and takes no lock.
    if unsafe { libc::pthread_atfork(None, None, Some(forked)) } != 0 {
        return;
    }
    // SAFETY: it reads a value that the kernel gave this process.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        // The program has rights that whoever set its environment has not.
        return;
    }
    let Some(text) = std::env::var_os(PLAN_VARIABLE) else { return };
    let Some(plan) = Plan::parse(&text) else { refuse() };
    let counts = plan.counts.as_deref().and_then(|path| Counts::open(path).ok());
    if let Some(counts) = &counts {
        counts.add(Count::Programs, 1);
    }
    let (files, mapped, engine) = (Files::default(), Mapped::default(), OnceLock::new());
    // It is called once.
    let _ = STATE.set(State { plan, files, mapped, counts, engine });
}

/// Says that the plan is of another build, and ends the process. To go on without a plan would be slow for no reason that anybody sees.
fn refuse() -> ! {
    let text = format!("cuttlefs preload: {OTHER_BUILD}\n");
    // SAFETY: the bytes live until the call returns. The program's own handlers are not run: none of it has begun.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(127);
    }
}

/// The program ends.
pub(crate) fn end() {
    if let Some(Some(engine)) = STATE.get().and_then(|state| state.engine.get())
        && !is_forked()
        && let Some(_inside) = enter()
    {
        engine.end();
        // What closes files later on must not be the last to have a session: its descriptors are none of the program's.
        FORKED.store(true, Ordering::Release);
    }
}

/// The state, if there is a plan.
pub(crate) fn get() -> Option<&'static State> {
    STATE.get()
}

/// Whether this process was forked from one that was using this library, or has said good-bye to the servers: then nothing of an engine, and no lock, is touched.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Acquire)
}

/// Called in a process that was just forked. Threads of the engine are the parent's, and so is a thread that holds a lock. A process whose parent had
/// neither begins as its parent would have.
extern "C" fn forked() {
    let is_locked = STATE.get().is_some_and(|state| state.files.is_locked() || state.mapped.is_locked());
    if STARTED.load(Ordering::Acquire) || is_locked {
        FORKED.store(true, Ordering::Release);
    }
}

/// Enters the library; `None` if the thread is in it.
pub(crate) fn enter() -> Option<Inside> {
    if is_inside() {
        return None;
    }
    let signals = signals::block(Signals::SENT);
    INSIDE.set(true);
    Some(Inside { signals })
}

/// Whether the thread is in the library, or one of its own.
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// The calling thread is one of the library's own.
pub(crate) fn stay_inside() {
    INSIDE.set(true);
}

impl State {
    /// The place of the mount with this device in the plan.
    pub(crate) fn mount_of(&self, device: (u32, u32)) -> Option<usize> {
        self.plan.mounts.iter().position(|mount| (mount.major, mount.minor) == device)
    }

    /// Whether what the kernel's page cache has of a file is read there: a copy out of the cache is faster than a message, and than nothing else.
    pub(crate) fn leaves_cached(&self, file: &Regular) -> bool {
        let mount = self.mount_of(file.id.device).and_then(|mount| self.plan.mounts.get(mount));
        !self.plan.take_cached && mount.is_some_and(|mount| !mount.is_mapped)
    }

    /// Whether somebody wants the counts.
    pub(crate) fn counts(&self) -> bool {
        self.counts.is_some()
    }

    pub(crate) fn count(&self, count: Count, number: u64) {
        if let Some(counts) = &self.counts {
            counts.add(count, number);
        }
    }

    /// The engine, which is started at the first use. `None`: it could not be.
    pub(crate) fn engine(&'static self) -> Option<&'static Engine> {
        STARTED.store(true, Ordering::Release);
        self.engine.get_or_init(|| Engine::start(self)).as_ref()
    }
}
