//! The survey of a place that may be a datastore of another inventory: its mark, and the descriptors of the VMs on it.
//! It reads, never writes, and trusts nothing that it finds: links are not followed, pipes and devices are not opened,
//! descriptors are read by the parser that is fuzzed, and number and length are bounded.

use std::path::Path;

use vmseal_api::datastore::{HeaderRole, ImageContent};
use vmseal_api::filter::DISKS_MAX;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::survey::{
    DatastoreSurvey, FoundDescriptor, FoundVm, HeaderDisk, KeptMemory, UnusableMemory,
};
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, DiskFacts, DiskState};
use vmseal_api::id::{DatastoreId, DiskId, ProviderId, VmId};
use vmseal_api::problem::Problem;

use crate::storage::descriptor;
use crate::storage::facts;
use crate::storage::file_error::failed;
use crate::storage::home::{DESCRIPTOR, SNAPSHOT_MEMORY};
use crate::storage::image_content::look;
use crate::storage::mark::{directory, marker};
use crate::storage::memory;

/// The most directory entries that are looked at, so that a foreign tree does not delay it for long.
const ENTRIES_MAX: usize = 100_000;

/// The most bytes of descriptors that are read, usable or not, and that are said of memories which cannot be used, in all: the answer is
/// accepted, and soon there.
const TEXT_MAX: usize = 6 << 20;

/// Surveys a directory. Blocks.
///
/// # Errors
/// `invalid-request` without the directory; `damaged` for a mark that cannot be read; those of the file system.
pub fn survey(location: &DatastoreLocation) -> Result<DatastoreSurvey, Problem> {
    // The id is not looked at.
    let spec = DatastoreSpec { datastore: DatastoreId::new(), location: location.clone() };
    let path = directory(&spec)?;
    let mark = marker(path)?.map(|marker| marker.datastore);
    let mut survey = DatastoreSurvey { mark, ..DatastoreSurvey::default() };
    let mut text = 0;
    let entries = std::fs::read_dir(path).map_err(|error| failed(path, "read", &error))?;
    for (number, entry) in entries.enumerate() {
        if number >= ENTRIES_MAX {
            survey.incomplete = Some(format!("there are more than {ENTRIES_MAX} entries"));
            break;
        }
        if text >= TEXT_MAX {
            survey.incomplete = Some("the descriptors are too long in all".to_owned());
            break;
        }
        let entry = entry.map_err(|error| failed(path, "read", &error))?;
        let named = entry.file_name().to_str().and_then(|name| name.parse::<VmId>().ok());
        let (Some(vm), Ok(kind)) = (named, entry.file_type()) else { continue };
        if !kind.is_dir() {
            continue;
        }
        if entry.path().join(DESCRIPTOR).symlink_metadata().is_err() {
            let descriptor = from_headers(&entry.path(), vm);
            survey.vms.push(without_memories(vm, descriptor));
            continue;
        }
        let (length, descriptor) = descriptor::read(&entry.path().join(DESCRIPTOR));
        text += length;
        let found = match descriptor {
            Ok(descriptor) => {
                let (memories, unusable_memories) = memories(&entry.path(), vm, &descriptor);
                text += unusable_memories.iter().map(|it| it.detail.len()).sum::<usize>();
                let made = made(&descriptor);
                let descriptor = FoundDescriptor::Read { descriptor: Box::new(descriptor), made };
                FoundVm { vm, descriptor, memories, unusable_memories }
            }
            Err(why) => without_memories(vm, FoundDescriptor::Unusable { detail: why }),
        };
        survey.vms.push(found);
    }
    survey.vms.sort_by_key(|found| found.vm);
    Ok(survey)
}

/// A VM without a descriptor that says which snapshots it has.
fn without_memories(vm: VmId, descriptor: FoundDescriptor) -> FoundVm {
    FoundVm { vm, descriptor, memories: Vec::new(), unusable_memories: Vec::new() }
}

