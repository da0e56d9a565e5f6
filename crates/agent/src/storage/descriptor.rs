//! Makes descriptors of VMs, and checks who made one.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use vmseal_api::host::descriptor::{
    DescribedDisk, DescribedReplica, DescribedSnapshot, LENGTH_MAX, VERSION, VmDescriptor,
    WITHOUT_ABOUT, WITHOUT_SNAPSHOTS, WITHOUT_TREATMENT, bound_descriptions, parse,
};
use vmseal_api::host::{AboutVm, DatastoreSpec, KeyReference, SnapshotSpec, VmSpec};
use vmseal_api::id::{DatastoreId, DiskId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{Purpose, derive};
use vmseal_secret::mac::mac;

use crate::keys;

fn internal(error: impl std::fmt::Display) -> Problem {
    Problem::new(ErrorCode::Internal, format!("a VM's descriptor cannot be made: {error}"))
}

/// Reads a descriptor, or says for people why it cannot be read; and how many bytes were read for that. Who writes to the
/// datastore decides what is there: a link, a pipe, a file without end.
pub fn read(path: &Path) -> (usize, Result<VmDescriptor, String>) {
    let say = |why: &dyn std::fmt::Display| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        format!("its {name}: {why}")
    };
    let mut json = Vec::new();
    if let Err(error) = read_bounded(path, &mut json) {
        return (json.len(), Err(say(&error)));
    }
    (json.len(), parse(&json).map_err(|error| say(&error)))
}

fn read_bounded(path: &Path, to: &mut Vec<u8>) -> io::Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    file.take(LENGTH_MAX as u64 + 1).read_to_end(to).map(drop)
}

/// The datastores that have a descriptor of a VM.
#[must_use]
pub fn places_of(spec: &VmSpec) -> BTreeMap<DatastoreId, DatastoreSpec> {
    let mut places = BTreeMap::new();
    for disk in spec.disks() {
        let replica = disk.replica.as_ref().map(|replica| &replica.datastore);
        for place in [Some(&disk.datastore), replica].into_iter().flatten() {
            places.insert(place.datastore, place.clone());
        }
    }
    places
}

/// The descriptor of a VM for the datastore `here`, authenticated if its KEK is at hand. `before` is the one that is there.
///
/// # Errors
/// `internal`: no memory for the key of the MAC.
pub fn of(
    spec: &VmSpec,
    here: DatastoreId,
    kek: Option<&SecretBytes>,
    before: Option<&VmDescriptor>,
) -> Result<VmDescriptor, Problem> {
    let (about, snapshots) = said(spec, kek, before)?;
    let disks = spec.disks().map(|disk| {
        let replica = disk.replica.as_ref();
        let kind = if disk.datastore.datastore == here {
            Some("raw")
        } else {
            replica.filter(|replica| replica.datastore.datastore == here).map(|_| "replica")
        };
        DescribedDisk {
            disk: disk.disk,
            name: disk.name.clone(),
            size: disk.size,
            encrypted: disk.encrypted,
            file: kind.map(|kind| format!("{}.{kind}", disk.disk)),
            datastore: Some(disk.datastore.datastore),
            role: disk.role,
            allocation: disk.allocation,
            limits: disk.limits,
            cache: disk.cache,
            replica: replica.map(|replica| DescribedReplica {
                datastore: replica.datastore.datastore,
                bytes_per_second: replica.bytes_per_second,
            }),
            facts: disk.facts.clone(),
        }
    });
    // The oldest that has all of it: earlier versions of vmseal read that.
    let are_described = snapshots.iter().any(|it| !it.description.is_empty());
    let version = match (about.is_empty(), snapshots.is_empty()) {
        _ if about.has_treatment() || are_described => VERSION,
        (false, _) => WITHOUT_TREATMENT,
        (true, false) => WITHOUT_ABOUT,
        (true, true) => WITHOUT_SNAPSHOTS,
    };
    let mut descriptor = VmDescriptor {
        version,
        vm: spec.vm,
        name: spec.name.clone(),
        vcpus: Some(spec.vcpus),
        memory: Some(spec.memory),
        policy: spec.policy.clone(),
        key: spec.key.clone(),
        // A medium is of this host, and of the moment.
        hardware: spec.hardware.clone().without_medium(),
        disks: disks.collect(),
        nics: spec.nics().cloned().collect(),
        snapshots,
        about,
        mac: None,
    };
    if let (Some(reference), Some(kek)) = (&spec.key, kek) {
        descriptor.mac = Some(code_of(&descriptor, reference, kek)?);
    }
    Ok(descriptor)
}

