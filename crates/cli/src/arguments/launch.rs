//! `vmseal vm launch` and `vmseal vm ssh`, and what any new guest is told at its first boot.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vmseal_api::transfer::ImageFormat;

use super::DryRun;
use super::hardware::HardwareOptions;
use super::migration_encryption::EncryptionOfMigrations;
use super::wait::duration;
use crate::size::parse_size;

#[derive(Args)]
pub struct Launch {
    /// The new VM's name
    pub name: String,
    /// The image of the disk: the name of one of `vmseal image list`, or a file on the host. `debian` is built if it
    /// is not there
    #[arg(long, value_name = "IMAGE")]
    pub image: PathBuf,
    /// The format of an image that is given as a file
    #[arg(long, value_name = "raw|qcow2", value_parser = parse_format)]
    pub format: Option<ImageFormat>,
    /// Fill the disk from an image that is said to be raw even if it begins as an image of another format does
    #[arg(long)]
    pub force: bool,
    /// The storage policy's name or id
    #[arg(long, default_value = "encrypted")]
    pub policy: String,
    /// Virtual processors
    #[arg(long, default_value_t = 1)]
    pub vcpus: u32,
    /// Memory, such as 512M or 2G (powers of 1024)
    #[arg(long, default_value = "1GiB", value_name = "SIZE", value_parser = parse_size)]
    pub memory: u64,
    /// The size of the disk, such as 20G
    #[arg(long, default_value = "10GiB", value_name = "SIZE", value_parser = parse_size)]
    pub disk_size: u64,
    /// The datastore's name or id, or `HOST:NAME` [default: the only one]
    #[arg(long, value_name = "NAME")]
    pub datastore: Option<String>,
    /// A network card, as for `vm create`; may be repeated [default: user,forward=tcp:22]
    #[arg(long = "nic", value_name = "OPTIONS")]
    pub nics: Vec<String>,
    #[command(flatten)]
    pub hardware: HardwareOptions,
    #[command(flatten)]
    pub migration: EncryptionOfMigrations,
    #[command(flatten)]
    pub first_boot: FirstBoot,
    /// How long to wait for the guest's SSH server (90s, 5m); it goes on booting after that
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10m")]
    pub timeout: Duration,
    #[command(flatten)]
    pub dry_run: DryRun,
}

#[derive(Args)]
pub struct Ssh {
    /// Name or id
    pub name: String,
    /// Who logs in [default: as given to `vm launch`, else debian]
    #[arg(short = 'l', long, value_name = "NAME")]
    pub user: Option<String>,
    /// The file with the private key [default: the one that belongs to the key given to `vm launch`, else ssh's own]
    #[arg(short = 'i', long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// The guest's address, if it is another than the server knows
    #[arg(long, value_name = "HOST")]
    pub address: Option<String>,
    /// The port of its SSH server
    #[arg(long, value_name = "PORT", requires = "address", default_value_t = 22)]
    pub port: u16,
    /// A command to run in place of a shell, and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// What the guest is told at its first boot.
#[derive(Args, Default)]
pub struct FirstBoot {
    /// What cloud-init in the guest reads at its first boot:
    /// `user-data=FILE[,meta-data=FILE][,network-config=FILE]`. It is kept on a small disk of the VM's, encrypted as
    /// its others, which the guest can only read
    #[arg(long, value_name = "OPTIONS")]
    pub cloud_init: Option<String>,
    /// A file with public SSH keys that log in to the guest, by cloud-init; may be repeated
    #[arg(long = "ssh-key", value_name = "FILE")]
    pub ssh_keys: Vec<PathBuf>,
    /// Ask for a password that logs in to the guest, by cloud-init; it is hashed before it is sent
    #[arg(long)]
    pub password: bool,
    /// The file with that password
    #[arg(long, value_name = "FILE", conflicts_with = "password")]
    pub password_file: Option<PathBuf>,
    /// Who logs in with them and may use sudo [default: the image's own user, such as debian or ubuntu]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
}

fn parse_format(text: &str) -> Result<ImageFormat, String> {
    let found = ImageFormat::ALL.into_iter().find(|format| format.name() == text);
    found.ok_or_else(|| "it is neither raw nor qcow2".to_owned())
}
