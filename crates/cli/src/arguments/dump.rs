//! `vmseal vm dump` and `vmseal dump`.

use clap::{Subcommand, ValueEnum};
use vmseal_api::{dump, model};

use super::{DryRun, List, Wait};

#[derive(clap::Args)]
pub struct TakeDump {
    /// The VM's name or id
    pub vm: String,
    /// The core dump's name; by default the first of dump-1, dump-2 and so on that is free
    pub name: Option<String>,
    /// Its format
    #[arg(long, value_enum, default_value_t)]
    pub format: DumpFormat,
    /// Decrypt it to this new file of the host as well; its directory is one of the agent's --transfer-directory
    #[arg(long, value_name = "FILE")]
    pub decrypt_to: Option<std::path::PathBuf>,
    #[command(flatten)]
    pub dry_run: DryRun,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Clone, Copy, Default, ValueEnum)]
pub enum DumpFormat {
    /// An ELF core file, as long as the guest's memory: for gdb and crash
    #[default]
    Elf,
    /// A compressed dump, flattened as by makedumpfile: for crash
    Kdump,
}

impl From<DumpFormat> for dump::DumpFormat {
    fn from(format: DumpFormat) -> Self {
        match format {
            DumpFormat::Elf => Self::Elf,
            DumpFormat::Kdump => Self::Kdump,
        }
    }
}

#[derive(Subcommand)]
pub enum Dump {
    /// List the core dumps of a VM, oldest first
    #[command(visible_alias = "ls")]
    List {
        /// The VM's name or id
        vm: String,
        #[command(flatten)]
        how: List<model::Dump>,
    },
    /// Show a core dump
    Show {
        /// The VM's name or id
        vm: String,
        /// The core dump's name, or its id
        dump: String,
        /// Stay, and print a line for every change until it is removed
        #[arg(short, long)]
        watch: bool,
    },
    /// Decrypt a core dump to a file of the VM's host
    ///
    /// The file holds the guest's memory in the clear, with its keys and passwords. The server records an event.
    Decrypt {
        /// The VM's name or id
        vm: String,
        /// The core dump's name, or its id
        dump: String,
        /// The new file, as an absolute path on the host, in one of the agent's --transfer-directory
        #[arg(long, value_name = "FILE")]
        to: std::path::PathBuf,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Delete a core dump; its VM may run
    #[command(visible_alias = "rm")]
    Delete {
        /// The VM's name or id
        vm: String,
        /// The core dump's name, or its id
        dump: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}
