//! `vmseal task`.

use std::time::Duration;

use clap::{Arg, Subcommand};
use vmseal_api::model;

use super::wait::duration;
use super::{DryRun, List, Show};
use crate::size::parse_size;

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
    /// Wait for tasks to end; the exit code is 0 if all are done, else that of the first that is not
    Wait {
        /// The tasks' ids
        #[arg(value_name = "TASK", required = true)]
        tasks: Vec<String>,
        /// Stop waiting after this time (30s, 5m, 1h): the tasks go on, the exit code is 9
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        timeout: Option<Duration>,
    },
    /// Show the progress of tasks until they end
    ///
    /// On a terminal in place; else in lines on standard error, for each step, and each second for a migration. With -o json or yaml
    /// it prints the tasks' documents when they change, each second at most, and at their ends; JSON on one line each.
    Watch {
        /// The tasks' ids [default: all that are running]
        #[arg(value_name = "TASK")]
        tasks: Vec<String>,
    },
    /// Cancel a task, and undo what it has done
    Cancel {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        /// Only for a migration that waits at its switch for the other host: that host is gone for good, or has restarted since it ran the
        /// VM. The VM goes on as it was when it was sent; what it has done at that host is lost. Never use it while that host may run the
        /// VM: it would run twice
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Mark a task that ended as unknown as resolved, and clear its alarm
    ///
    /// Check its VM first. A task that another version of vmseal started, and that this version cannot continue,
    /// becomes unknown, and its VM is free for other tasks.
    Resolve {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Have a task that copies or reads disks stop doing so until it is resumed
    ///
    /// The tasks are those of `vmseal vm encrypt`, `decrypt`, `recrypt --deep` and `move`, until their guests are given the
    /// copies: the guest goes on, and what it changes meanwhile is copied afterwards; and those that make, read or merge disks: of
    /// `vm create`, `clone` and `prove`, `disk add` and `export`, `snapshot delete`, and `backup create`, `verify` and `restore`. It
    /// stays so over restarts of whatever.
    Pause {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Have a paused task go on where it was
    Resume {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Change the rate of a task that copies disks or sends a VM to another host, while it does
    Set {
        /// The task's id
        #[arg(value_name = "TASK")]
        name: String,
        /// Copy each disk, or send a VM, at most so fast, in bytes per second, such as 50M, at least 1MiB; 0 is no limit
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        rate: u64,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
