//! `vmseal host`.

use clap::Subcommand;
use vmseal_api::drain::{PARALLEL_DEFAULT, PARALLEL_MAX};
use vmseal_api::model;
use vmseal_log::Levels;

use super::{DryRun, LEVELS_HELP, List, Show, Wait};
use crate::size::parse_size;

#[derive(Subcommand)]
pub enum Host {
    /// List the hosts
    #[command(visible_alias = "ls")]
    List(List<model::Host>),
    /// Show one host
    Show(Show),
    /// Show or change the log level of a host's agent and filters, until the agent restarts
    #[command(after_help = LEVELS_HELP)]
    LogLevel {
        /// The host's name or id
        name: String,
        /// The new levels
        #[arg(value_name = "LEVEL|TARGET=LEVEL,...")]
        levels: Option<Levels>,
    },
    /// Change the address of a host
    Set {
        /// The host's name or id
        name: String,
        /// The address and port at which the server reaches the agent (see `vmseal agent --listen`)
        #[arg(long, value_name = "HOST:PORT")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Move all VMs that run on a host to others before maintenance, or stop or leave them, as each says (`vm set --on-drain`). No VM
    /// is created or started there, or moved to it, until `host undrain`. VMs that are off stay where they are
    Drain {
        /// The host's name or id
        name: String,
        /// How many VMs are sent at a time
        #[arg(long, value_name = "NUMBER", default_value_t = PARALLEL_DEFAULT,
            value_parser = clap::value_parser!(u32).range(1..=i64::from(PARALLEL_MAX)))]
        parallel: u32,
        /// Shut down the guests of VMs that cannot be moved, as `vm stop` does
        #[arg(long)]
        stop_others: bool,
        /// Send each VM at most so fast, in bytes per second, such as 50M, at least 1MiB; 0 is no limit, as is none
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        rate: Option<u64>,
        /// Compress the memory of VMs before it is encrypted, where that gets it there sooner: for slow networks. Who watches the
        /// network learns something of the memory from how long what is sent is
        #[arg(long)]
        compress: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Give the VMs of a host that is down to others, one after the other, and start those that ran, as `vm evacuate` does. Those that
    /// cannot be evacuated stay, such as VMs with disks on directories. A host that answers is emptied with `host drain`
    Evacuate {
        /// The host's name or id
        name: String,
        /// The host that gets them, by name or id [default: for each the one with the most free memory that can take it]
        #[arg(long, value_name = "NAME")]
        to: Option<String>,
        /// Leave them off there: otherwise each is started that ran when the host was last heard
        #[arg(long)]
        no_start: bool,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Have VMs created and started on a host again, and moved to it. Those that were moved or stopped stay so
    Undrain {
        /// The host's name or id
        name: String,
        /// Cancel what moves or stops its VMs now, which otherwise goes on
        #[arg(long)]
        cancel: bool,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Create a token with which one machine may join, once, within 15 minutes
    Token {
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a host that has no datastores and no VMs
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
