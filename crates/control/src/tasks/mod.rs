//! Durable work: operations as steps with do and undo, recorded before and after each.
//!
//! | module | what |
//! |---|---|
//! | `steps` | which steps each operation has ([`crate::operation`]), and how far a task is |
//! | `step` | what a step is: name, do, undo, whom it waits for |
//! | `create_vm`, `start_vm`, `stop_vm`, `recrypt_vm`, `export_disk`, `delete_vm` | the steps of each operation |
//! | [`engine`] | begins, cancels, resolves tasks, across crashes of the server |
//! | `environment` | what every task is carried out with; how its state is recorded |
//! | `runner` | carries one task out |
//! | `waits` | what a step that failed is waited for |
//! | `limits` | how much of a kind happens at a time |
//! | `attention` | alarms about tasks that need an operator |
//! | `run` | what a step has to work with |

mod attention;
mod create_vm;
mod delete_vm;
pub mod engine;
mod environment;
mod export_disk;
mod limits;
mod recrypt_vm;
mod run;
mod runner;
mod start_vm;
mod step;
pub(crate) mod steps;
mod stop_vm;
mod waits;

pub use engine::Engine;
pub use environment::Retry;

#[cfg(test)]
mod tests;
