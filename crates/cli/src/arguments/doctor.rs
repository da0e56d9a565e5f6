//! `vmseal doctor`.

use std::path::PathBuf;

use clap::Args;
use vmseal_agent::host::doctor::Finding;

use super::Columns;

#[derive(Args)]
pub struct Doctor {
    /// The directory of the agent's certificate and key
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
    /// The data directory of a server on this machine
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/server")]
    pub data_dir: PathBuf,
    /// The QEMU program
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// The directory of the UEFI firmware, OVMF: the one that the agent is given
    #[arg(long, value_name = "DIR", default_value = vmseal_agent::FIRMWARE_DIRECTORY)]
    pub firmware_directory: PathBuf,
    /// The program of VMs' TPMs: the one that the agent is given
    #[arg(long, value_name = "FILE", default_value = vmseal_agent::SWTPM)]
    pub swtpm: PathBuf,
    /// The filter program [default: vmseal-filter beside this program]
    #[arg(long, value_name = "FILE")]
    pub filter: Option<PathBuf>,
    /// A directory that is or will be a datastore; may be repeated
    #[arg(long = "datastore", value_name = "DIR")]
    pub datastores: Vec<PathBuf>,
    #[command(flatten)]
    pub columns: Columns<Finding>,
}