/// The memory that snapshots of a VM keep in its home here, and the files that are called so and cannot be used. Descriptors do not say
/// which snapshots keep memory: a file that cannot be read for a moment must not pass for one that is not there.
fn memories(
    home: &Path,
    vm: VmId,
    descriptor: &VmDescriptor,
) -> (Vec<KeptMemory>, Vec<UnusableMemory>) {
    let (mut kept, mut unusable) = (Vec::new(), Vec::new());
    for described in &descriptor.snapshots {
        let snapshot = described.snapshot;
        match memory::kept_in(home, vm, snapshot) {
            Ok(None) => {}
            Ok(Some(generation)) => kept.push(KeptMemory { snapshot, generation }),
            Err(error) => {
                let detail = format!("{SNAPSHOT_MEMORY}{snapshot}: {error}");
                unusable.push(UnusableMemory { snapshot, detail });
            }
        }
    }
    (kept, unusable)
}

/// What the images of a VM say of it.
fn from_headers(home: &Path, vm: VmId) -> FoundDescriptor {
    let unusable = |what: &str| FoundDescriptor::Unusable {
        detail: format!("it has no {DESCRIPTOR}, and {what}"),
    };
    let mut images = Vec::new();
    let mut keys: Option<Vec<(ProviderId, String)>> = None;
    for entry in std::fs::read_dir(home).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(".raw"));
        let Some(disk) = stem.and_then(|stem| stem.parse::<DiskId>().ok()) else { continue };
        if images.len() >= DISKS_MAX {
            return unusable("more images than a VM has disks");
        }
        let Ok(Some((metadata, content))) = look(&entry.path()) else {
            return unusable("one of its images cannot be read");
        };
        let mut role = HeaderRole::Data;
        let (size, facts) = match content {
            ImageContent::Raw => (Some(metadata.len()), Some(DiskFacts::Raw)),
            ImageContent::Vmseal { claims } => {
                let own = claims.into_iter().filter(|claim| (claim.vm, claim.disk) == (vm, disk));
                let own: Vec<_> = own.collect();
                role = own.first().map_or(role, |claim| claim.role);
                let own: Vec<_> =
                    own.into_iter().map(|claim| (claim.provider, claim.key_id)).collect();
                keys = Some(match keys {
                    None => own,
                    Some(before) => before.into_iter().filter(|key| own.contains(key)).collect(),
                });
                let size = metadata.len().checked_sub(vmseal_luks::DATA_OFFSET);
                let facts = size.and_then(|size| vmseal_luks::Facts::new(disk.0, size).ok());
                (size, facts.map(|facts| facts::to_api(&facts)))
            }
            _ => (None, None),
        };
        let (Some(size), Some(facts)) = (size, facts) else {
            return unusable("one of its images is none that vmseal makes");
        };
        images.push(HeaderDisk { disk, size, facts, role });
    }
    images.sort_by_key(|image| image.disk);
    match keys.map(|keys| keys.into_iter().next()) {
        _ if images.is_empty() => unusable("no images"),
        Some(None) => unusable("the headers of its images do not name one key of this VM"),
        None => FoundDescriptor::Missing { images, key: None },
        Some(key) => FoundDescriptor::Missing { images, key },
    }
}

