//! The synchronisation of the page protocol: its fences, and the lock of the free frames. With the feature `model-check` a model checker provides
//! them, and also the words of shared memory that a model names; all other code of the protocol is that of the product.

#[cfg(feature = "model-check")]
mod modelled;

#[cfg(feature = "model-check")]
pub use modelled::{Mutex, Words, fence};
#[cfg(not(feature = "model-check"))]
pub use {parking_lot::Mutex, std::sync::atomic::fence};
