//! The contracts between vmseal's processes, as types.
//!
//! | module | between | carried by |
//! |---|---|---|
//! | [`filter`] | agent → `vmseal-filter` | JSON lines on a unix socket, descriptors by inheritance |
//! | [`host`] | server → agent | JSON over HTTPS with client certificates |
//! | [`model`], [`request`], [`kmip`] | CLI, console → server | REST under `/api/v1` |
//!
//! No type here can hold a raw key: a key travels as [`host::SealedKey`] or as an inherited descriptor.

mod accelerator;
pub mod adopt;
pub mod atomic_file;
pub mod bitmap;
pub mod boot;
#[cfg(feature = "client")]
pub mod carry;
#[cfg(feature = "client")]
pub mod client;
pub mod cloud_init;
pub mod compliance;
pub mod compression;
#[cfg(feature = "client")]
pub mod console;
pub mod datastore;
pub mod drain;
pub mod dump;
#[cfg(feature = "client")]
pub mod expose;
pub mod failure_domain;
pub mod fencing;
pub mod filter;
pub mod fingerprint;
pub mod former_image;
pub mod guest;
pub mod hardware;
pub mod host;
pub mod id;
pub mod image_layout;
pub mod join_token;
pub mod key_fault;
pub mod kmip;
pub mod limits;
pub mod log_level;
pub mod migration;
mod migration_encryption;
pub mod model;
pub mod new_pools;
pub mod nic;
pub mod osd_encryption;
pub mod pace;
pub mod passphrase;
pub mod plan;
pub mod pool_fullness;
pub mod problem;
pub mod processor;
pub mod provider_backup;
pub mod rbd;
mod rbd_pool;
pub mod redundancy;
pub mod remote;
pub mod replica;
pub mod request;
pub mod request_id;
pub mod server_backup;
mod shown_location;
pub mod size;
pub mod transfer;
pub mod usage;

pub use host::proof;
