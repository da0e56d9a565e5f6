//! `vmseal task`.

use std::time::Duration;

use clap::Subcommand;
use vmseal_api::model;

use super::wait::duration;
use super::{List, Name, Show};

#[derive(Subcommand)]
pub enum Task {
    /// List the tasks
    #[command(visible_alias = "ls")]
    List {
        /// Only those in this state
        #[arg(long, value_parser = ["running", "undoing", "done", "failed", "unknown"])]
        state: Option<String>,
        #[command(flatten)]
        list: List<model::Task>,
    },
    /// Show one task
    Show(Show),
    /// Wait for the end of tasks; the exit code says whether all are done
    Wait {
        /// Their ids
        #[arg(value_name = "TASK", required = true)]
        tasks: Vec<String>,
        /// Wait no longer than this (30s, 5m, 1h); the tasks go on, and the exit code is 9
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        timeout: Option<Duration>,
    },
    /// Watch how tasks advance until all have ended
    Watch {
        /// Their ids; else all that run now
        #[arg(value_name = "TASK")]
        tasks: Vec<String>,
    },
    /// Stop a task and undo what it did
    Cancel(Name),
}
