//! `vmseal provider`: the commands for key servers over KMIP.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{DryRun, Passphrase};

/// The servers of a new KMIP provider.
#[derive(Args)]
pub struct Servers {
    /// Add a KMIP provider with this key server (default port 5696); may be repeated for servers that
    /// replicate, in the order of preference. The passphrase then seals the private key of the provider's
    /// client certificate
    #[arg(long = "kms", value_name = "ALIAS=HOST[:PORT]", conflicts_with = "restore")]
    pub servers: Vec<String>,
}

#[derive(Subcommand)]
pub enum Kmip {
    /// Show the certificate of each server of a KMIP provider, and ask whether to trust it
    Trust {
        /// Name or id
        name: String,
        /// Only this server [default: all]
        #[arg(long, value_name = "ALIAS")]
        kms: Option<String>,
        /// Do not ask: trust the server's certificate if it has this SHA-256 fingerprint
        #[arg(long, value_name = "SHA256", conflicts_with = "authority")]
        fingerprint: Option<String>,
        /// Do not ask: trust certificates signed by the authorities in this file (PEM)
        #[arg(long, value_name = "FILE")]
        authority: Option<PathBuf>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Set the client certificate of a KMIP provider
    Certificate(Certificate),
    /// Add, remove and order the servers of a KMIP provider, or change their addresses
    #[command(subcommand, name = "server", subcommand_required = true)]
    Servers(ServerOf),
    /// Test the connection to every server of a KMIP provider
    Test {
        /// Name or id
        name: String,
        /// Also test replication: create a key at one server, read it at each, and destroy it
        #[arg(long)]
        key: bool,
    },
}

/// `vmseal provider server`. No argument may have the id `server`, which is the global option's.
#[derive(Subcommand)]
pub enum ServerOf {
    /// Add a server, last in order; then trust its certificate (vmseal provider trust)
    Add {
        /// Name or id of the provider
        name: String,
        /// Its name and address [default port: 5696]
        #[arg(value_name = "ALIAS=HOST[:PORT]")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a server; the keys on it stay
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id of the provider
        name: String,
        /// The server's name
        #[arg(value_name = "ALIAS")]
        kms: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Change the address of a server; its trusted certificate stays
    Set {
        /// Name or id of the provider
        name: String,
        /// Its name and new address [default port: 5696]
        #[arg(value_name = "ALIAS=HOST[:PORT]")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Change a server's place in the order of preference
    Move {
        /// Name or id of the provider
        name: String,
        /// The server's name
        #[arg(value_name = "ALIAS")]
        kms: String,
        /// Its new place; 1 is the first
        #[arg(long, value_name = "PLACE")]
        to: usize,
        #[command(flatten)]
        dry_run: DryRun,
    },
}

#[derive(Args)]
#[group(id = "what", required = true, multiple = false, args = ["csr", "self_signed", "import"])]
pub struct Certificate {
    /// Name or id
    pub name: String,
    /// Print a certificate request for the provider's key, for the KMS's authority to sign
    #[arg(long)]
    pub csr: bool,
    /// Create a self-signed certificate, use it, and print it for the KMS's administrator
    #[arg(long)]
    pub self_signed: bool,
    /// Use the certificate in this file (PEM, with its chain)
    #[arg(long, value_name = "FILE")]
    pub import: Option<PathBuf>,
    /// The certificate's common name; many KMSs use it as the client's identity, so keep it when you renew
    #[arg(long, value_name = "NAME", default_value = "vmseal", conflicts_with = "import")]
    pub common_name: String,
    /// The certificate's private key (PEM, PKCS #8) [default: the provider's own]
    #[arg(long, value_name = "FILE", requires = "import")]
    pub key: Option<PathBuf>,
    /// Replace the private key by a new one (used once its certificate is imported, or at once with
    /// --self-signed), or by the one in --key. The old key and its passphrase are not needed. The passphrase
    /// given becomes the provider's
    #[arg(long)]
    pub replace: bool,
    /// Allow a certificate that is not valid now, or that has another common name
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub passphrase: Passphrase,
    #[command(flatten)]
    pub dry_run: DryRun,
}
