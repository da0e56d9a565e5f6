//! Whether the datastores of a VM know more of it than an inventory that was restored from a backup.

use std::io::ErrorKind;

use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::{DatastoreSpec, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::descriptor;
use super::file_error::failed;
use super::home::{DESCRIPTOR, Home};
use crate::rules::restored;
use crate::timed;

/// Compares a VM with its descriptors on all its datastores.
///
/// # Errors
/// `wrong-state`: one differs, or cannot be read, as that of a later vmseal, or its datastore cannot be looked at. Then this host could not
/// write there either, and would once it can.
pub async fn examine(spec: &VmSpec) -> Result<(), Problem> {
    for place in descriptor::places_of(spec).into_values() {
        let vm = spec.vm;
        let path = place.location.path().to_owned();
        // The server asks about one VM after the other when an agent has started.
        let read = timed::quick_call(&path, move || described(&place, vm)).await;
        let there = read.map_err(|problem| {
            let what = format!(
                "whether VM '{}' is newer on its datastore than in the inventory, which was restored from a backup, cannot be seen: {problem}",
                spec.name
            );
            Problem::new(ErrorCode::WrongState, what)
        })?;
        if let Some(there) = there {
            restored::check(spec, &there)?;
        }
    }
    Ok(())
}

/// The descriptor of a VM on a datastore; none where there is none yet. Blocks.
fn described(place: &DatastoreSpec, vm: VmId) -> Result<Option<VmDescriptor>, Problem> {
    let path = Home::of(place, vm)?.path().join(DESCRIPTOR);
    match path.symlink_metadata() {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&path, "read", &error)),
    }
    let (_, read) = descriptor::read(&path);
    read.map(Some).map_err(|why| Problem::new(ErrorCode::Damaged, why))
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, Device, KeyReference};
    use vmseal_api::id::{DatastoreId, DiskId};
    use vmseal_secret::{KEK_LEN, SecretBytes};

    use super::*;
    use crate::keys;
    use crate::process::run_dir;
    use crate::storage::mark;

    fn disk(place: &DatastoreSpec) -> Device {
        // No two of a VM have one name.
        let name = format!("disk-{}", DiskId::new());
        Device::Disk(run_dir::tests::disk(&name, place))
    }

    #[tokio::test]
    async fn one_newer_descriptor_is_enough_and_a_place_that_is_not_there_is_not_passed_over() {
        let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let places = directories.each_ref().map(|directory| {
            let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
            let place = DatastoreSpec { datastore: DatastoreId::new(), location };
            mark::put(directory.path(), &place).unwrap();
            place
        });
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let mut spec = run_dir::tests::spec();
        let key: KeyReference = keys::reference_of(&kek, spec.vm, "a");
        spec.key = Some(key);
        spec.devices = places.iter().map(disk).collect();
        let mut newer = spec.clone();
        newer.devices.push(disk(&places[1]));
        // Nothing was begun there yet.
        examine(&spec).await.unwrap();
        for place in &places {
            Home::of(place, spec.vm).unwrap().describe(&spec, place, Some(&kek)).unwrap();
        }
        examine(&spec).await.unwrap();
        let second = Home::of(&places[1], spec.vm).unwrap();
        second.describe(&newer, &places[1], Some(&kek)).unwrap();
        let refused = examine(&spec).await.unwrap_err();
        assert!(refused.detail.contains("differs from the inventory"), "{refused}");
        examine(&newer).await.unwrap();
        // One that nobody can read is not written over unseen.
        std::fs::write(second.path().join(DESCRIPTOR), r#"{"version": 99}"#).unwrap();
        let refused = examine(&newer).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("cannot be seen: its vm.json"), "{refused}");
        std::fs::remove_dir_all(directories[1].path()).unwrap();
        let refused = examine(&spec).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("cannot be seen"), "{refused}");
    }
}
