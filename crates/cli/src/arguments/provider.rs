//! `vmseal provider`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use vmseal_api::model;

use super::kmip::{Kmip, Servers};
use super::{DryRun, List, Name, Show};

/// A passphrase: from a file, or asked for at the terminal.
#[derive(Args)]
pub struct Passphrase {
    /// Read the passphrase from this file (one trailing newline is dropped); else it is asked for
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
}

#[derive(Subcommand)]
pub enum Provider {
    /// List the key providers
    #[command(visible_alias = "ls")]
    List(List<model::Provider>),
    /// Show one key provider
    Show(Show),
    /// Add a key provider: a native one, new or restored from a backup, or key servers over KMIP
    Add {
        /// Its name
        name: String,
        #[command(flatten)]
        passphrase: Passphrase,
        /// Restore this backup instead of making a new key
        #[arg(long, value_name = "FILE")]
        restore: Option<PathBuf>,
        /// Read the backup's passphrase from this file; else it is asked for
        #[arg(long, value_name = "FILE", requires = "restore")]
        backup_passphrase_file: Option<PathBuf>,
        #[command(flatten)]
        kmip: Servers,
        #[command(flatten)]
        dry_run: DryRun,
    },
    #[command(flatten)]
    Kmip(Kmip),
    /// Give a provider's passphrase after a start of the server
    Unlock {
        /// Its name or id
        name: String,
        #[command(flatten)]
        passphrase: Passphrase,
    },
    /// Write a backup of a provider, sealed by a passphrase of its own
    Backup {
        /// Its name or id
        name: String,
        /// The file to write; it must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
    },
    /// Verify a backup: from then on the provider makes keys
    Verify {
        /// Its name or id
        name: String,
        /// The backup
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
    },
    /// Make a provider the one that policies use which name none
    Default(Name),
    /// Remove a provider that holds no key in use
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
