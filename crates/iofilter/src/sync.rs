//! The atomics, locks and threads of the modules whose interleavings are tried one by one: tests/interleavings
//! includes those modules as they are, where these names stand for Shuttle's.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread::JoinHandle;
