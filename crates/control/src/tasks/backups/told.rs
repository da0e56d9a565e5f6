//! What an event says of a backup that was made: disks are in it as they are, and memory is not.

use vmseal_api::host::backup::WITHOUT_MEMORY;

use crate::store::backups::Backup;
use crate::store::disks::Disk;

/// Whether a backup of these disks is encrypted, in words, and whether its VM was suspended.
pub(super) fn how(of: &Backup, disks: &[Disk]) -> String {
    let is_plain = |disk: &&Disk| !disk.encrypted && !disk.detached;
    let plain: Vec<_> = disks.iter().filter(is_plain).map(|disk| &*disk.name).collect();
    let encrypted = match (&of.key, &plain[..]) {
        (None, _) => "IN THE CLEAR, as the VM has no key".to_owned(),
        (Some(_), []) => "encrypted".to_owned(),
        (Some(_), plain) => {
            format!("encrypted, but for disks {}, which are IN THE CLEAR", plain.join(", "))
        }
    };
    match of.contents.as_ref().is_some_and(|contents| contents.suspended) {
        true => format!("{encrypted}. The VM was suspended: {WITHOUT_MEMORY}"),
        false => encrypted,
    }
}