/// What this version would pin of the disks whose descriptor does not say it: opening them compares it.
fn made(descriptor: &VmDescriptor) -> Vec<DiskState> {
    let without = descriptor.disks.iter().filter(|disk| disk.facts.is_none());
    let facts = without.filter_map(|described| {
        let facts = match described.encrypted {
            false => DiskFacts::Raw,
            true => facts::to_api(&vmseal_luks::Facts::new(described.disk.0, described.size).ok()?),
        };
        Some(DiskState { disk: described.disk, facts, datastore: described.datastore })
    });
    facts.collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use vmseal_api::hardware::Firmware;
    use vmseal_api::host::descriptor::LENGTH_MAX;
    use vmseal_api::host::{DatastoreSpec, Device, DiskRole, SnapshotSpec, VmSpec};
    use vmseal_api::id::SnapshotId;
    use vmseal_seal::file::{Identity, Kind};
    use vmseal_secret::{KEK_LEN, SecretBytes};

    use super::*;
    use crate::keys;
    use crate::process::run_dir;
    use crate::storage::datastore;
    use crate::storage::disk::begin_empty;
    use crate::storage::home::Home;
    use crate::storage::sealed::vm_key;

    #[test]
    fn a_survey_lists_the_vms_of_any_mark_and_opens_nothing_that_is_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        assert_eq!(survey(&location).unwrap(), DatastoreSurvey::default());
        let place = DatastoreSpec { datastore: DatastoreId::new(), location: location.clone() };
        datastore::probe(&place).unwrap();
        let mut spec = run_dir::tests::spec();
        for device in &mut spec.devices {
            if let Device::Disk(disk) = device {
                disk.datastore = place.clone();
            }
        }
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        spec.key = Some(keys::reference_of(&kek, spec.vm, "k"));
        let home = Home::of(&place, spec.vm).unwrap();
        home.describe(&spec, &place, Some(&kek)).unwrap();
        let [piped, linked, empty, damaged] = std::array::from_fn(|_| VmId::new());
        for vm in [piped, linked, empty, damaged] {
            std::fs::create_dir(directory.path().join(vm.to_string())).unwrap();
        }
        let file = |vm: VmId| directory.path().join(vm.to_string()).join(DESCRIPTOR);
        nix::unistd::mkfifo(&file(piped), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink(file(spec.vm), file(linked)).unwrap();
        std::fs::write(file(damaged), "{\"version\":2}").unwrap();
        // No directory of a VM.
        std::fs::create_dir(directory.path().join("other")).unwrap();
        std::fs::write(directory.path().join(VmId::new().to_string()), "").unwrap();
        let found = survey(&location).unwrap();
        assert_eq!((found.mark, found.incomplete), (Some(place.datastore), None));
        assert_eq!(found.vms.len(), 5);
        for FoundVm { vm, descriptor, memories, unusable_memories } in &found.vms {
            assert!(memories.is_empty() && unusable_memories.is_empty());
            match descriptor {
                FoundDescriptor::Read { descriptor, made } => {
                    assert!(made.is_empty());
                    assert_eq!((*vm, descriptor.vm), (spec.vm, spec.vm));
                    assert!(descriptor.mac.is_some());
                }
                FoundDescriptor::Missing { .. } => panic!("there are no images"),
                FoundDescriptor::Unusable { detail } => {
                    let said = if *vm == empty { "it has no vm.json" } else { "its vm.json: " };
                    assert!(*vm != spec.vm && detail.starts_with(said), "{detail}");
                }
            }
        }
    }

    /// A datastore, and a VM that is to have a key, with that.
    fn encrypted_vm(directory: &Path) -> (DatastoreSpec, VmSpec, SecretBytes) {
        let location = DatastoreLocation::Dir { path: directory.to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        let (mut spec, kek) = (run_dir::tests::spec(), SecretBytes::random(KEK_LEN).unwrap());
        spec.key = Some(keys::reference_of(&kek, spec.vm, "k"));
        (place, spec, kek)
    }

    /// Files that are cut off, another VM's, or no files, are none: a snapshot would be reverted to a memory that opens nowhere. They are told,
    /// as the snapshot may have had a memory.
    #[test]
    fn a_survey_says_which_snapshots_keep_a_memory_that_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut spec, kek) = encrypted_vm(directory.path());
        let mut disk = crate::rules::tests::disk("disk");
        disk.datastore = place.clone();
        let ids: [SnapshotId; 5] = std::array::from_fn(|_| SnapshotId::new());
        let snapshots = ids.iter().enumerate().map(|(index, snapshot)| SnapshotSpec {
            snapshot: *snapshot,
            name: format!("snapshot-{index}"),
            parent: None,
            created: jiff::Timestamp::now(),
            quiesced: None,
            current: false,
            disks: vec![disk.disk],
            description: String::new(),
        });
        spec.snapshots = snapshots.collect();
        spec.devices = vec![Device::Disk(disk)];
        let home = Home::of(&place, spec.vm).unwrap();
        home.describe(&spec, &place, Some(&kek)).unwrap();
        let key = vm_key(&spec, Some(&kek)).unwrap();
        let file = |snapshot: SnapshotId| home.path().join(format!("{SNAPSHOT_MEMORY}{snapshot}"));
        let write = |snapshot: SnapshotId, vm: VmId| {
            let to = std::fs::File::create(file(snapshot)).unwrap();
            let identity = Identity { vm: vm.0, kind: Kind::Memory, generation: 7 };
            let mut to = vmseal_seal::file::create(to, identity, key.as_ref()).unwrap();
            to.write_all(&[1; 5000]).unwrap();
            to.finish().unwrap();
        };
        let [whole, cut, linked, of_another, none] = ids;
        write(whole, spec.vm);
        write(cut, spec.vm);
        let length = file(cut).metadata().unwrap().len();
        let shorter = std::fs::File::options().write(true).open(file(cut)).unwrap();
        shorter.set_len(length - 1).unwrap();
        std::os::unix::fs::symlink(file(whole), file(linked)).unwrap();
        write(of_another, VmId::new());
        let found = survey(&place.location).unwrap().vms.remove(0);
        let said = matches!(&found.descriptor, FoundDescriptor::Read { descriptor, .. }
            if descriptor.snapshots.iter().any(|it| it.snapshot == none));
        assert!(said, "{found:?}");
        assert_eq!(found.memories, [KeptMemory { snapshot: whole, generation: 7 }]);
        // In the order of the descriptor's snapshots; and nothing of the one that has no file.
        let told: Vec<_> = found.unusable_memories.iter().map(|it| it.snapshot).collect();
        assert_eq!(told, [cut, linked, of_another]);
        for (unusable, why) in
            found.unusable_memories.iter().zip(["cut off", "no regular file", "belongs to VM"])
        {
            let UnusableMemory { snapshot, detail } = unusable;
            let file = format!("{SNAPSHOT_MEMORY}{snapshot}: ");
            assert!(detail.starts_with(&file) && detail.contains(why), "{detail}");
        }
    }

    #[test]
    fn headers_say_what_the_disks_of_a_vm_without_a_descriptor_are_for() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut spec, kek) = encrypted_vm(directory.path());
        spec.hardware.firmware = Firmware::UefiSecureBoot;
        let home = Home::of(&place, spec.vm).unwrap();
        for (role, said) in [
            (DiskRole::Data, HeaderRole::Data),
            (DiskRole::CloudInit, HeaderRole::CloudInit),
            (DiskRole::UefiVariables, HeaderRole::SecureBootVariables),
            (DiskRole::Tpm, HeaderRole::Tpm),
        ] {
            let mut disk = crate::rules::tests::disk("disk");
            (disk.datastore, disk.encrypted, disk.role) = (place.clone(), true, role);
            spec.devices = vec![Device::Disk(disk.clone())];
            let (file, facts, _) = begin_empty(&spec, &disk, Some(&kek), &home).unwrap();
            home.finish(disk.disk, &file).unwrap();
            std::fs::remove_file(home.path().join(DESCRIPTOR)).unwrap();
            let found = survey(&place.location).unwrap().vms.remove(0).descriptor;
            let FoundDescriptor::Missing { images, key } = found else { panic!("{found:?}") };
            assert_eq!(key.unwrap().1, "k");
            let size = disk.size;
            assert_eq!(images, [HeaderDisk { disk: disk.disk, size, facts, role: said }]);
            drop(file);
            home.delete(disk.disk).unwrap();
        }
    }

    #[test]
    fn descriptors_that_are_of_no_use_count_as_well() {
        let directory = tempfile::tempdir().unwrap();
        let long = vec![b' '; LENGTH_MAX];
        let more = TEXT_MAX / LENGTH_MAX + 2;
        for _ in 0..more {
            let home = directory.path().join(VmId::new().to_string());
            std::fs::create_dir(&home).unwrap();
            std::fs::write(home.join(DESCRIPTOR), &long).unwrap();
        }
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let found = survey(&location).unwrap();
        assert!(found.vms.len() < more, "all {more} were read");
        assert!(found.incomplete.unwrap().contains("too long in all"));
    }
}
