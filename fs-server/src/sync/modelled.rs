//! The model checker's locks with the interfaces of the product's. A future that waits for one blocks its thread, as the checker knows it, and is never
//! pending. Works inside `loom::model` only.

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32};
pub(crate) use loom::sync::{MutexGuard as AsyncMutexGuard, RwLockReadGuard as AsyncRwLockReadGuard};
pub(crate) use loom::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// Why no lock of a model is poisoned.
const ENDED: &str = "a panic ends the model";

/// A plain read-write lock.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect(ENDED)
    }

    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        self.0.try_read().ok()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect(ENDED)
    }
}

/// An async mutex.
#[derive(Debug, Default)]
pub(crate) struct AsyncMutex<T>(loom::sync::Mutex<T>);

impl<T> AsyncMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) async fn lock(&self) -> AsyncMutexGuard<'_, T> {
        self.0.lock().expect(ENDED)
    }

    pub(crate) fn try_lock(&self) -> Option<AsyncMutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

/// An async read-write lock.
#[derive(Debug, Default)]
pub(crate) struct AsyncRwLock<T>(loom::sync::RwLock<T>);

impl<T> AsyncRwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(crate) async fn read(&self) -> AsyncRwLockReadGuard<'_, T> {
        self.0.read().expect(ENDED)
    }

    pub(crate) async fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect(ENDED)
    }

    pub(crate) fn try_read(&self) -> Option<AsyncRwLockReadGuard<'_, T>> {
        self.0.try_read().ok()
    }

    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.0.try_write().ok()
    }
}
