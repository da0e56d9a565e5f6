//! Snapshots of disks on a simulated host: they outlive the agent, as those of a real one do.

use std::collections::BTreeMap;

use vmseal_api::host::{JobSpec, KeptOfDisk, KeptRoom, LAYERS_MAX, PlacedDisk};
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Inside, SimulatedHost};
use crate::rules::{self, find_disk};

/// How much each snapshot keeps of a disk, in bytes.
pub const SNAPSHOT_ROOM: u64 = 1 << 20;

/// The snapshots of each disk, in the order in which they were taken; and those that other hosts will send with a disk.
#[derive(Default)]
pub struct Snapshots(BTreeMap<DiskId, Vec<SnapshotId>>, BTreeMap<DiskId, Vec<SnapshotId>>);

/// The disks of linked clones, by what they stand on: a disk and its snapshot.
#[derive(Default)]
pub struct Links(BTreeMap<DiskId, (DiskId, SnapshotId)>);

impl Links {
    /// Whether a disk has files in common with others.
    pub fn shares(&self, disk: DiskId) -> bool {
        self.0.iter().any(|(clone, (on, _))| *clone == disk || *on == disk)
    }
}

impl SimulatedHost {
    /// The snapshots that a disk has.
    #[must_use]
    pub fn snapshots(&self, disk: DiskId) -> Vec<SnapshotId> {
        self.inside().persisted.snapshots.0.get(&disk).cloned().unwrap_or_default()
    }

    /// What another host will send with a disk.
    pub fn will_receive(&self, disk: DiskId, snapshots: Vec<SnapshotId>) {
        self.inside().persisted.snapshots.1.insert(disk, snapshots);
    }
}

