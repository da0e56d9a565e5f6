//! Live migration: what goes from host to host.

pub mod figures;
pub mod placement;
pub mod transport;
