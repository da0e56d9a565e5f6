//! Where data rests.

pub mod file;
pub mod mem;
pub mod qcow2;
pub mod sync;
pub mod uring;
