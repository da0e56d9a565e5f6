//! What the unit tests stand on: a host in memory, and a control plane around it that can crash.

mod fake_host;
mod plant;

pub use fake_host::{Failure, FakeHost};
pub use plant::Plant;
