//! Whether memory and disks of VMs are encrypted while they migrate.

use clap::{Args, ValueEnum};

/// The mode of a new VM.
#[derive(Args)]
pub struct EncryptionOfMigrations {
    /// Whether its memory and disks are encrypted while it migrates to another host. Those of an encrypted VM always are.
    /// `opportunistic`: encrypted if both hosts support it [default: opportunistic]
    #[arg(long, value_enum, value_name = "MODE")]
    pub migration_encryption: Option<MigrationEncryption>,
}

impl EncryptionOfMigrations {
    pub fn mode(&self) -> vmseal_api::migration::MigrationEncryption {
        self.migration_encryption.map(Into::into).unwrap_or_default()
    }
}

/// Whether memory and disks of a VM are encrypted while it migrates.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MigrationEncryption {
    Disabled,
    Opportunistic,
    Required,
}

impl From<MigrationEncryption> for vmseal_api::migration::MigrationEncryption {
    fn from(mode: MigrationEncryption) -> Self {
        match mode {
            MigrationEncryption::Disabled => Self::Disabled,
            MigrationEncryption::Opportunistic => Self::Opportunistic,
            MigrationEncryption::Required => Self::Required,
        }
    }
}
