//! `vmseal remote`.

use std::path::PathBuf;

use clap::Subcommand;
use vmseal_api::remote;

use super::{DryRun, List, Show};

#[derive(Subcommand)]
pub enum Remote {
    /// List the control planes that this one knows
    #[command(visible_alias = "ls")]
    List(List<remote::Remote>),
    /// Show one control plane
    Show(Show),
    /// Add another control plane, for VMs that are to go there (`vmseal vm migrate --remote`)
    ///
    /// The server connects to the other one, and shows the certificate of the authority there: compare its fingerprint with
    /// that of ca.pem in the data directory of the other server (`openssl x509 -in ca.pem -noout -fingerprint -sha256`). From
    /// then on it talks to servers of this authority alone.
    ///
    /// The token is that of a user at the other control plane who may create VMs and migrate. It is kept in a file of this
    /// server's data directory that nobody else reads.
    Add {
        /// Its name here
        name: String,
        /// Where its server is: https://HOST:PORT
        url: String,
        /// SHA-256 of the certificate of its authority (AB:CD:...), in place of a question
        #[arg(long, value_name = "SHA256")]
        fingerprint: Option<String>,
        /// The file with the access token of a user there, in place of a question
        #[arg(long = "remote-token-file", value_name = "FILE")]
        token: Option<PathBuf>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Ask another control plane whether it answers, and takes VMs
    Check {
        /// Name or id
        name: String,
    },
    /// Remove another control plane
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id
        name: String,
        /// Also while VMs are on their way there: it is gone for good, with its hosts, and the VMs go on here. Never where
        /// one of its hosts may still run one of them
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
