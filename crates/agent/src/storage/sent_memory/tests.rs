//! The memory of a snapshot, and that of a suspended VM, goes to a host that has another key of the VM.

use std::fs::File;

use vmseal_api::host::{Device, KeyReference};
use vmseal_api::id::{MigrationId, ProviderId};
use vmseal_seal::file::{Identity, Wanted, create, open_wanted};
use vmseal_seal::slot::VmKey;
use vmseal_secret::KEK_LEN;

use super::*;
use crate::storage::datastore::tests::unmarked;

const CONTENT: &[u8] = b"what the guest had in its memory";

/// A VM as one of two control planes has it: with a key of its own.
fn keyed(spec: &VmSpec, key_id: &str) -> (VmSpec, SecretBytes) {
    let (provider, check) = (ProviderId::new(), String::new());
    let key = Some(KeyReference { provider, key_id: key_id.to_owned(), check });
    (VmSpec { key, ..spec.clone() }, SecretBytes::random(KEK_LEN).unwrap())
}

fn transit(session: &SecretBytes, migration: MigrationId) -> MemoryTransit {
    MemoryTransit::new(session.try_clone().unwrap(), migration)
}

#[test]
fn what_arrives_opens_with_the_key_of_that_control_plane_alone_as_of_the_same_generation() {
    let (_directory, place) = unmarked();
    crate::storage::datastore::probe(&place).unwrap();
    let mut spec = crate::process::run_dir::tests::spec();
    let mut disk = crate::rules::tests::disk("system");
    disk.datastore = place.clone();
    spec.devices.push(Device::Disk(disk.clone()));
    let ((west, west_kek), (east, east_kek)) = (keyed(&spec, "west"), keyed(&spec, "east"));
    let (snapshot, other) = (SnapshotId::new(), SnapshotId::new());
    let which = Beside::SnapshotMemory(snapshot);

    let home = Home::of(&place, spec.vm).unwrap();
    std::fs::create_dir_all(home.path()).unwrap();
    let identity = Identity { vm: spec.vm.0, kind: Kind::Memory, generation: 7 };
    let key = vm_key(&west, Some(&west_kek)).unwrap();
    let file = File::create(home.snapshot_memory(snapshot)).unwrap();
    let mut writer = create(file, identity, key.as_ref()).unwrap();
    writer.write_all(CONTENT).unwrap();
    writer.finish().unwrap();

    let (session, migration) = (SecretBytes::random(KEK_LEN).unwrap(), MigrationId::new());
    let way = transit(&session, migration);
    let mut sent = Vec::new();
    send(&west, &disk, &which, (Some(&west_kek), Some(&way)), &mut sent).unwrap();
    // As the other host has it: from the same key.
    let way = transit(&session, migration);
    let mut rest = &sent[..];
    let header = way.arrived(&east, &east_kek, &which, &mut rest).unwrap();
    let arrived = [&header[..], rest].concat();

    let wanted = Wanted { vm: spec.vm.0, kind: Kind::Memory, generation: Some(7) };
    let opened = |key: &VmKey<'_>| open_wanted(&arrived[..], wanted, Some(key));
    let mut read = Vec::new();
    let here = vm_key(&east, Some(&east_kek)).unwrap().unwrap();
    opened(&here).unwrap().read_to_end(&mut read).unwrap();
    assert_eq!(read, CONTENT);
    assert_eq!(Header::read(&mut &arrived[..]).unwrap().keys().len(), 1, "one key opens it");
    assert!(opened(&key.unwrap()).is_err(), "the source's key opens it");
    let name = memory_transit::name(&which);
    assert!(opened(&way.key(spec.vm, &name)).is_err(), "the session's key opens it");

    // Of another snapshot, of another attempt, and as an agent sends it that does not know of this.
    let refused = |way: &MemoryTransit, of: &Beside, sent: &[u8]| {
        way.arrived(&east, &east_kek, of, &mut &sent[..]).is_err()
    };
    assert!(refused(&way, &Beside::SnapshotMemory(other), &sent));
    assert!(refused(&way, &Beside::Memory, &sent), "it is not the VM's own");
    assert!(refused(&transit(&session, MigrationId::new()), &which, &sent));
    let under_west = std::fs::read(home.snapshot_memory(snapshot)).unwrap();
    assert!(refused(&way, &which, &under_west));

    // The VM is suspended with it: its own memory goes under a key of its own.
    assert_eq!(beside(&west, &disk).unwrap(), (vec![snapshot], false));
    std::fs::copy(home.snapshot_memory(snapshot), home.memory()).unwrap();
    assert_eq!(beside(&west, &disk).unwrap(), (vec![snapshot], true));
    let mut sent = Vec::new();
    send(&west, &disk, &Beside::Memory, (Some(&west_kek), Some(&way)), &mut sent).unwrap();
    assert!(refused(&way, &which, &sent), "it is not the snapshot's");
    way.arrived(&east, &east_kek, &Beside::Memory, &mut &sent[..]).unwrap();
}
