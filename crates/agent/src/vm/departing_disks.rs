//! The disks of a guest that is sent to another host, which gets copies of them. See [`super::migration`].
//!
//! ```text
//! the guest's filter copies what the guest writes ─► the copies lack little ─► the guest stands still ─► complete ─► ended
//! what nobody writes is copied by a filter of its own, whole, before
//! what the firmware writes, which is little, is copied so when the guest stands still
//! ```
//! Of a disk with layers all that nobody writes goes before ([`super::departing_parts`]).
//! The disk of a TPM is empty: nothing of it is copied. What the TPM keeps comes with the guest's memory.
//!
//! A copy has a key of its own, which the other host has made: what one host has seen of a disk does not open what the other
//! writes later.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::filter::DiskStatus;
use vmseal_api::host::{Attachment, DiskFacts, DiskSpec, MigrationProgress, VmSpec};
use vmseal_api::id::{DiskId, MigrationId};
use vmseal_api::problem::Problem;
use vmseal_api::size::Size;
use vmseal_secret::SecretBytes;

use super::disks_meter::Rate;
use super::internal;
use super::lacking::{Nearing, READY_BYTES};
use super::migration::{Link, lost, unexpected};
use super::mirroring::copy_whole;
use super::standstill::StandStill;
use super::to_copy::{Departing, ToCopy, copy_of};
use crate::filter::pace::Pace;
use crate::filter::{self, Control};
use crate::migration::transport::Bridge;
use crate::storage::builder::DiskBuilder;
use crate::storage::locked::Access;
use crate::storage::opening;

/// How often the filter is asked how far its copies are.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// The same while the guest stands still.
const REST_INTERVAL: Duration = Duration::from_millis(5);

/// The least that a copy may take while the guest stands still, and until little is left to copy.
const REST_TIMEOUT: Duration = Duration::from_secs(10);

/// The least that the ends of the connections may take to come back.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// See the module.
pub struct DepartingDisks {
    control: Control,
    /// Those that the guest writes.
    written: Vec<DiskId>,
    /// The sizes of these, in bytes.
    sizes: Vec<u64>,
    /// Those that are copied when it stands still.
    still: Vec<Whole>,
    bridges: Vec<Bridge>,
}

/// A disk that is copied whole, while nobody writes it.
struct Whole {
    spec: VmSpec,
    disk: (DiskSpec, DiskFacts),
    kek: Option<SecretBytes>,
    copy: filter::Mirror,
    builder: DiskBuilder,
}

impl Whole {
    fn of(what: &ToCopy, of: &Departing, copy: filter::Mirror) -> Result<Self, Problem> {
        let builder = what.shared.builder(what.shared.run_dir.export(of.disk.disk));
        let kek = what.kek.as_ref().map(SecretBytes::try_clone).transpose().map_err(internal)?;
        let (spec, disk) = (what.spec.clone(), (of.disk.clone(), of.facts.clone()));
        Ok(Self { spec, disk, kek, copy, builder })
    }

    async fn copy(self) -> Result<(), Problem> {
        let Self { spec, disk: (disk, facts), kek, copy, builder } = self;
        let (vm, of) = (spec.vm, disk.clone());
        let open = move || opening::open(&spec, &of, &facts, kek.as_ref(), Access::BesideGuest);
        copy_whole((vm, disk), open, copy, builder, |_, _| ()).await
    }
}

impl DepartingDisks {
    /// Begins to copy them. The other host has made them, with these keys.
    ///
    /// # Errors
    /// Those of the connection and the filters.
    pub async fn begin(
        what: &ToCopy,
        migration: MigrationId,
        keys: &[Option<String>],
        link: &mut Link,
    ) -> Result<Self, Problem> {
        if keys.len() != what.disks.len() {
            return Err(unexpected());
        }
        let (mut bridges, mut written) = (Vec::new(), Vec::new());
        let (mut whole, mut still) = (Vec::new(), Vec::new());
        let mut sizes = Vec::new();
        for (place, (known, key)) in what.disks.iter().zip(keys).enumerate() {
            let disk = &known.disk;
            if disk.role.attachment() == Attachment::Tpm {
                continue;
            }
            let (theirs, ours) = UnixStream::pair().map_err(internal)?;
            bridges.push(link.carry_disk(place, ours)?);
            let to = (theirs, known.has_layers());
            let copy = copy_of(what, migration, known, key.as_deref(), to)?;
            match disk.role.attachment() {
                Attachment::Disk if disk.role.is_data() => {
                    written.push((disk.disk, copy));
                    sizes.push(disk.size);
                }
                Attachment::Firmware => still.push(Whole::of(what, known, copy)?),
                Attachment::Disk | Attachment::Tpm => whole.push(Whole::of(what, known, copy)?),
            }
        }
        let ids = written.iter().map(|(disk, _)| *disk).collect();
        if !written.is_empty() {
            let control = what.control.clone();
            let begin = move || control.mirror(&written).map_err(internal);
            spawn_blocking(begin).await.map_err(internal)??;
        }
        for disk in whole {
            disk.copy().await?;
        }
        Ok(Self { control: what.control.clone(), written: ids, sizes, still, bridges })
    }