/// What users say of a VM, and its snapshots. Where this host was not told it, as by an earlier server, or where the agent has taken a
/// running VM over from its record, which does not have it, the descriptor that is there says it: for a VM with a key, one that was made
/// with this key.
fn said(
    spec: &VmSpec,
    kek: Option<&SecretBytes>,
    before: Option<&VmDescriptor>,
) -> Result<(AboutVm, Vec<DescribedSnapshot>), Problem> {
    if let Some(about) = &spec.about {
        return Ok((about.clone(), snapshots(spec)));
    }
    let Some(before) = before.filter(|before| before.vm == spec.vm) else {
        return Ok((AboutVm::default(), snapshots(spec)));
    };
    let is_ours = match (&spec.key, kek) {
        (Some(key), Some(kek)) => is_authentic(before, key, kek)?,
        // The new one is not authenticated either.
        _ => true,
    };
    if !is_ours {
        return Ok((AboutVm::default(), snapshots(spec)));
    }
    // They name disks by their places.
    let has_its_disks = before.disks.iter().map(|it| it.disk).eq(spec.disks().map(|it| it.disk));
    let keeps = spec.snapshots.is_empty() && has_its_disks;
    let snapshots = if keeps { before.snapshots.clone() } else { snapshots(spec) };
    Ok((before.about.clone(), snapshots))
}

/// The snapshots of a VM. What would be too long of what was said of them is left out, of the later ones first.
fn snapshots(spec: &VmSpec) -> Vec<DescribedSnapshot> {
    let mut all: Vec<_> = spec.snapshots.iter().map(|it| described(spec, it)).collect();
    bound_descriptions(all.iter_mut().map(|it| &mut it.description));
    all
}

fn described(spec: &VmSpec, snapshot: &SnapshotSpec) -> DescribedSnapshot {
    let place = |disk: &DiskId| spec.disks().position(|known| known.disk == *disk);
    // A VM has fewer disks than a byte counts.
    let disks = snapshot.disks.iter().filter_map(place).filter_map(|at| u8::try_from(at).ok());
    DescribedSnapshot {
        snapshot: snapshot.snapshot,
        name: snapshot.name.clone(),
        parent: snapshot.parent,
        created: snapshot.created,
        quiesced: snapshot.quiesced,
        current: snapshot.current,
        disks: disks.collect(),
        description: snapshot.description.clone(),
    }
}

/// Whether a descriptor was made with this key.
///
/// # Errors
/// `internal`: no memory for the key of the MAC.
pub fn is_authentic(
    descriptor: &VmDescriptor,
    reference: &KeyReference,
    kek: &SecretBytes,
) -> Result<bool, Problem> {
    if descriptor.key.as_ref() != Some(reference) {
        return Ok(false);
    }
    Ok(descriptor.mac.as_ref() == Some(&code_of(descriptor, reference, kek)?))
}

