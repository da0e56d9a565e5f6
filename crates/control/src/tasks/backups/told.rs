//! What an event says of a backup that was made: disks are in it as they are.

use vmseal_api::host::KeyReference;

use crate::store::disks::Disk;

/// Whether a backup of these disks is encrypted, in words; `key` is that of their VM.
pub(super) fn how(key: Option<&KeyReference>, disks: &[Disk]) -> String {
    let is_plain = |disk: &&Disk| !disk.encrypted && !disk.detached;
    let plain: Vec<_> = disks.iter().filter(is_plain).map(|disk| &*disk.name).collect();
    match (key, &plain[..]) {
        (None, _) => "IN THE CLEAR, as the VM has no key".to_owned(),
        (Some(_), []) => "encrypted".to_owned(),
        (Some(_), plain) => {
            format!("encrypted, but for disks {}, which are IN THE CLEAR", plain.join(", "))
        }
    }
}
