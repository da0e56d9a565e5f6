//! The atomics of the modules whose interleavings are tried one by one: tests/interleavings includes those
//! modules as they are, where this name stands for Shuttle's.

pub(crate) use std::sync::atomic;
