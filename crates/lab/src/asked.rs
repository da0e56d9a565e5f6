//! Whether this process was asked to end: a flag that a signal handler may set.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often what waits looks: seldom enough that nothing of it shows in what is measured meanwhile.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// No other data depends on it, so no memory ordering is needed.
static ASKED: AtomicBool = AtomicBool::new(false);

/// Notes that the end was asked for. A signal handler may call it.
pub(crate) fn note() {
    ASKED.store(true, Ordering::Relaxed);
}

/// Whether the end was asked for.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}
