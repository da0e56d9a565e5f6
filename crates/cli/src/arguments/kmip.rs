//! `vmseal provider`, as far as it is about key servers over KMIP.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{DryRun, Passphrase};

/// The servers of a KMIP provider that is added.
#[derive(Args)]
pub struct Servers {
    /// Add a KMIP provider with this key server (port 5696 unless given); may be repeated for servers that
    /// replicate, in the order in which they are to be asked. The passphrase then seals the private key of
    /// the certificate that the provider shows them
    #[arg(long = "kms", value_name = "ALIAS=HOST[:PORT]", conflicts_with = "restore")]
    pub servers: Vec<String>,
}

#[derive(Subcommand)]
pub enum Kmip {
    /// Show the certificate of each server of a KMIP provider, and ask whether to trust it
    Trust {
        /// Name or id
        name: String,
        /// Only this server; without, all of them
        #[arg(long, value_name = "ALIAS")]
        kms: Option<String>,
        /// Do not ask: trust the certificate with this SHA-256 fingerprint, if the server shows it
        #[arg(long, value_name = "SHA256", conflicts_with = "authority")]
        fingerprint: Option<String>,
        /// Do not ask: trust every certificate that the authorities in this file (PEM) have signed
        #[arg(long, value_name = "FILE")]
        authority: Option<PathBuf>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Give a KMIP provider the certificate that it shows to its servers
    Certificate(Certificate),
    /// Add, remove and order the servers of a KMIP provider, or change their addresses
    #[command(subcommand, name = "server", subcommand_required = true)]
    Servers(ServerOf),
    /// Connect to every server of a KMIP provider, and say what it is or what is wrong
    Test {
        /// Name or id
        name: String,
        /// Also make a key at one, read it at each, which says whether they replicate, and destroy it
        #[arg(long)]
        key: bool,
    },
}

/// `vmseal provider server`. No argument may have the id `server`, which is the global option's.
#[derive(Subcommand)]
pub enum ServerOf {
    /// Add a server, as the last one to be asked; trust its certificate then (vmseal provider trust)
    Add {
        /// Name or id of the provider
        name: String,
        /// What it is called and where it is (port 5696 unless given)
        #[arg(value_name = "ALIAS=HOST[:PORT]")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a server: it is not asked any more, and keeps its keys
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id of the provider
        name: String,
        /// What the server is called
        #[arg(value_name = "ALIAS")]
        kms: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Change the address of a server; whom to trust for it stays as it is
    Set {
        /// Name or id of the provider
        name: String,
        /// What it is called and where it is now (port 5696 unless given)
        #[arg(value_name = "ALIAS=HOST[:PORT]")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Move a server in the order in which servers are asked
    Move {
        /// Name or id of the provider
        name: String,
        /// What the server is called
        #[arg(value_name = "ALIAS")]
        kms: String,
        /// Its place; the first one is 1
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
    /// Make a certificate that nobody else signs, use it, and print it for the KMS's administrator
    #[arg(long)]
    pub self_signed: bool,
    /// Use the certificate in this file (PEM, with its chain)
    #[arg(long, value_name = "FILE")]
    pub import: Option<PathBuf>,
    /// The name that the certificate carries; many KMSs take it for the client's identity, so a renewal has
    /// to keep it
    #[arg(long, value_name = "NAME", default_value = "vmseal", conflicts_with = "import")]
    pub common_name: String,
    /// The certificate's private key (PEM, PKCS #8), in place of the provider's own
    #[arg(long, value_name = "FILE", requires = "import")]
    pub key: Option<PathBuf>,
    /// Replace the private key: with a new one, which is used as soon as its certificate is imported, or at
    /// once with --self-signed, or with the one in --key. What the provider has is not needed for that, if
    /// its passphrase or its file is lost. The passphrase is the provider's from then on
    #[arg(long)]
    pub replace: bool,
    /// Also replace a valid certificate by one that is not valid now, or that has another name
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub passphrase: Passphrase,
    #[command(flatten)]
    pub dry_run: DryRun,
}
