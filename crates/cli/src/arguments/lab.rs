//! `vmseal lab`.

use clap::Subcommand;

#[derive(Subcommand)]
pub enum Lab {
    /// Compare disks: vmseal encrypted and plain, QEMU's storage daemon, and nbdkit
    Disk(vmseal_lab::BenchArguments),
    /// List the experiments that `vmseal lab run` has
    #[command(visible_alias = "ls")]
    List,
    /// Run experiments: encrypted beside plain, with what is claimed beside what is found
    Run(vmseal_lab::run::RunArguments),
}
