//! `vmseal lab`.

use clap::Subcommand;
use vmseal_lab::catalogue::Listed;

use super::Columns;

#[derive(Subcommand)]
pub enum Lab {
    /// Compare disks: vmseal encrypted and plain, QEMU's storage daemon, and nbdkit
    Disk(vmseal_lab::BenchArguments),
    /// List the experiments that `vmseal lab run` has
    #[command(visible_alias = "ls")]
    List(Columns<Listed>),
    /// Run experiments: encrypted beside plain, with what is claimed beside what is found
    Run(vmseal_lab::run::RunArguments),
}
