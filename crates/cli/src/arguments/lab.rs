//! `vmseal lab`.

use clap::Subcommand;

#[derive(Subcommand)]
pub enum Lab {
    /// Compare disks: vmseal encrypted and plain, QEMU's storage daemon, and nbdkit
    Disk(vmseal_lab::BenchArguments),
}
