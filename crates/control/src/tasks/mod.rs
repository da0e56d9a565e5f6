//! Durable work: operations as steps with do and undo, recorded before and after each.
//!
//! | module | what |
//! |---|---|
//! | [`operation`] | which operations there are, and their steps |
//! | [`engine`] | carries operations out, across crashes of the server |
//! | `create_vm`, `start_vm`, `stop_vm`, `recrypt_vm`, `export_disk`, `delete_vm` | what each step does |

mod create_vm;
mod delete_vm;
pub mod engine;
mod export_disk;
pub mod operation;
mod recrypt_vm;
mod run;
mod start_vm;
mod stop_vm;

pub use engine::{Engine, Retry};
pub use operation::Operation;

#[cfg(test)]
mod tests;
