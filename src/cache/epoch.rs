//! [`Epoch`]: which plans may write into the layers.
//!
//! It counts the clears that have begun; the epoch of the [state](super::state::State), which
//! a plan takes along, counts those that are done. So a plan is let in only if every clear that
//! began before it was made is done, and from the moment on that another one begins nobody is
//! let in. What a clear waits for can only become less, and neither a second layer nor any
//! other call is made to wait for it: nothing here waits while it holds another lock.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The epoch of the layers, and who is writing into them.
#[derive(Debug, Default)]
pub(super) struct Epoch {
    now: Mutex<Now>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct Now {
    epoch: u64,
    /// Layers in use.
    layers: usize,
}

/// A layer in use.
#[derive(Debug)]
pub(super) struct InUse<'a>(&'a Epoch);

impl Epoch {
    /// Lets a plan of `epoch` use a layer.
    ///
    /// # Errors
    /// The epoch that it is now, if it is another one.
    pub(super) fn enter(&self, epoch: u64) -> Result<InUse<'_>, u64> {
        let mut now = self.now();
        if now.epoch != epoch {
            return Err(now.epoch);
        }
        now.layers += 1;
        Ok(InUse(self))
    }

    /// Begins the next epoch and waits until no layer is in use.
    pub(super) fn advance(&self) {
        let mut now = self.now();
        now.epoch += 1;
        while now.layers > 0 {
            now = self.left.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
    }

    // No code that could panic runs while the lock is held.
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.0.now().layers -= 1;
        self.0.left.notify_all();
    }
}
