//! The locks of a file and of its pages, and the atomics beside them. With the feature `model-check` a model checker provides them (`files::model`), as
//! it provides what the page protocol has of this kind (`cuttlefs_common::sync`).
//!
//! The checker switches between threads where they use one of these, and knows no other lock. So whoever uses one of these must hold none but these,
//! wherever a model comes along: in the model a lock that the checker does not know would never be had.

#[cfg(feature = "model-check")]
mod modelled;

pub(crate) use cuttlefs_common::sync::Mutex;
#[cfg(feature = "model-check")]
pub(crate) use modelled::{
    AsyncMutex, AsyncMutexGuard, AsyncRwLock, AsyncRwLockReadGuard, AtomicBool, AtomicU32, MutexGuard,
    RwLock, RwLockReadGuard, RwLockWriteGuard,
};
#[cfg(not(feature = "model-check"))]
pub(crate) use {
    async_lock::{
        Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard, RwLock as AsyncRwLock,
        RwLockReadGuard as AsyncRwLockReadGuard,
    },
    parking_lot::{MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
    std::sync::atomic::{AtomicBool, AtomicU32},
};
