//! `vmseal task`.

use clap::Subcommand;

use super::Name;

#[derive(Subcommand)]
pub enum Task {
    /// List the tasks
    #[command(visible_alias = "ls")]
    List,
    /// Show one task
    Show(Name),
    /// Follow a task to its end
    Wait(Name),
    /// Stop a task and undo what it did
    Cancel(Name),
}