/// The MAC of a descriptor.
fn code_of(
    descriptor: &VmDescriptor,
    reference: &KeyReference,
    kek: &SecretBytes,
) -> Result<String, Problem> {
    let context = keys::context(descriptor.vm, reference);
    let key = derive(kek, &context, Purpose::Descriptor).map_err(internal)?;
    let code = mac(&key, &[&descriptor.authenticated().map_err(internal)?]);
    Ok(code.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use vmseal_api::drain::OnDrain;
    use vmseal_api::host::{DatastoreLocation, Device};
    use vmseal_api::id::SnapshotId;
    use vmseal_api::limits::{DESCRIPTION_MAX, SNAPSHOTS_MAX};
    use vmseal_secret::KEK_LEN;

    use super::*;
    use crate::process::run_dir;

    fn encrypted_vm() -> (VmSpec, DatastoreId, SecretBytes) {
        let location = DatastoreLocation::Dir { path: "/store".into() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let mut spec = run_dir::tests::spec();
        spec.key = Some(keys::reference_of(&kek, spec.vm, "a"));
        spec.devices = vec![Device::Disk(run_dir::tests::disk("system", &place))];
        (spec, place.datastore, kek)
    }

    fn snapshot(name: &str, description: &str) -> SnapshotSpec {
        SnapshotSpec {
            snapshot: SnapshotId::new(),
            name: name.to_owned(),
            parent: None,
            created: jiff::Timestamp::now(),
            quiesced: None,
            current: false,
            disks: vec![],
            description: description.to_owned(),
        }
    }

    #[test]
    fn a_descriptor_has_the_oldest_version_that_says_all_of_it() {
        let (spec, here, _) = encrypted_vm();
        let of = |about: AboutVm, snapshots: Vec<SnapshotSpec>| {
            let spec = VmSpec { about: Some(about), snapshots, ..spec.clone() };
            let made = super::of(&spec, here, None, None).unwrap();
            let json = serde_json::to_vec(&made).unwrap();
            assert_eq!(parse(&json).unwrap(), made);
            made.version
        };
        let none = AboutVm::default;
        let drained = AboutVm { on_drain: OnDrain::Stop, ..none() };
        assert_eq!(of(none(), vec![]), WITHOUT_SNAPSHOTS);
        assert_eq!(of(none(), vec![snapshot("a", "")]), WITHOUT_ABOUT);
        assert_eq!(of(AboutVm { autostart: true, ..none() }, vec![]), WITHOUT_TREATMENT);
        assert_eq!(of(AboutVm { template: true, ..none() }, vec![]), VERSION);
        assert_eq!(of(drained, vec![]), VERSION);
        assert_eq!(of(none(), vec![snapshot("a", "before 2.0")]), VERSION);
    }

    #[test]
    fn what_is_too_long_of_what_was_said_of_snapshots_is_left_out_of_the_later_ones() {
        let (mut spec, here, _) = encrypted_vm();
        // Six bytes of JSON each.
        let long = "\u{1}".repeat(DESCRIPTION_MAX);
        spec.snapshots =
            (0..SNAPSHOTS_MAX).map(|index| snapshot(&format!("s{index}"), &long)).collect();
        let made = of(&spec, here, None, None).unwrap();
        let described: Vec<bool> = made.snapshots.iter().map(|it| it.description == long).collect();
        assert_eq!(described.len(), SNAPSHOTS_MAX);
        assert_eq!(described[..3], [true, true, false], "{described:?}");
        assert!(described[3..].iter().all(|it| !it), "{described:?}");
        assert!(parse(&serde_json::to_vec_pretty(&made).unwrap()).is_ok());
    }

    /// The record of a VM that ran on while its agent restarted has neither.
    #[test]
    fn what_a_host_was_not_told_stays_as_it_is_in_an_authentic_descriptor() {
        let (mut spec, here, kek) = encrypted_vm();
        let of = |spec: &VmSpec, before| super::of(spec, here, Some(&kek), before).unwrap();
        spec.about = Some(AboutVm { on_drain: OnDrain::Leave, ..AboutVm::default() });
        spec.snapshots = vec![snapshot("a", "before 2.0")];
        let before = of(&spec, None);
        let recorded = VmSpec { about: None, snapshots: vec![], ..spec.clone() };
        assert_eq!(of(&recorded, Some(&before)), before);
        // With other disks, it is not known which ones the snapshots keep.
        let fewer = VmSpec { devices: vec![], ..recorded.clone() };
        assert!(of(&fewer, Some(&before)).snapshots.is_empty());
        let mut forged = before.clone();
        forged.snapshots[0].description = "forged".to_owned();
        let after = of(&recorded, Some(&forged));
        assert!(after.about.is_empty() && after.snapshots.is_empty(), "{after:?}");
        // A server that says so has none.
        let none = VmSpec { about: Some(AboutVm::default()), ..recorded };
        let after = of(&none, Some(&before));
        assert!(after.about.is_empty() && after.snapshots.is_empty(), "{after:?}");
    }
}