impl Inside {
    /// Checks what the files of a real host say.
    pub fn ready_for_snapshots(&mut self, vm: VmId, job: &JobSpec) -> Result<(), Problem> {
        let spec = self.known(vm)?.spec.clone();
        for disk in job.disks() {
            let disk = find_disk(&spec, disk)?;
            let known = self.persisted.snapshots.0.get(&disk.disk).map_or(&[][..], Vec::as_slice);
            match job {
                JobSpec::Snapshot(job) if known.contains(&job.snapshot) => {}
                JobSpec::Snapshot(_) if known.len() >= LAYERS_MAX => {
                    let what = format!("disk '{}' has {LAYERS_MAX} snapshots", disk.name);
                    return Err(Problem::new(ErrorCode::LimitExceeded, what));
                }
                JobSpec::DropSnapshot(job) => {
                    self.is_unshared(disk.disk, job.snapshot)?;
                }
                JobSpec::Revert(job) if !known.contains(&job.snapshot) => {
                    return Err(rules::no_snapshot(&spec.name, disk, job.snapshot));
                }
                JobSpec::Export(job) => match job.snapshot {
                    Some(snapshot) if !known.contains(&snapshot) => {
                        return Err(rules::no_snapshot(&spec.name, disk, snapshot));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that no linked clone stands on what a snapshot of a disk keeps. What is linked to a snapshot stands on those before it, too.
    fn is_unshared(&self, disk: DiskId, snapshot: SnapshotId) -> Result<(), Problem> {
        let mut links = self.persisted.links.0.values();
        let known = self.persisted.snapshots.0.get(&disk).map_or(&[][..], Vec::as_slice);
        let up_to = |kept: &SnapshotId| {
            let end = known.iter().position(|it| it == kept);
            end.map_or(&[][..], |end| &known[..=end])
        };
        let stands =
            |(on, kept): &(DiskId, SnapshotId)| *on == disk && up_to(kept).contains(&snapshot);
        if links.any(stands) {
            let what = "linked clones stand on this: delete them first";
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
        Ok(())
    }

    /// Records what a disk stands on that has just been made.
    pub fn link(&mut self, job: &JobSpec, disk: DiskId) {
        let JobSpec::Create(create) = job else { return };
        let of = create.disks.iter().find(|wanted| wanted.disk == disk);
        let of = of.and_then(|wanted| wanted.copy_of).filter(|of| of.linked);
        if let Some((on, kept)) = of.and_then(|of| Some((of.disk, of.snapshot?))) {
            self.persisted.links.0.insert(disk, (on, kept));
        }
    }

    /// A disk is a copy now: it stands on nothing, and what stood on it keeps the former files, with those below.
    pub fn part(&mut self, disk: DiskId) {
        let Links(links) = &mut self.persisted.links;
        match links.remove(&disk) {
            Some(below) => links.values_mut().filter(|it| it.0 == disk).for_each(|it| *it = below),
            None => links.retain(|_, (on, _)| *on != disk),
        }
    }

    /// A disk is gone: it stands on nothing.
    pub fn unlink(&mut self, disk: DiskId) {
        self.persisted.links.0.remove(&disk);
    }

    /// Checks the disks of other VMs that new ones are filled from.
    pub fn ready_to_copy(&mut self, vm: VmId, job: &JobSpec) -> Result<(), Problem> {
        let JobSpec::Create(create) = job else { return Ok(()) };
        let into = self.known(vm)?.spec.clone();
        for wanted in &create.disks {
            let Some(of) = wanted.copy_of else { continue };
            let known = self.known(of.vm)?;
            let (spec, key) = (known.spec.clone(), rules::key_state(&known.spec, known.key_held));
            let disk = find_disk(&spec, of.disk)?;
            let made = known.has_made(disk);
            rules::check_copied(&spec, disk, key, made)?;
            rules::check_copy(find_disk(&into, wanted.disk)?, disk)?;
            let kept = self.persisted.snapshots.0.get(&of.disk);
            match of.snapshot {
                None => {
                    self.situation(of.vm)?.may(rules::lending(disk), Some(disk))?;
                }
                Some(snapshot) if !kept.is_some_and(|kept| kept.contains(&snapshot)) => {
                    return Err(rules::no_snapshot(&spec.name, disk, snapshot));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Whether a snapshot keeps something of a disk.
    pub fn keeps(&self, disk: DiskId, snapshot: SnapshotId) -> bool {
        self.persisted.snapshots.0.get(&disk).is_some_and(|kept| kept.contains(&snapshot))
    }

    /// Whether a disk has snapshots.
    pub fn has_snapshots(&self, disk: DiskId) -> bool {
        self.persisted.snapshots.0.get(&disk).is_some_and(|known| !known.is_empty())
    }

    pub fn take_snapshot(&mut self, disks: &[DiskId], snapshot: SnapshotId) {
        for disk in disks {
            let known = self.persisted.snapshots.0.entry(*disk).or_default();
            if !known.contains(&snapshot) {
                known.push(snapshot);
            }
        }
    }

    pub fn drop_snapshot(&mut self, disks: &[DiskId], snapshot: SnapshotId) {
        for disk in disks {
            if let Some(known) = self.persisted.snapshots.0.get_mut(disk) {
                known.retain(|other| *other != snapshot);
            }
        }
    }

    /// A disk has come from another host, with its snapshots.
    pub fn receive_snapshots(&mut self, disk: DiskId) {
        let Snapshots(here, coming) = &mut self.persisted.snapshots;
        if let Some(snapshots) = coming.get(&disk) {
            here.insert(disk, snapshots.clone());
        }
    }

    /// What snapshots keep of these disks: the first one the image, each other one a layer.
    pub fn kept_room(&self, disks: &[PlacedDisk]) -> KeptRoom {
        let of = |it: &PlacedDisk| {
            let count = self.persisted.snapshots.0.get(&it.disk)?.len();
            let layers = u64::try_from(count).ok()?.checked_sub(1)?.saturating_mul(SNAPSHOT_ROOM);
            Some(KeptOfDisk { disk: it.disk, image: SNAPSHOT_ROOM, layers })
        };
        KeptRoom { disks: disks.iter().filter_map(of).collect(), memories: 0 }
    }

    /// A disk is removed, with all of it.
    pub fn forget_snapshots(&mut self, disk: DiskId) {
        self.persisted.snapshots.0.remove(&disk);
    }
}
