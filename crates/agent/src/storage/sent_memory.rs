//! The memory that snapshots keep beside a VM's first disk, and that of a VM which is suspended. It goes to another host with that disk.
//!
//! ```text
//!  source: vm.memory.snapshot-S ─ opened, sealed anew ─► a stream
//!  destination: the stream ─► DISK.copy-memory-S.new ─ flushed ─► DISK.copy-memory-S ─ the disk gets its name ─► vm.memory.snapshot-S
//! ```
//! That of a suspended VM, `vm.memory`, is `DISK.copy-memory-vm` on its way.
//!
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
use crate::storage::home::{Beside, Home};
use crate::storage::memory::{MemoryFiles, way_out};
use crate::storage::memory_transit::{self, MemoryTransit};
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// How much is written between two flushes, in bytes: a guest's own flushes do not wait for gigabytes.
const FLUSH_AFTER: u64 = 64 << 20;

/// Those that go with a disk, and whether the VM is suspended, whose own memory goes, too: none with any but the first one. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn beside(spec: &VmSpec, disk: &DiskSpec) -> Result<(Vec<SnapshotId>, bool), Problem> {
    if !MemoryFiles::are_beside(spec, disk.disk) {
        return Ok((Vec::new(), false));
    }
    let home = Home::of(&disk.datastore, spec.vm)?;
    let own = MemoryFiles::of(spec)?.is_saved()?;
    Ok((home.snapshot_memories()?.into_keys().collect(), own))
}

/// What a user does about one that cannot be sent.
fn remedy(spec: &VmSpec, which: &Beside) -> String {
    match which {
        Beside::Memory => way_out(&spec.name),
        Beside::SnapshotMemory(_) | Beside::Core(_) => format!(
            "Put the file back, or delete the snapshot (vmseal snapshot list {0}, vmseal snapshot delete {0})",
            spec.name
        ),
    }
}

/// What one is, for people.
fn what(which: &Beside) -> &'static str {
    match which {
        Beside::Memory => "the saved memory",
        Beside::SnapshotMemory(_) | Beside::Core(_) => "the memory that a snapshot keeps",
    }
}

/// Sends one: under the VM's key, or for hosts that have different ones as `transit` says. Blocks.
///
/// # Errors
/// `damaged`, `locked`; those of the stream.
pub fn send(
    spec: &VmSpec,
    disk: &DiskSpec,
    which: &Beside,
    (kek, transit): (Option<&SecretBytes>, Option<&MemoryTransit>),
    to: impl Write,
) -> Result<(), Problem> {
    let path = Home::of(&disk.datastore, spec.vm)?.beside(which);
    let remedy = remedy(spec, which);
    let refused = |error: FileError| sealed::refused(&path, &error, &remedy);
    let broken = |error: io::Error| internal(format!("{} is not sent: {error}", what(which)));
    let mut file = sealed::open(&path)?;
    let header = Header::read(&mut file).map_err(refused)?;
    let key = vm_key(spec, kek)?;
    let whose = (spec.vm, Kind::Memory);
    let mut from = sealed::open_as(&path, &header, whose, key.as_ref(), &remedy)?;
    let name = memory_transit::name(which);
    let on_its_way = transit.map(|transit| transit.key(spec.vm, &name));
    let sealed_under = on_its_way.as_ref().or(key.as_ref());
    let mut to = vmseal_seal::file::create(BufWriter::new(to), header.identity(), sealed_under)
        .map_err(internal)?;
    let mut part = Zeroizing::new(vec![0; CONTENT_MAX]);
    loop {
        let read = from
            .read(&mut part)
            .map_err(|error| sealed::unreadable(&path, what(which), &error, &remedy))?;
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
    which: &Beside,
    mut from: impl Read,
) -> Result<(), Problem> {
    let kept = home.copy_beside(disk, which);
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
pub fn received(home: &Home, disk: DiskId) -> Result<Vec<Beside>, Problem> {
    Ok(home.arrived_memories(disk)?.into_keys().collect())
}

/// Gives them the names that they are looked for by. Again is no harm. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn take_place(home: &Home, disk: DiskId) -> Result<(), Problem> {
    for (which, path) in home.arrived_memories(disk)? {
        let place = home.beside(&which);
        std::fs::rename(&path, &place)
            .and_then(|()| atomic_file::flush_directory_of(&place))
            .map_err(|error| failed(&place, "given its name", &error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
