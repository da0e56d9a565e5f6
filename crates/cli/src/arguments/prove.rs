//! `vmseal vm prove`.

use super::{DryRun, Wait};

#[derive(clap::Args)]
pub struct Prove {
    /// The VM's name or id
    pub vm: String,
    /// Read every byte; else a sample of 64 MiB of each file, spread evenly
    #[arg(long, conflicts_with = "last")]
    pub all: bool,
    /// Read the same sample as a proof that printed this number
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["all", "last"])]
    pub seed: Option<u32>,
    /// Show the last proof, and make no new one
    #[arg(long, conflicts_with_all = ["dry_run", "no_wait"])]
    pub last: bool,
    #[command(flatten)]
    pub dry_run: DryRun,
    #[command(flatten)]
    pub wait: Wait,
}
