//! `vmseal task`.

use clap::Subcommand;
use vmseal_api::model;

use super::{List, Name};

#[derive(Subcommand)]
pub enum Task {
    /// List the tasks
    #[command(visible_alias = "ls")]
    List(List<model::Task>),
    /// Show one task
    Show(Name),
    /// Follow a task to its end
    Wait(Name),
    /// Stop a task and undo what it did
    Cancel(Name),
}
