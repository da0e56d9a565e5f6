//! Defects of a library that must not end the process, but only fail the operation. Any other panic
//! does end the process.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run`; none if it panics. The objects it used must not be used any more then.
pub fn run<T>(run: impl FnOnce() -> T) -> Option<T> {
    CONTAINED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(run));
    CONTAINED.set(false);
    outcome.ok()
}

/// Whether a panic of this thread is caught by [`run`]: a panic hook does not end the process then.
#[must_use]
pub fn is_contained() -> bool {
    CONTAINED.get()
}
