//! The memory that snapshots keep beside a VM's first disk, which goes to another host with that disk.
//!
//! ```text
//!  source: vm.memory.snapshot-S ─ opened, sealed anew ─► a stream
//!  destination: the stream ─► DISK.copy-memory-S.new ─ flushed ─► DISK.copy-memory-S ─ the disk gets its name ─► vm.memory.snapshot-S
//! ```
//! Each file has a key of its own under the VM's key, at the other host another one: so it is checked on its way, and a damaged
//! one ends the migration, not the resume years later. The destination sees what is sealed; where it has another key of the VM, it is
//! sealed for the way ([`MemoryTransit`]).

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use vmseal_api::atomic_file;
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::problem::Problem;
use vmseal_seal::file::{FileError, Header, Kind};
use vmseal_seal::frame::CONTENT_MAX;
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::memory::MemoryFiles;
use crate::storage::memory_transit::MemoryTransit;
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// How much is written between two flushes, in bytes: a guest's own flushes do not wait for gigabytes.
const FLUSH_AFTER: u64 = 64 << 20;

/// Those that go with a disk: none with any but the first one. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn beside(spec: &VmSpec, disk: &DiskSpec) -> Result<Vec<SnapshotId>, Problem> {
    if !MemoryFiles::are_beside(spec, disk.disk) {
        return Ok(Vec::new());
    }
    let home = Home::of(&disk.datastore, spec.vm)?;
    Ok(home.snapshot_memories()?.into_keys().collect())
}

/// Sends one: under the VM's key, or for hosts that have different ones as `transit` says. Blocks.
///
/// # Errors
/// `damaged`, `locked`; those of the stream.
pub fn send(
    spec: &VmSpec,
    disk: &DiskSpec,
    snapshot: SnapshotId,
    (kek, transit): (Option<&SecretBytes>, Option<&MemoryTransit>),
    to: impl Write,
) -> Result<(), Problem> {
    let path = Home::of(&disk.datastore, spec.vm)?.snapshot_memory(snapshot);
    let remedy = format!(
        "Put the file back, or delete the snapshot (vmseal snapshot list {0}, vmseal snapshot delete {0})",
        spec.name
    );
    let refused = |error: FileError| sealed::refused(&path, &error, &remedy);
    let broken =
        |error: io::Error| internal(format!("the memory of a snapshot is not sent: {error}"));
    let mut file = sealed::open(&path)?;
    let header = Header::read(&mut file).map_err(refused)?;
    let key = vm_key(spec, kek)?;
    let whose = (spec.vm, Kind::Memory);
    let mut from = sealed::open_as(&path, &header, whose, key.as_ref(), &remedy)?;
    let name = snapshot.to_string();
    let on_its_way = transit.map(|transit| transit.key(spec.vm, &name));
    let sealed_under = on_its_way.as_ref().or(key.as_ref());
    let mut to = vmseal_seal::file::create(BufWriter::new(to), header.identity(), sealed_under)
        .map_err(internal)?;
    let mut part = Zeroizing::new(vec![0; CONTENT_MAX]);
    loop {
        let read = from.read(&mut part).map_err(|error| {
            sealed::unreadable(&path, "the memory that a snapshot keeps", &error, &remedy)
        })?;
        if read == 0 {
            break;
        }
        to.write_all(&part[..read]).map_err(broken)?;
    }
    let mut buffered = to.finish().map_err(broken)?;
    buffered.flush().map_err(broken)
}

/// Takes one that comes to go with a half-made disk. Whether all of it has come, the stream's own end says: until then it is to be
/// given up. Blocks.
///
/// # Errors
/// `no-space`; those of the file system.
pub fn receive(
    home: &Home,
    disk: DiskId,
    snapshot: SnapshotId,
    mut from: impl Read,
) -> Result<(), Problem> {
    let kept = home.copy_memory(disk, snapshot);
    let new = kept.with_added_extension("new");
    remove_if_there(&new)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
    let mut file = file.map_err(|error| failed(&new, "made", &error))?;
    let broken = |error: io::Error| failed(&new, "written", &error);
    while io::copy(&mut (&mut from).take(FLUSH_AFTER), &mut file).map_err(broken)? > 0 {
        file.sync_data().map_err(broken)?;
    }
    file.sync_all()
        .and_then(|()| std::fs::rename(&new, &kept))
        .and_then(|()| atomic_file::flush_directory_of(&kept))
        .map_err(broken)
}

/// Those that have come with a disk, and have not taken their places. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn received(home: &Home, disk: DiskId) -> Result<Vec<SnapshotId>, Problem> {
    Ok(home.copy_memories(disk)?.into_keys().collect())
}

/// Gives them the names that snapshots look for. Again is no harm. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn take_place(home: &Home, disk: DiskId) -> Result<(), Problem> {
    for (snapshot, path) in home.copy_memories(disk)? {
        let place = home.snapshot_memory(snapshot);
        std::fs::rename(&path, &place)
            .and_then(|()| atomic_file::flush_directory_of(&place))
            .map_err(|error| failed(&place, "given its name", &error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
