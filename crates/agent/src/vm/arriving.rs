//! The memory of a guest that comes from another host, as QEMU loads it. See [`super::migration`].

use std::fs::File;
use std::pin::pin;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::json;
use vmseal_api::id::{DiskId, MigrationId};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::arriving_disks::ArrivingDisks;
use super::internal;
use super::migration::{Link, Message, in_time, lost, set_capabilities, why_failed};
use super::stream::{completed, pass, sockets};
use crate::hypervisor::qmp::Qmp;
use crate::migration::placement::{Placed, Placement};
use crate::migration::transport::Compressed;
use crate::storage::arriving::ArrivingDisk;
use crate::storage::mirror::GuestDisk;
use crate::storage::placeholder;

/// The disk of a TPM that is made for what the TPM keeps, which comes with the memory.
pub struct NewTpm {
    /// Its half-made image, with its lock.
    pub file: File,
    /// Its DEK.
    pub dek: SecretBytes,
}

/// The memory that comes from another host.
pub struct Arriving {
    /// The type of the machine.
    pub machine: String,
    /// The migration that it comes with.
    pub migration: MigrationId,
    /// Taken when it is loaded.
    link: Mutex<Option<Link>>,
    /// The disks that are copied.
    disks: Mutex<Option<ArrivingDisks>>,
    /// How long its end may take.
    end_within: Duration,
    /// What of it was placed, once it is loaded.
    placed: OnceLock<Option<Placed>>,
}

impl Arriving {
    /// That of a guest with such a machine, and the disks that are copied; their end may take so long.
    pub fn new(
        (machine, migration): (String, MigrationId),
        link: Link,
        disks: Option<ArrivingDisks>,
        end_within: Duration,
    ) -> Self {
        let (link, disks) = (Mutex::new(Some(link)), Mutex::new(disks));
        Self { machine, migration, link, disks, end_within, placed: OnceLock::new() }
    }

    /// What of it this agent has placed; none where QEMU has loaded it, or not yet.
    pub fn placed(&self) -> Option<Placed> {
        self.placed.get().copied().flatten()
    }

    /// A placeholder for a disk that is copied; none for another one.
    pub fn placeholder(&self, disk: DiskId) -> Option<Result<GuestDisk, Problem>> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        let disk = disks.as_ref()?.disks().iter().find(|arriving| arriving.disk.disk == disk)?;
        Some(placeholder::of_arriving(disk))
    }

    /// Has the source send it, and a QEMU that waits load it, or what is not placed.
    ///
    /// # Errors
    /// QEMU's, and those of the connection.
    pub async fn load(&self, qmp: &Qmp, placement: Option<Placement>) -> Result<(), Problem> {
        let mut link = self.take().ok_or_else(|| internal("the memory has been loaded already"))?;
        set_capabilities(qmp).await.map_err(internal)?;
        let (theirs, ours) = sockets()?;
        let name = pass(qmp, "migration", theirs).await.map_err(internal)?;
        let carried = link.carry_memory(ours, Compressed::Received, placement)?;
        let uri = json!({"uri": format!("fd:{name}")});
        qmp.execute("migrate-incoming", uri).await.map_err(internal)?;
        link.send(&Message::Ready).await?;
        // First what the connection says: QEMU only finds that its stream has ended. To its authenticated end: nothing of it
        // was cut off.
        let session = link.handle();
        let mut carried = pin!(async { carried.done().await.map_err(lost) });
        let moved = tokio::select! {
            biased;
            moved = &mut carried => {
                let moved = moved?;
                completed(qmp, self.end_within, |_| ()).await?;
                moved
            }
            loaded = completed(qmp, self.end_within, |_| ()) => {
                loaded.map_err(|said| why_failed(&session, said))?;
                in_time(self.end_within, carried).await?
            }
        };
        let _ = self.placed.set(moved.placed);
        *self.link.lock().unwrap_or_else(PoisonError::into_inner) = Some(link);
        Ok(())
    }

    /// The disk of the VM's TPM, where it is copied; none where both hosts have it.
    ///
    /// # Errors
    /// `internal`.
    pub fn tpm(&self, disk: DiskId) -> Result<Option<NewTpm>, Problem> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut arriving = disks.iter().flat_map(ArrivingDisks::disks);
        let Some(arriving) = arriving.find(|arriving| arriving.disk.disk == disk) else {
            return Ok(None);
        };
        let dek = arriving.dek.as_ref();
        let dek = dek.ok_or_else(|| internal("the disk of its TPM is made without its key"))?;
        Ok(Some(NewTpm {
            file: arriving.file.try_clone().map_err(internal)?,
            dek: dek.try_clone().map_err(internal)?,
        }))
    }

    /// Waits until the copied disks are whole; returns them. The memory is loaded.
    ///
    /// # Errors
    /// Those of the connection and the filters.
    pub async fn end(&self) -> Result<Vec<ArrivingDisk>, Problem> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut link = self.take().ok_or_else(|| internal("the memory is not loaded"))?;
        let disks = match disks {
            Some(mut disks) => {
                if disks.carry_still(&mut link)? {
                    link.send(&Message::Loaded).await?;
                }
                disks.filled(self.end_within).await?
            }
            None => Vec::new(),
        };
        link.finish().await;
        Ok(disks)
    }

    /// Tells the source why it need not send, unless it does already.
    pub async fn refuse(&self, problem: &Problem) {
        if let Some(mut link) = self.take() {
            let why = problem.detail.clone();
            let _ = link.send(&Message::Refused { why }).await;
        }
    }

    fn take(&self) -> Option<Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
