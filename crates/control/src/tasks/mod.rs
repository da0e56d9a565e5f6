//! Durable tasks: operations as steps with do and undo, recorded before and after each step.
//!
//! | module | what |
//! |---|---|
//! | `steps` | the steps of each operation ([`crate::operation`]), and the position of a task |
//! | `step` | the definition of a step: name, do, undo, what it waits for |
//! | `create_vm`, `clone_vm`, `start_vm`, `stop_vm`, `suspend_vm`, `reboot_vm`, `recrypt_vm`, `mirror_vm`, `migrate_vm`, `change_host`, `evacuate_vm`, `receive_vm`, `delete_vm`, `add_disk`, `remove_disk`, `grow_disk`, `export_disk`, `change_nics` | the steps of each operation |
//! | `temporary_snapshot` | snapshots that a task takes for itself, and drops |
//! | [`autostart`] | starts VMs after their hosts have rebooted |
//! | [`engine`] | begins, cancels, resolves tasks, across crashes of the server |
//! | `environment` | the environment of every task; how its state is recorded |
//! | `runner` | runs one task |
//! | `beside` | tasks beside which others change the power of their VM |
//! | `waits` | what a task waits for after a step failed |
//! | `limits` | concurrency limits |
//! | `run` | the context of a step |

mod add_disk;
pub(crate) mod adopt_vm;
pub mod autostart;
pub(crate) mod backups;
mod beside;
mod change_host;
mod change_nics;
mod clone_vm;
mod create_vm;
mod delete_vm;
mod dumps;
pub mod engine;
mod environment;
mod evacuate_vm;
mod export_disk;
mod fencing;
mod grow_disk;
mod held_steps;
mod job;
mod limits;
pub(crate) mod migrate_vm;
pub(crate) mod mirror_vm;
pub mod pacing;
mod prove_vm;
mod reboot_vm;
pub(crate) mod receive_vm;
mod recrypt_vm;
mod remove_disk;
mod run;
mod runner;
pub(crate) mod snapshots;
mod start_vm;
mod step;
pub(crate) mod steps;
mod stop_vm;
mod suspend_vm;
pub(crate) mod temporary_snapshot;
mod waits;

pub use engine::Engine;
pub use environment::Retry;

#[cfg(test)]
mod tests;
