//! What is encrypted of a backup.

use vmseal_api::host::backup::BackupPart;
use vmseal_api::model::VmBackup;

use super::column::Cell;

/// What is encrypted of a backup: all of it, nothing, or a part. Where that was not noted of its disks, they were as their VM.
pub fn encrypted(backup: &VmBackup) -> Cell {
    let of_vm = backup.key.is_some();
    let parts = backup.contents.iter().flat_map(|contents| &contents.disks);
    let mut parts = parts.map(|part| part.encrypted.unwrap_or(of_vm)).peekable();
    let first = *parts.peek().unwrap_or(&of_vm);
    if parts.all(|part| part == first) { Cell::YesNo(first) } else { "in part".into() }
}

/// Whether a part of a backup is in the clear.
pub fn is_plain(part: &BackupPart) -> bool {
    part.encrypted == Some(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_backup_is_encrypted_as_its_disks_are_and_not_as_its_vm_is() {
        let id = "018f0000-0000-7000-8000-000000000001";
        let said = |key: bool, disks: &[Option<bool>]| {
            let disks = disks.iter().map(|disk| json!({ "name": "disk", "encrypted": disk }));
            let backup = json!({
                "id": id, "name": "one", "vm": "web", "vm_id": id, "created": "2026-01-02T03:04:05Z",
                "state": "ready", "host": "host", "directory": "/srv",
                "key": key.then(|| json!({ "provider": id, "key_id": "key", "check": "0" })),
                "contents": { "disks": disks.collect::<Vec<_>>() },
            });
            encrypted(&serde_json::from_value(backup).unwrap())
        };
        let (yes, no) = (Cell::YesNo(true), Cell::YesNo(false));
        assert_eq!(said(true, &[Some(true), Some(true)]), yes);
        assert_eq!(said(true, &[Some(true), Some(false)]), Cell::from("in part"));
        assert_eq!(said(true, &[Some(false)]), no, "the VM has a key");
        assert_eq!(said(false, &[Some(false)]), no);
        // As an earlier vmseal has noted it, and as it is while it is made.
        assert_eq!(
            [said(true, &[None]), said(false, &[None]), said(true, &[])],
            [yes.clone(), no, yes]
        );
    }
}
