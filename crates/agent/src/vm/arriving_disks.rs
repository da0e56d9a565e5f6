//! The copied disks of a guest that comes from another host, which writes them over NBD. See [`super::migration`].
//!
//! ```text
//! made ─► a filter for each serves NBD ─► carried ─► the source ends its connections ─► flushed, the filters end ─► whole
//! ```
//! What is written is ciphertext where the disk is encrypted; the filters have no keys. Nothing is written to the disk of a TPM.

use std::os::unix::net::UnixStream;

use tokio::task::spawn_blocking;
use vmseal_api::host::{ArrivingCopies, Attachment, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, MigrationId};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::migration::{Link, lost, wrap_dek};
use super::{Shared, internal};
use crate::filter::{self, Control};
use crate::migration::transport::Bridge;
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::arriving::{self, ArrivingDisk};
use crate::storage::builder::{self, is_preallocated};
use crate::storage::filling::end_idle;
use crate::storage::opening::data_offset;

/// The socket of a disk's NBD.
const SOCKET: &str = "nbd";

/// See the module.
pub struct ArrivingDisks {
    disks: Vec<ArrivingDisk>,
    /// By the place of their disk.
    servers: Vec<(usize, Server)>,
    bridges: Vec<Bridge>,
}

/// A filter that serves one of them.
struct Server {
    process: Process,
    directory: ProcessDir,
    // Released when the process has ended.
    _slot: Slot,
}

impl ArrivingDisks {
    /// Makes these disks of a VM, and has them served.
    ///
    /// # Errors
    /// As [`arriving::begin`], and those of the filters. What is left is removed by [`give_up`].
    pub async fn prepare(
        shared: &Shared,
        spec: &VmSpec,
        copies: &[DiskId],
        kek: Option<&SecretBytes>,
    ) -> Result<Self, Problem> {
        let (of, copies) = (spec.clone(), copies.to_vec());
        let kek = kek.map(SecretBytes::try_clone).transpose().map_err(internal)?;
        let begin = move || arriving::begin(&of, &copies, kek.as_ref());
        let disks = spawn_blocking(begin).await.map_err(internal)??;
        let mut servers = Vec::new();
        for (place, disk) in disks.iter().enumerate() {
            if disk.disk.role.attachment() != Attachment::Tpm {
                servers.push((place, Server::start(shared, spec, disk).await?));
            }
        }
        Ok(Self { disks, servers, bridges: Vec::new() })
    }

    /// The disks.
    pub fn disks(&self) -> &[ArrivingDisk] {
        &self.disks
    }

    /// The DEKs, as the source is told of them: under a key of `secret`.
    ///
    /// # Errors
    /// `internal`.
    pub fn keys(
        &self,
        secret: Option<&SecretBytes>,
        migration: MigrationId,
    ) -> Result<Vec<Option<String>>, Problem> {
        let wrapped = |arriving: &ArrivingDisk| match (&arriving.dek, secret) {
            _ if arriving.disk.role.attachment() == Attachment::Tpm => Ok(None),
            (None, _) => Ok(None),
            (Some(dek), Some(secret)) => {
                wrap_dek(secret, migration, arriving.disk.disk, dek).map(Some)
            }
            (Some(_), None) => Err(internal("an encrypted disk is made without its key")),
        };
        self.disks.iter().map(wrapped).collect()
    }

    /// Has the source write those that it copies while the guest runs.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn carry(&mut self, link: &mut Link) -> Result<(), Problem> {
        self.carry_those(link, |disk| !is_copied_still(disk)).map(drop)
    }

    /// The same of those that it copies when the guest stands still: a filter waits some seconds for its first request. Returns
    /// whether there are any.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn carry_still(&mut self, link: &mut Link) -> Result<bool, Problem> {
        self.carry_those(link, is_copied_still)
    }

    fn carry_those(
        &mut self,
        link: &mut Link,
        which: impl Fn(&DiskSpec) -> bool,
    ) -> Result<bool, Problem> {
        let mut any = false;
        for (place, server) in self.servers.iter().filter(|(at, _)| which(&self.disks[*at].disk)) {
            let socket = server.directory.socket(SOCKET);
            let socket = UnixStream::connect(&socket).map_err(internal)?;
            self.bridges.push(link.carry_disk(*place, socket)?);
            any = true;
        }
        Ok(any)
    }

    /// Waits until the source has written all, and it is durable.
    ///
    /// # Errors
    /// Those of the connection and the filters.
    pub async fn filled(self) -> Result<Vec<ArrivingDisk>, Problem> {
        for bridge in self.bridges {
            bridge.done().await.map_err(lost)?;
        }
        for (place, server) in self.servers {
            server.end(self.disks[place].disk.disk).await?;
        }
        Ok(self.disks)
    }
}

/// Whether a disk is copied when the guest stands still: what its firmware keeps, which is little.
fn is_copied_still(disk: &DiskSpec) -> bool {
    disk.role.attachment() == Attachment::Firmware
}

impl Server {
    async fn start(
        shared: &Shared,
        spec: &VmSpec,
        arriving: &ArrivingDisk,
    ) -> Result<Self, Problem> {
        let slot = shared.users.take().ok_or_else(builder::too_many)?;
        let directory = shared.run_dir.import(arriving.disk.disk);
        directory.renew().await.map_err(internal)?;
        let served = filter::Disk {
            disk: arriving.disk.disk,
            size: arriving.disk.size,
            file: arriving.file.try_clone().map_err(internal)?,
            layers: Vec::new(),
            offset: data_offset(&arriving.facts),
            // The source encrypts before it sends.
            key: None,
            shared: filter::Shared::default(),
            keeps_room: is_preallocated(&arriving.disk),
            work: filter::Work::Expose {
                socket: directory.listen(SOCKET).map_err(internal)?,
                writable: true,
            },
            beside: None,
            replica: None,
            mirror: None,
        };
        let (process, _) =
            filter::start(&shared.filter, spec.vm, &directory, vec![served], slot.filter())
                .map_err(internal)?;
        Control::of(&directory).ready(&process, &directory).await.map_err(internal)?;
        Ok(Self { process, directory, _slot: slot })
    }

    /// Ends when nobody is connected any more, with all flushed.
    async fn end(self, disk: DiskId) -> Result<(), Problem> {
        end_idle(&Control::of(&self.directory), disk).await?;
        self.process.end_within(filter::SHUTDOWN_TIMEOUT).await;
        self.directory.sweep().await.map_err(internal)
    }
}

/// Ends the filters of copies, and removes the copies.
///
/// # Errors
/// As [`arriving::give_up`].
pub async fn give_up(
    shared: &Shared,
    spec: vmseal_api::id::VmId,
    copies: &ArrivingCopies,
) -> Result<(), Problem> {
    for copy in &copies.disks {
        // The filter has the image's lock.
        let directory = shared.run_dir.import(copy.disk);
        directory.sweep().await.map_err(internal)?;
    }
    let copies = copies.clone();
    spawn_blocking(move || arriving::give_up(spec, &copies)).await.map_err(internal)?
}
