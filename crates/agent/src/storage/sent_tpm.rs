//! What the TPM of a VM keeps that is off or suspended, on its way to a host that has another key of the VM, as that of another control
//! plane does.
//!
//! ```text
//!  source: DISK.tpm ─ a swtpm loads it ─► in locked memory ─► sealed under the session
//!  destination: opened, to its authenticated end ─► in locked memory ─► a swtpm stores it in DISK.tpm, under the key of the disk that
//!               is made there ─ flushed ─► the disk gets its name
//! ```
//! Neither host knows the key of the other's disk. What comes is written to no file but by swtpm, which encrypts it. Nothing uses the TPM
//! meanwhile: its VM's owner starts no guest while it sends.

use std::io::{self, BufWriter, Read, Write};
use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;
use vmseal_seal::file::{self, FileError, Identity, Kind};
use vmseal_secret::SecretBytes;

use crate::hypervisor::tpm::{Permanent, Swtpm};
use crate::storage::arriving::ArrivingDisk;
use crate::storage::builder::{DiskBuilder, internal, too_many};
use crate::storage::home::Home;
use crate::storage::memory_transit::{self, MemoryTransit};
use crate::storage::tpm_at_rest::TpmAtRest;
use crate::storage::tpm_disk::key_of;
use crate::storage::tpm_handover::Side;
use crate::storage::tpm_state;

/// What a TPM keeps is not counted: it is sent as it is.
const GENERATION: u64 = 0;

/// What a TPM keeps, to be sent.
pub struct SendTpm {
    /// The VM, which is at rest.
    pub spec: VmSpec,
    /// The disk that has the TPM's key.
    pub disk: DiskSpec,
    /// Its facts.
    pub facts: DiskFacts,
    /// The VM's KEK.
    pub kek: Option<SecretBytes>,
    /// What it is sealed under on its way.
    pub transit: Arc<MemoryTransit>,
    /// The program that opens it.
    pub swtpm: Swtpm,
}

impl SendTpm {
    /// Sends it. What a failure leaves in the directory of processes is to be swept.
    ///
    /// # Errors
    /// `damaged`, `locked`, `in-use`; those of swtpm and of the stream.
    pub async fn run(
        self,
        builder: &DiskBuilder,
        to: impl Write + Send + 'static,
    ) -> Result<(), Problem> {
        let Self { spec, disk, facts, kek, transit, swtpm } = self;
        let of = (spec.vm, disk.disk);
        let at_rest = TpmAtRest { spec, disk, facts, kek };
        // The lock is held until it is sent.
        let (kept, _side) = at_rest.take(&swtpm, builder).await?;
        spawn_blocking(move || seal(of, &transit, &kept, to)).await.map_err(internal)?
    }
}

/// Seals what a TPM keeps that has this disk. Blocks.
fn seal(
    (vm, disk): (VmId, DiskId),
    transit: &MemoryTransit,
    kept: &Permanent,
    to: impl Write,
) -> Result<(), Problem> {
    let broken =
        |error: io::Error| internal(format!("what the VM's TPM keeps is not sent: {error}"));
    let identity = Identity { vm: vm.0, kind: Kind::Tpm, generation: GENERATION };
    let name = memory_transit::name_of_tpm(disk);
    let mut to = file::create(BufWriter::new(to), identity, Some(&transit.key(vm, &name)))
        .map_err(internal)?;
    kept.write_to(&mut to).map_err(broken)?;
    to.finish().map_err(broken)?.flush().map_err(broken)
}

/// Takes what comes as what the TPM of a VM keeps that has this disk. Blocks.
///
/// # Errors
/// `internal`: it is something else, or not whole.
pub fn receive(
    (vm, disk): (VmId, DiskId),
    transit: &MemoryTransit,
    from: impl Read,
) -> Result<Permanent, Problem> {
    let refused =
        |why: String| internal(format!("what came as what the VM's TPM keeps is not taken: {why}"));
    let name = memory_transit::name_of_tpm(disk);
    let opened = file::open(from, vm.0, Kind::Tpm, Some(&transit.key(vm, &name)));
    let mut opened = opened.map_err(|error: FileError| refused(error.to_string()))?;
    Permanent::read_from(&mut opened).map_err(|error| refused(error.to_string()))
}

/// Has it be what is kept beside a disk that is made for it, durably, before that gets its name. What a failure leaves is removed with
/// the disk, and is to be swept in the directory of processes.
///
/// # Errors
/// Those of the file system, and of swtpm.
pub async fn keep(
    vm: VmId,
    arriving: &ArrivingDisk,
    kept: Permanent,
    swtpm: &Swtpm,
    builder: &DiskBuilder,
) -> Result<(), Problem> {
    let slot = Arc::new(builder.users.take().ok_or_else(too_many)?);
    builder.directory.renew().await.map_err(internal)?;
    let disk = arriving.disk.disk;
    let dek = arriving.dek.as_ref();
    let dek = dek.ok_or_else(|| internal("a TPM's disk was begun without its key"))?;
    let (key, lock) = (key_of(dek, disk)?, arriving.file.try_clone().map_err(internal)?);
    let datastore = arriving.disk.datastore.clone();
    let make = move || {
        let path = Home::of(&datastore, vm)?.tpm_state(disk);
        let directory = tpm_state::make(&path, slot.tpm())?;
        Ok::<_, Problem>((path, Side { directory, lock, key, slot }))
    };
    let (path, side) = spawn_blocking(make).await.map_err(internal)??;
    let side = Arc::new(side);
    side.give(swtpm, &builder.directory, kept).await?;
    spawn_blocking(move || tpm_state::flush(&path, &side.directory)).await.map_err(internal)??;
    builder.directory.sweep().await.map_err(internal)
}

#[cfg(test)]
mod tests;
