//! What a descriptor knows of a VM that an inventory which was restored from a backup does not.
//!
//! The MAC of the descriptor is not checked, as the host may not have the key yet: who can write to the datastore can hold up such a
//! VM, and cannot give it anything. `datastore adopt` checks it.

use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::{NicSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

/// Refuses to have a descriptor be written over with a VM that lacks disks, sizes of disks or snapshots of it, or has other network cards.
///
/// # Errors
/// `wrong-state`, with what differs.
pub fn check(spec: &VmSpec, there: &VmDescriptor) -> Result<(), Problem> {
    let newer = newer(spec, there);
    if newer.is_empty() {
        return Ok(());
    }
    let what = format!(
        "the descriptor of VM '{}' differs from the inventory, which was restored from a backup: {}",
        spec.name,
        newer.join("; ")
    );
    Err(Problem::new(ErrorCode::WrongState, what))
}

/// What the descriptor has and the VM does not, for people. A descriptor without a MAC gives a VM nothing. One under another key may be of
/// after a recryption.
fn newer(spec: &VmSpec, there: &VmDescriptor) -> Vec<String> {
    let has_keys = spec.key.is_some() && there.key.is_some();
    if there.vm != spec.vm || !has_keys || there.mac.is_none() {
        return Vec::new();
    }
    let mut newer = Vec::new();
    for disk in &there.disks {
        let size = Size(disk.size);
        match spec.disk(disk.disk) {
            None => newer.push(format!("disk '{}' of {size} is in it alone", disk.name)),
            Some(known) if known.size < disk.size => {
                let (name, known) = (&known.name, Size(known.size));
                newer.push(format!("disk '{name}' has {size} in it, and {known} in the inventory"));
            }
            Some(_) => {}
        }
    }
    for snapshot in &there.snapshots {
        if spec.snapshots.iter().all(|known| known.snapshot != snapshot.snapshot) {
            let (name, created) = (&snapshot.name, snapshot.created);
            newer.push(format!("snapshot '{name}' of {created} is in it alone"));
        }
    }
    if there.nics.iter().ne(spec.nics()) {
        let (in_it, known) = (named(there.nics.iter()), named(spec.nics()));
        newer.push(if in_it == known {
            format!("the network cards {in_it} have other settings in it")
        } else {
            format!("the network cards in it are {in_it}, and in the inventory {known}")
        });
    }
    newer
}

/// Network cards, for people.
fn named<'a>(nics: impl Iterator<Item = &'a NicSpec>) -> String {
    let named: Vec<_> = nics.map(|nic| format!("'{}' ({})", nic.name, nic.mac)).collect();
    if named.is_empty() { "none".to_owned() } else { named.join(" and ") }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device, SnapshotSpec};
    use vmseal_api::id::{DatastoreId, NicId, SnapshotId};
    use vmseal_api::nic::{NicBackend, NicLink};
    use vmseal_secret::{KEK_LEN, SecretBytes};

    use super::*;
    use crate::keys;
    use crate::process::run_dir;
    use crate::storage::descriptor;

    fn disk(name: &str) -> Device {
        let location = DatastoreLocation::Dir { path: "/store".into() };
        Device::Disk(run_dir::tests::disk(
            name,
            &DatastoreSpec { datastore: DatastoreId::new(), location },
        ))
    }

    fn card(name: &str) -> Device {
        Device::Nic(NicSpec {
            nic: NicId::new(),
            name: name.to_owned(),
            mac: "02:00:00:00:00:01".parse().unwrap(),
            model: Default::default(),
            backend: NicBackend::User { forwards: vec![] },
            link: Default::default(),
        })
    }

    #[test]
    fn a_snapshot_that_the_inventory_lacks_is_newer_and_one_that_it_has_more_is_not() {
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let mut spec = run_dir::tests::spec();
        spec.key = Some(keys::reference_of(&kek, spec.vm, "a"));
        spec.devices = vec![disk("system")];
        let snapshot = SnapshotSpec {
            snapshot: SnapshotId::new(),
            name: "before".to_owned(),
            parent: None,
            created: "2026-11-24T03:09:42Z".parse().unwrap(),
            quiesced: None,
            current: true,
            disks: spec.disks().map(|disk| disk.disk).collect(),
            description: String::new(),
        };
        let taken = VmSpec { snapshots: vec![snapshot], ..spec.clone() };
        let of =
            |spec: &VmSpec| descriptor::of(spec, DatastoreId::new(), Some(&kek), None).unwrap();
        let refused = check(&spec, &of(&taken)).unwrap_err();
        let said = "snapshot 'before' of 2026-11-24T03:09:42Z is in it alone";
        assert!(refused.detail.contains(said), "{refused}");
        check(&taken, &of(&taken)).unwrap();
        check(&taken, &of(&spec)).unwrap();
    }

    #[test]
    fn a_disk_a_size_and_cards_that_the_inventory_lacks_are_newer_and_what_it_has_more_is_not() {
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let mut spec = run_dir::tests::spec();
        spec.key = Some(keys::reference_of(&kek, spec.vm, "a"));
        spec.devices = vec![disk("system"), card("nic0")];
        let with = |more: Device| {
            let devices = spec.devices.iter().cloned().chain([more]).collect();
            VmSpec { devices, ..spec.clone() }
        };
        let of = |spec: &VmSpec, kek| descriptor::of(spec, DatastoreId::new(), kek, None).unwrap();
        let mut grown = spec.clone();
        grown.disks_mut().for_each(|disk| disk.size *= 2);
        let without = VmSpec { devices: spec.devices[..1].to_vec(), ..spec.clone() };
        let mut unplugged = spec.clone();
        for device in &mut unplugged.devices {
            if let Device::Nic(nic) = device {
                nic.link = NicLink::Down;
            }
        }
        for (there, said) in [
            (with(disk("more")), "disk 'more' of 1 MiB is in it alone"),
            (grown.clone(), "disk 'system' has 2 MiB in it, and 1 MiB in the inventory"),
            (
                with(card("nic1")),
                "are 'nic0' (02:00:00:00:00:01) and 'nic1' (02:00:00:00:00:01), and in the inventory 'nic0' (02:00:00:00:00:01)",
            ),
            (without, "in it are none, and in the inventory 'nic0' (02:00:00:00:00:01)"),
            (unplugged, "the network cards 'nic0' (02:00:00:00:00:01) have other settings in it"),
        ] {
            let refused = check(&spec, &of(&there, Some(&kek))).unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState);
            assert!(refused.detail.contains(said), "{said}: {refused}");
        }
        // What is the same, and what the inventory has more of.
        check(&spec, &of(&spec, Some(&kek))).unwrap();
        check(&with(disk("more")), &of(&spec, Some(&kek))).unwrap();
        check(&grown, &of(&spec, Some(&kek))).unwrap();
        let renamed = VmSpec { name: "other".to_owned(), vcpus: 9, ..spec.clone() };
        check(&spec, &of(&renamed, Some(&kek))).unwrap();
        // What was recrypted as well.
        let key = Some(keys::reference_of(&kek, spec.vm, "b"));
        let recrypted = VmSpec { key, ..spec.clone() };
        check(&spec, &of(&recrypted, Some(&kek))).unwrap();
        check(&recrypted, &of(&grown, Some(&kek))).unwrap_err();
        // What nobody vouches for.
        check(&spec, &of(&grown, None)).unwrap();
        let plain = VmSpec { key: None, ..spec.clone() };
        check(&plain, &of(&VmSpec { key: None, ..grown }, None)).unwrap();
    }
}
