//! The ordering of the page protocol: its fences, and the lock of the free frames. In the feature `model-check` they are a model checker's,
//! and so are the words of shared memory that a model names; everything else of the protocol is the code that runs in the product.

#[cfg(feature = "model-check")]
mod modelled;

#[cfg(feature = "model-check")]
pub use modelled::{Mutex, Words, fence};
#[cfg(not(feature = "model-check"))]
pub use {parking_lot::Mutex, std::sync::atomic::fence};
