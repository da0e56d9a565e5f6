//! The atomics, locks and threads of the modules whose interleavings are tested exhaustively: tests/interleavings
//! includes those modules unchanged, and there these names mean Shuttle's types.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread::JoinHandle;
