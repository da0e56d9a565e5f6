//! Replaces the module of this name in the crate.

#[path = "../../../src/stack/waker.rs"]
#[allow(dead_code)]
pub mod waker;
