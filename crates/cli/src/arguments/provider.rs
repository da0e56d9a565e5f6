//! `vmseal provider`.

use std::path::PathBuf;

use clap::Subcommand;
use vmseal_api::model;

use super::kmip::{Kmip, Servers};
use super::{DryRun, List, Passphrase, Show};

#[derive(Subcommand)]
pub enum Provider {
    /// List the key providers
    #[command(visible_alias = "ls")]
    List(List<model::Provider>),
    /// Show one key provider
    Show(Show),
    /// Add a key provider: a native one, key servers over KMIP, or either one restored from a backup
    Add {
        /// The new provider's name
        name: String,
        #[command(flatten)]
        passphrase: Passphrase,
        /// Restore the provider from this backup: its key, and the settings of a KMIP provider
        #[arg(long, value_name = "FILE")]
        restore: Option<PathBuf>,
        /// The file with the backup's passphrase [default: ask]
        #[arg(long, value_name = "FILE", requires = "restore")]
        backup_passphrase_file: Option<PathBuf>,
        #[command(flatten)]
        kmip: Servers,
        #[command(flatten)]
        dry_run: DryRun,
    },
    #[command(flatten)]
    Kmip(Kmip),
    /// Unlock a provider with its passphrase, after a start of the server
    Unlock {
        /// Name or id
        name: String,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Change the passphrase of a provider; update the server's systemd credential as well
    Passphrase {
        /// Name or id
        name: String,
        /// The file with the current passphrase [default: ask]
        #[arg(long, value_name = "FILE")]
        old_passphrase_file: Option<PathBuf>,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Write a backup of a provider to a local file, sealed by a passphrase of its own: a native provider's key,
    /// or a KMIP provider's settings and client key
    Backup {
        /// Name or id
        name: String,
        /// The file to write; it must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Verify a backup of a provider; a native provider can be used after the first time
    Verify {
        /// Name or id
        name: String,
        /// The file with the backup
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Make a provider the default, which policies without a provider use
    Default {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a provider that no VM and no policy uses, and delete its key
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
