//! Resources as rows of a table: their columns, and what changes between two lists.

pub mod backup;
pub mod ceph;
pub mod column;
mod difference;
mod resources;

use serde::Serialize;
use vmseal_api::host::DiskFacts;
use vmseal_api::model::{Disk, DiskAttachment};

pub use self::column::Row;
pub use self::difference::{Change, differences};
pub use self::resources::{DiskReplica, VmDisk, VmNic};

/// The word that the API uses for an enum's value.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word.replace('_', "-"),
        _ => String::new(),
    }
}

/// The format of a disk on its datastore, and whether its VM lacks the disk.
pub fn disk_format(disk: &Disk) -> String {
    let format = match &disk.facts {
        None => "not made yet".to_owned(),
        Some(DiskFacts::Raw) => "raw, in the clear".to_owned(),
        Some(DiskFacts::Luks2 { cipher, key_bits, sector_size, .. }) => {
            format!("LUKS2 {cipher}, {key_bits}-bit key, {sector_size}-byte sectors")
        }
    };
    match disk.attachment {
        DiskAttachment::Attached => format,
        DiskAttachment::AtNextStart => format!("{format} (at the next start)"),
        DiskAttachment::Detached => format!("{format} (detached)"),
    }
}
