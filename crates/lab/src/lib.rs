//! The benchmark: measures what encryption costs on the hardware it runs on.
//!
//! | module | subject |
//! |---|---|
//! | [`arguments`] | what a user may choose, and the way from there to a report |
//! | [`systems`] | the servers under test |
//! | [`load`], [`pattern`], [`clock`] | driving one and measuring it |
//! | [`sections`] | what is measured where |
//! | [`experiment`], [`idle`], [`computed_limit`] | the order of measuring; disks without work; what the machine could do at best |
//! | [`statistics`], [`goals`] | what may be concluded |
//! | [`report`], [`tables`], [`machine`] | the results as JSON and as tables, and the machine |

pub mod arguments;
pub mod clock;
pub mod computed_limit;
pub mod experiment;
pub mod goals;
pub mod idle;
pub mod load;
pub mod machine;
pub mod pattern;
pub mod report;
pub mod sections;
pub mod statistics;
pub mod systems;
pub mod tables;

pub use arguments::{BenchArguments, BenchError, narrate, run};
