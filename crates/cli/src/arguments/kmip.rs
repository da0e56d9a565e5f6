//! `vmseal provider`, as far as it is about key servers over KMIP.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Passphrase;

/// The servers of a KMIP provider that is added.
#[derive(Args)]
pub struct Servers {
    /// Add a KMIP provider with this key server, `ALIAS=HOST[:PORT]` (port 5696 unless given); may be
    /// repeated for servers that replicate, and they are asked in this order. The passphrase seals the key
    /// that the provider shows itself with
    #[arg(long = "kms", value_name = "ALIAS=HOST[:PORT]", conflicts_with = "restore")]
    pub servers: Vec<String>,
}

#[derive(Subcommand)]
pub enum Kmip {
    /// Show the certificate of a KMIP provider's servers, and trust it
    Trust {
        /// Its name or id
        name: String,
        /// Only this server; else all of them
        #[arg(long, value_name = "ALIAS")]
        kms: Option<String>,
        /// Trust the certificate with this SHA-256 fingerprint without asking, if the server shows it
        #[arg(long, value_name = "SHA256", conflicts_with = "authority")]
        fingerprint: Option<String>,
        /// Trust what the authorities in this file (PEM) sign, in place of one certificate
        #[arg(long, value_name = "FILE")]
        authority: Option<PathBuf>,
    },
    /// Give a KMIP provider the certificate that it shows to its servers
    Certificate(Certificate),
    /// Connect to every server of a KMIP provider, and ask what it is
    Test {
        /// Its name or id
        name: String,
        /// Also make a key, read it and destroy it
        #[arg(long)]
        key: bool,
    },
}

#[derive(Args)]
#[group(id = "what", required = true, multiple = false, args = ["csr", "self_signed", "import"])]
pub struct Certificate {
    /// Its name or id
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
    /// Whose name it carries; many KMSs take it for the client's identity, so a renewal has to keep it
    #[arg(long, value_name = "NAME", default_value = "vmseal", conflicts_with = "import")]
    pub common_name: String,
    /// The certificate's private key (PEM, PKCS #8), in place of the provider's own
    #[arg(long, value_name = "FILE", requires = "import")]
    pub key: Option<PathBuf>,
    #[command(flatten)]
    pub passphrase: Passphrase,
}
