//! Where data rests.

pub mod file;
pub mod mem;
pub mod sync;
pub mod uring;
