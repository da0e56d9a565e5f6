//! `vmseal task`.

use std::time::Duration;

use clap::{Arg, Subcommand};
use vmseal_api::model;

use super::wait::duration;
use super::{DryRun, List, Show};

/// Tasks have no names.
fn of_task(arg: Arg) -> Arg {
    arg.value_name("TASK").help("The task's id")
}

#[derive(Subcommand)]
pub enum Task {
    /// List the tasks
    #[command(visible_alias = "ls")]
    List {
        /// Only tasks in this state
        #[arg(long, value_name = "STATE", value_parser = ["queued", "running", "waiting", "rolling-back", "done", "cancelled", "failed", "unknown"])]
        state: Option<String>,
        #[command(flatten)]
        list: List<model::Task>,
    },
    /// Show one task
    #[command(mut_arg("name", of_task))]
    Show(Show),
    /// Wait for the end of tasks; the exit code is 0 when all are done, else that of the first that is not
    Wait {
        /// The tasks' ids
        #[arg(value_name = "TASK", required = true)]
        tasks: Vec<String>,
        /// Wait no longer than this (30s, 5m, 1h); the tasks go on, and the exit code is 9
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        timeout: Option<Duration>,
    },
    /// Show how tasks advance until all have ended, with a bar for each on a terminal
    Watch {
        /// The tasks' ids; without, all that run now
        #[arg(value_name = "TASK")]
        tasks: Vec<String>,
    },
    /// Stop a task that runs, and undo what it has done
    Cancel {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Say that you have seen to what a task left: its alarm is cleared
    ///
    /// For a task that ended as unknown. A task that another version of vmseal began, and this one cannot carry out,
    /// ends as unknown, and its VM is free for other tasks.
    Resolve {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