    /// Whether some are copied when the guest stands still.
    pub fn has_still(&self) -> bool {
        !self.still.is_empty()
    }

    /// Copies them. The guest stands still, and the other host waits for them.
    ///
    /// # Errors
    /// The filter's; `internal`: it takes longer than the guest may stand still.
    pub async fn copy_still(&mut self, guest: &StandStill) -> Result<(), Problem> {
        let still = std::mem::take(&mut self.still);
        let limit = guest.limit(REST_TIMEOUT, still.iter().map(|whole| whole.disk.0.size).sum());
        let copied = async {
            for disk in still {
                disk.copy().await?;
            }
            Ok(())
        };
        let late = || {
            let seconds = limit.as_secs();
            internal(format!("copying what its firmware keeps takes more than {seconds} s"))
        };
        timeout(limit, copied).await.unwrap_or_else(|_| Err(late()))
    }

    /// Those that the guest's filter copies.
    pub fn written(&self) -> &[DiskId] {
        &self.written
    }

    /// Waits until the copies lack little, while the guest runs.
    ///
    /// # Errors
    /// The filter's.
    pub async fn until_small(&self, tell: impl Fn(MigrationProgress)) -> Result<(), Problem> {
        let looks = Pace::up_to(PROGRESS_INTERVAL);
        let mut nearing = Nearing::of(self.sizes.iter().copied());
        let mut writes: Option<Rate> = None;
        loop {
            let Copies { lacking, copied, written } = self.copies().await?;
            let now = Instant::now();
            let writes = writes.get_or_insert_with(|| Rate::begin(written, now));
            let dirty_rate = writes.measure(written, now);
            let (remaining, sent) = (lacking, copied);
            tell(MigrationProgress { remaining, sent, dirty_rate, ..Default::default() });
            if nearing.is_ready(lacking) {
                return Ok(());
            }
            looks.pause().await;
        }
    }

    /// The same while the guest stands still: nothing changes the disks any more, so less is waited for.
    ///
    /// # Errors
    /// The filter's; `internal`: it takes longer than the guest may stand still.
    pub async fn until_complete_soon(&self, guest: &StandStill) -> Result<(), Problem> {
        let little = guest.last_bytes(READY_BYTES);
        let lacking = self.copies().await?.lacking;
        if lacking <= little {
            return Ok(());
        }
        let small = async {
            while self.copies().await?.lacking > little {
                tokio::time::sleep(REST_INTERVAL).await;
            }
            Ok(())
        };
        let limit = guest.limit(REST_TIMEOUT, lacking);
        let late = || {
            let (lacking, seconds) = (Size(lacking), limit.as_secs());
            internal(format!(
                "the copies of its disks lacked {lacking} when its guest stood still, which were not copied within {seconds} s"
            ))
        };
        timeout(limit, small).await.unwrap_or_else(|_| Err(late()))
    }

    /// How far the copies are.
    async fn copies(&self) -> Result<Copies, Problem> {
        let mut all = Copies::default();
        if self.written.is_empty() {
            return Ok(all);
        }
        let status = self.control.status().await.map_err(internal)?;
        for id in &self.written {
            let disk = status.disks.iter().find(|disk| disk.disk == *id);
            let copy = disk.map_or_else(|| Err(restarted()), of_copy)?;
            all.lacking += copy.lacking;
            all.copied += copy.copied;
            all.written += copy.written;
        }
        Ok(all)
    }

    /// The filter has let them go: waits until the other host has all.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn end(self, guest: &StandStill) -> Result<(), Problem> {
        let ended = async {
            for bridge in self.bridges {
                bridge.done().await.map_err(lost)?;
            }
            Ok(())
        };
        let late = || internal("the other host does not end the connections of the copied disks");
        timeout(guest.limit(END_TIMEOUT, 0), ended).await.unwrap_or_else(|_| Err(late()))
    }
}

/// How far copies are, in bytes.
#[derive(Default)]
struct Copies {
    /// What they lack.
    lacking: u64,
    /// What was copied.
    copied: u64,
    /// What the guest has written to their disks since its filter began.
    written: u64,
}

fn of_copy(disk: &DiskStatus) -> Result<Copies, Problem> {
    let mirror = disk.mirror.as_ref().ok_or_else(restarted)?;
    match &mirror.last_error {
        Some(error) => Err(internal(format!("a disk cannot be copied: {error}"))),
        None => Ok(Copies {
            lacking: mirror.dirty_bytes,
            copied: mirror.copied_bytes,
            written: disk.counters.written_bytes,
        }),
    }
}

fn restarted() -> Problem {
    internal("the guest's filter was restarted while it copied its disks")
}
