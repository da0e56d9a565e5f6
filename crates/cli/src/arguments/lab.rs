//! `vmseal lab`.

use clap::Subcommand;

#[derive(Subcommand)]
pub enum Lab {
    /// Compare disks: vmseal encrypted and plain, and QEMU's storage daemon
    Disk(vmseal_lab::BenchArguments),
}
