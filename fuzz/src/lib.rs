//! What every parser of outside bytes has to stand: any bytes. It must not panic, not take long, not
//! take much memory, and answer as its contract says.
//!
//! A target is a module here with `run`, a line in [`TARGETS`], one in `tests/replay.rs`, and a folder of
//! small seeds in `corpus/`. `cargo test -p vmseal-fuzz` replays the seeds and mutations of them;
//! `scripts/fuzz` looks for new ones, guided by coverage. A find becomes a seed, with a test beside the
//! code that was repaired.

#![allow(clippy::unwrap_used)] // a test

pub mod backup_manifest;
pub mod filter_config;
pub mod filter_control;
pub mod in_place;
pub mod join_token;
pub mod key_file;
pub mod kmip_ttlv;
pub mod luks_header;
pub mod migration_stream;
pub mod migration_wire;
pub mod nbd_negotiation;
pub mod nbd_replies;
pub mod nbd_transmission;
pub mod provider_backup;
pub mod qcow2_disk;
pub mod qcow2_image;
pub mod qmp;
pub mod replica_map;
pub mod rest_body;
pub mod run_record;
pub mod sealed;
pub mod sealed_file;
pub mod server_backup;
pub mod vhost_user_messages;
pub mod vhost_user_queue;
pub mod vm_descriptor;

use std::sync::Arc;

use vmseal_api::filter::Holes;
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

/// Runs a parser on bytes, and panics if it does not do what it should.
pub type Run = fn(&[u8]);

/// All targets, by name.
pub const TARGETS: &[(&str, Run)] = &[
    ("backup_manifest", backup_manifest::run),
    ("filter_config", filter_config::run),
    ("filter_control", filter_control::run),
    ("in_place", in_place::run),
    ("join_token", join_token::run),
    ("key_file", key_file::run),
    ("kmip_ttlv", kmip_ttlv::run),
    ("luks_header", luks_header::run),
    ("migration_stream", migration_stream::run),
    ("migration_wire", migration_wire::run),
    ("nbd_negotiation", nbd_negotiation::run),
    ("nbd_replies", nbd_replies::run),
    ("nbd_transmission", nbd_transmission::run),
    ("provider_backup", provider_backup::run),
    ("qcow2_disk", qcow2_disk::run),
    ("qcow2_image", qcow2_image::run),
    ("qmp", qmp::run),
    ("replica_map", replica_map::run),
    ("rest_body", rest_body::run),
    ("run_record", run_record::run),
    ("sealed", sealed::run),
    ("sealed_file", sealed_file::run),
    ("server_backup", server_backup::run),
    ("vhost_user_messages", vhost_user_messages::run),
    ("vhost_user_queue", vhost_user_queue::run),
    ("vm_descriptor", vm_descriptor::run),
];

/// The longest input that a target looks at, in bytes: it fits a socket's buffer, so that a target can
/// send it before anyone reads.
pub const INPUT_MAX: usize = 16 * 1024;

fn secret(mut bytes: Vec<u8>) -> SecretBytes {
    SecretBytes::from_wiped(&mut bytes).unwrap()
}

/// A disk in memory with buffers so small that requests have to wait for them, and what serves it.
fn disk(
    bytes: &MemDisk,
    read_only: bool,
    encrypted: bool,
    queues: usize,
) -> (Disk, Arc<ServedDisk>) {
    /// Each has 64 KiB of buffers then.
    const POOLS: usize = 256;
    let size = bytes.bytes().len() as u64;
    let key = || secret((0..64).collect());
    let encryption = encrypted.then(|| Encryption { key: key(), holes: Holes::Zero });
    let disk = Disk::new(size, read_only, encryption, DiskStorage::Mem(bytes.clone()), POOLS);
    let state = Arc::new(DiskState::new(DiskId::new(), queues).with_bitmaps(disk.bitmaps()));
    let allocation = disk.allocation().into();
    let (size, serial) = (size.into(), "serial-1".into());
    let served = ServedDisk { size, read_only, serial, state, allocation };
    (disk, Arc::new(served))
}
