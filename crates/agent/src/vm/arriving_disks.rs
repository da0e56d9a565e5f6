//! The copied disks of a guest that comes from another host, which writes them over NBD. See [`super::migration`].
//!
//! ```text
//! made ─► a filter for each serves NBD ─► carried ─► the source ends its connections ─► flushed, the filters end ─► whole
//! ```
//! Of a disk with layers the active one is written so; all others come before ([`super::arriving_parts`]).
//! What is written is ciphertext where the disk is encrypted; the filters have no keys. Nothing is written to the disk of a TPM.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use vmseal_api::host::{ArrivingCopies, Attachment, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, MigrationId};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::arriving_keys::ArrivingKeys;
use super::arriving_server::Server;
use super::migration::{Link, Message, SentBefore, in_time, lost, unexpected, wrap_dek};
use super::{Shared, arriving_parts, internal};
use crate::migration::transport::Bridge;
use crate::storage::arriving::{self, ArrivingDisk};

/// See the module.
pub struct ArrivingDisks {
    disks: Vec<ArrivingDisk>,
    /// By the place of their disk.
    servers: Vec<(usize, Server)>,
    bridges: Vec<Bridge>,
}

impl ArrivingDisks {
    /// Makes these disks of a VM, takes what goes `before` them, and has them served.
    ///
    /// # Errors
    /// As [`arriving::begin`], and those of the connection and the filters. What is left is removed by [`give_up`].
    pub async fn prepare(
        (shared, spec): (&Arc<Shared>, &VmSpec),
        copies: &[DiskId],
        keys: ArrivingKeys<'_>,
        before: &[SentBefore],
        link: &mut Link,
    ) -> Result<Self, Problem> {
        if !before.is_empty() && before.len() != copies.len() {
            return Err(unexpected());
        }
        let trees = before.iter().map(|before| before.tree.clone()).chain(std::iter::repeat(None));
        let (of, copies) = (spec.clone(), copies.iter().copied().zip(trees).collect());
        let clone = keys.kek.map(SecretBytes::try_clone).transpose().map_err(internal)?;
        let begin = move || arriving::begin(&of, copies, clone.as_ref());
        let disks = spawn_blocking(begin).await.map_err(internal)??;
        let mut this = Self { disks, servers: Vec::new(), bridges: Vec::new() };
        if !before.is_empty() {
            let told = this.keys(keys.told_under, keys.migration)?;
            link.send(&Message::Made { keys: told }).await?;
            arriving_parts::take(shared, spec, &mut this.disks, before, keys, link).await?;
        }
        for (place, disk) in this.disks.iter().enumerate() {
            if disk.disk.role.attachment() != Attachment::Tpm {
                this.servers.push((place, Server::start(shared, spec, disk).await?));
            }
        }
        Ok(this)
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
            self.bridges.push(link.carry_disk(*place, server.connect()?)?);
            any = true;
        }
        Ok(any)
    }

    /// Has the source write them one after the other, as nobody uses them yet, until all are durable.
    ///
    /// # Errors
    /// Those of the connection and the filters.
    pub async fn filled_in_turn(self, link: &mut Link) -> Result<Vec<ArrivingDisk>, Problem> {
        for (place, server) in self.servers {
            // A filter waits some seconds for its first request: the source is told when it can write.
            let bridge = link.carry_disk(place, server.connect()?)?;
            link.send(&Message::Part).await?;
            bridge.done().await.map_err(lost)?;
            server.end(self.disks[place].disk.disk).await?;
        }
        Ok(self.disks)
    }

    /// Waits until the source has written all, which may take so long, and it is durable.
    ///
    /// # Errors
    /// Those of the connection and the filters.
    pub async fn filled(self, within: Duration) -> Result<Vec<ArrivingDisk>, Problem> {
        let ended = async {
            for bridge in self.bridges {
                bridge.done().await.map_err(lost)?;
            }
            Ok(())
        };
        in_time(within, ended).await?;
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
