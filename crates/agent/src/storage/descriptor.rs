//! Makes descriptors of VMs, and checks who made one.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use vmseal_api::host::descriptor::{
    DescribedDisk, DescribedReplica, DescribedSnapshot, LENGTH_MAX, VERSION, VmDescriptor,
    WITHOUT_ABOUT, WITHOUT_SNAPSHOTS, parse,
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
    let about = said(spec, kek, before)?;
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
    let version = match (about.is_empty(), spec.snapshots.is_empty()) {
        (false, _) => VERSION,
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
        snapshots: spec.snapshots.iter().map(|snapshot| described(spec, snapshot)).collect(),
        about,
        mac: None,
    };
    if let (Some(reference), Some(kek)) = (&spec.key, kek) {
        descriptor.mac = Some(code_of(&descriptor, reference, kek)?);
    }
    Ok(descriptor)
}

/// What users say of a VM. Where this host was not told it, as by an earlier server, or where the agent has taken a running VM over from
/// its record, which does not have it, the descriptor that is there says it: for a VM with a key, one that was made with this key.
fn said(
    spec: &VmSpec,
    kek: Option<&SecretBytes>,
    before: Option<&VmDescriptor>,
) -> Result<AboutVm, Problem> {
    if let Some(about) = &spec.about {
        return Ok(about.clone());
    }
    let Some(before) = before.filter(|before| before.vm == spec.vm) else {
        return Ok(AboutVm::default());
    };
    let is_ours = match (&spec.key, kek) {
        (Some(key), Some(kek)) => is_authentic(before, key, kek)?,
        // The new one is not authenticated either.
        _ => true,
    };
    Ok(if is_ours { before.about.clone() } else { AboutVm::default() })
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
