//! The benchmark: measures what encryption costs on the hardware it runs on.
//!
//! | module | subject |
//! |---|---|
//! | [`arguments`] | what a user may choose, and the way from there to a report |
//! | [`systems`] | the servers under test |
//! | [`definition`], [`catalogue`], [`run`], [`claim`] | experiments as files, and running them |
//! | [`outcome`], [`storage`] | what measuring gives; where disks are |
//! | [`subject`], [`stop`], `children` | the order of measuring, whatever is measured; ending before it is through; processes |
//! | [`operation`] | operations of a whole installation |
//! | [`migration`] | running guests that move to another host, beside QEMU's own migration |
//! | [`ceph`] | a Ceph cluster on this machine |
//! | [`network`] | networks of the kernel |
//! | [`load`], [`pattern`], [`clock`] | driving one and measuring it |
//! | [`sections`] | what is measured where |
//! | [`experiment`], [`idle`], [`neighbour`], [`computed_limit`] | disks under load; disks without work; what the machine could do at best |
//! | [`metric`], [`statistics`], [`goals`] | what is compared, and what may be concluded |
//! | [`report`], [`tables`], [`machine`] | the results as JSON and as tables, and the machine |
//! | [`page`], [`plot`], [`course`] | the results for a browser |

pub mod arguments;
mod asked;
pub mod catalogue;
pub mod ceph;
mod children;
pub mod claim;
pub mod clock;
pub mod computed_limit;
pub mod course;
pub mod definition;
pub mod experiment;
pub mod goals;
pub mod idle;
mod installation;
pub mod load;
mod luks1;
pub mod machine;
pub mod metric;
pub mod migration;
pub mod neighbour;
pub mod network;
pub mod operation;
pub mod outcome;
pub mod page;
pub mod pattern;
pub mod plot;
mod qemu;
pub mod report;
pub mod run;
pub mod sections;
pub mod statistics;
pub mod stop;
pub mod storage;
pub mod subject;
pub mod system_error;
pub mod systems;
pub mod tables;

pub use arguments::{BenchArguments, BenchError, narrate, run};
