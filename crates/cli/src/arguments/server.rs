//! `vmseal server` and `vmseal login`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::DryRun;

#[derive(Args)]
pub struct RunServer {
    /// Where the server keeps its database, certificates and sealed keys; made at the first start
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/server")]
    pub data_dir: PathBuf,
    /// The address and port to listen on
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8443")]
    pub listen: SocketAddr,
    /// A name or address that clients and hosts reach the server by, for its certificate; may be repeated
    #[arg(long = "name", value_name = "NAME", default_value = "localhost")]
    pub names: Vec<String>,
}

#[derive(Args)]
pub struct Login {
    /// Save without trying the connection first
    #[arg(long)]
    pub no_check: bool,
    #[command(flatten)]
    pub dry_run: DryRun,
}
