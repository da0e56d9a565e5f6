//! The copies of mirrored disks on a simulated host: they outlive the agent, as those of a real one do.

use std::collections::BTreeMap;

use vmseal_api::former_image::{Discard, FormerFate, FormerImage};
use vmseal_api::host::{DiskFacts, DiskSpec, DiskToMirror, MirrorJob, Power, VmSpec};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};

use super::calls::{Later, facts};
use super::{Inside, Persisted, SimulatedHost, Work, gone};
use crate::rules::{self, find_disk};

/// The inode of what linked clones share: simulated files have none.
const SHARED_INODE: u64 = 7;

/// The copies of disks, and their former images.
#[derive(Default)]
pub struct Copies {
    unfinished: BTreeMap<DiskId, TaskId>,
    /// How fast a task's disks are copied.
    paces: BTreeMap<TaskId, CopyPace>,
    sources: BTreeMap<DiskId, TaskId>,
    /// What will have become of them when they are removed.
    fates: BTreeMap<DiskId, FormerFate>,
}

impl SimulatedHost {
    /// The disks that are being copied, and those whose former images are there.
    #[must_use]
    pub fn mirrored(&self) -> (Vec<DiskId>, Vec<DiskId>) {
        let inside = self.inside();
        let Copies { unfinished, sources, .. } = &inside.persisted.copies;
        (unfinished.keys().copied().collect(), sources.keys().copied().collect())
    }

    /// How fast disks are copied.
    #[must_use]
    pub fn paces(&self) -> Vec<CopyPace> {
        let inside = self.inside();
        let Copies { unfinished, paces, .. } = &inside.persisted.copies;
        let of_disk = |task| paces.get(task).copied().unwrap_or_default();
        unfinished.values().map(of_disk).collect()
    }
}

impl Inside {
    /// Checks that no other copy of these disks is there.
    pub fn ready_to_mirror(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let (spec, power) = (self.known(vm)?.spec.clone(), self.known(vm)?.power);
        rules::check_tpm_at_rest(&spec, job, power)?;
        for disk in &job.disks {
            let replica = find_disk(&spec, disk.disk)?.replica.as_ref();
            let begun = self.persisted.copies.unfinished.contains_key(&disk.disk);
            if let Some(replica) = replica.filter(|_| !begun) {
                self.check_place(&replica.datastore)?;
            }
            let Copies { unfinished, sources, .. } = &self.persisted.copies;
            let other = unfinished.get(&disk.disk).filter(|other| **other != task);
            if let Some(other) = other.or_else(|| sources.get(&disk.disk)) {
                return Err(rules::other_mirror(find_disk(&spec, disk.disk)?, *other));
            }
        }
        match self.full {
            true => Err(Problem::new(ErrorCode::NoSpace, "the simulated datastore is full")),
            false => Ok(()),
        }
    }

    pub fn begin_mirror(&mut self, task: TaskId, job: &MirrorJob) {
        let begun = job.disks.iter().map(|disk| (disk.disk, task));
        self.persisted.copies.unfinished.extend(begun);
        self.persisted.copies.paces.insert(task, job.pace);
    }

    /// Has a job that is there go on at another pace.
    pub fn set_pace(&mut self, vm: VmId, task: TaskId, pace: CopyPace) -> Result<Later, Problem> {
        let known = self.known(vm)?;
        if known.jobs.pace(task).is_none_or(|now| now == pace) {
            return Ok(None);
        }
        rules::check_pace(pace)?;
        let unfinished = known.jobs.set_pace(task, pace);
        known.work.remove(&Work::Job(task));
        self.persisted.copies.paces.insert(task, pace);
        if pace.paused || unfinished.is_empty() {
            self.agent.publish(vm);
            return Ok(None);
        }
        self.numbered(vm, Work::Job(task), self.work)
    }

    /// Has a job that works without a guest go on at another pace.
    pub fn set_work_pace(
        &mut self,
        vm: VmId,
        task: TaskId,
        pace: CopyPace,
    ) -> Result<Later, Problem> {
        rules::check_pace(pace)?;
        let known = self.known(vm)?;
        known.jobs.set_work_pace(task, pace)?;
        known.work.remove(&Work::Job(task));
        if pace.paused {
            self.agent.publish(vm);
            return Ok(None);
        }
        self.numbered(vm, Work::Job(task), self.work)
    }

    fn is_paused(&self, task: TaskId) -> bool {
        self.persisted.copies.paces.get(&task).is_some_and(|pace| pace.paused)
    }

    /// Puts the copies in the place of their disks.
    pub fn commit_mirror(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        if self.is_paused(task) {
            return Err(rules::copies_are_paused(&self.known(vm)?.spec, task));
        }
        let known = self.known(vm)?;
        rules::check_tpm_at_rest(&known.spec, job, known.power)?;
        let power = known.power;
        let copies = &self.persisted.copies.unfinished;
        let pivots = job.disks.iter().any(|disk| copies.get(&disk.disk) == Some(&task));
        if pivots && matches!(power, Power::Starting | Power::Stopping) {
            return Err(rules::switched_later(&self.known(vm)?.spec));
        }
        for (committed, wanted) in job.disks.iter().enumerate() {
            if self.halfway && committed > 0 {
                return Err(gone());
            }
            let spec = self.known(vm)?.spec.clone();
            let disk = find_disk(&spec, wanted.disk)?;
            if self.fail_disks.contains(&disk.disk) {
                return Err(Problem::new(ErrorCode::Internal, "an injected failure"));
            }
            let fate = self.fate(disk.disk);
            let Copies { unfinished, sources, fates, .. } = &mut self.persisted.copies;
            match (unfinished.get(&disk.disk), sources.get(&disk.disk)) {
                (Some(of), _) if *of == task => {
                    unfinished.remove(&disk.disk);
                    sources.insert(disk.disk, task);
                    fates.insert(disk.disk, fate);
                }
                (_, Some(of)) if *of == task => {}
                _ => return Err(rules::nothing_to_commit(task)),
            }
            self.part(disk.disk);
            self.use_copy(vm, &spec, disk, wanted)?;
            if spec.disks().next().is_some_and(|first| first.disk == disk.disk) {
                self.seal_beside(vm, job.forgets_key)?;
            }
        }
        self.known(vm)?.jobs.committed(task);
        self.describe_on_datastores(vm)?;
        self.agent.publish(vm);
        Ok(())
    }

    pub(super) fn use_copy(
        &mut self,
        vm: VmId,
        spec: &VmSpec,
        disk: &DiskSpec,
        wanted: &DiskToMirror,
    ) -> Result<(), Problem> {
        let encrypted = wanted.encrypted;
        let facts = facts(&DiskSpec { encrypted, ..disk.clone() })?;
        let offset = match &facts {
            DiskFacts::Raw => 0,
            DiskFacts::Luks2 { data_offset, .. } => *data_offset,
        };
        let key = spec.key.clone().filter(|_| encrypted);
        if let Some(image) = self.persisted.disks.get_mut(&disk.disk) {
            image.facts = facts.clone();
            image.checks = key.iter().map(|key| key.check.clone()).collect();
            image.keys = key.into_iter().collect();
            image.shared = false;
            image.length = disk.size + offset;
        }
        let change = |spec: &mut VmSpec| {
            for known in spec.disks_mut().filter(|known| known.disk == disk.disk) {
                (known.encrypted, known.facts) = (encrypted, Some(facts.clone()));
                if let Some(to) = &wanted.datastore {
                    known.datastore = to.clone();
                }
            }
        };
        let known = self.known(vm)?;
        known.made.insert(disk.disk, facts.clone());
        change(&mut known.spec);
        known.next.as_mut().map(change);
        match self.persisted.guests.get_mut(&vm) {
            Some(guest) => change(&mut guest.spec),
            None => self.forget_bitmaps(vm, disk.disk),
        }
        if let Some(guest) = self.persisted.suspended.get_mut(&vm) {
            change(&mut guest.spec);
        }
        Ok(())
    }

    /// What is beside the first disk of a VM has followed its copy: under its key, or in the clear.
    fn seal_beside(&mut self, vm: VmId, forgets_key: bool) -> Result<(), Problem> {
        let key = self.known(vm)?.spec.key.clone().filter(|_| !forgets_key);
        let asked = self.persisted.dumps.values_mut();
        asked.filter(|(of, _)| *of == vm).for_each(|(_, sealed)| *sealed = key.is_some());
        let own = self.persisted.panic_dumps.iter_mut();
        own.filter(|(of, _)| *of == vm).for_each(|(_, dump)| dump.encrypted = key.is_some());
        if let Some(guest) = self.persisted.suspended.get_mut(&vm) {
            guest.spec.key = key;
        }
        self.list_panic_dumps(vm);
        Ok(())
    }

    /// Refuses to be rid of the key of what is under it.
    pub fn require_nothing_sealed(&mut self, vm: VmId) -> Result<(), Problem> {
        let Persisted { suspended, dumps, panic_dumps, .. } = &self.persisted;
        let memory = suspended.get(&vm).is_some_and(|guest| guest.spec.key.is_some());
        let core = dumps.values().any(|(of, sealed)| *of == vm && *sealed)
            || panic_dumps.iter().any(|(of, dump)| *of == vm && dump.encrypted);
        let file = match (memory, core) {
            (true, _) => "vm.memory",
            (false, true) => "vm.core",
            (false, false) => return Ok(()),
        };
        Err(rules::needs_its_key(&self.known(vm)?.spec, file))
    }

    /// Removes what a cancelled job has copied.
    pub fn cancel_mirror(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let sources = &self.persisted.copies.sources;
        if job.disks.iter().any(|disk| sources.get(&disk.disk) == Some(&task)) {
            return Err(rules::is_mirrored(&self.known(vm)?.spec));
        }
        // A real host looks for the copies there.
        for place in job.disks.iter().filter_map(|disk| disk.datastore.as_ref()) {
            self.check_place(place)?;
        }
        let Copies { unfinished, paces, .. } = &mut self.persisted.copies;
        unfinished.retain(|_, of| *of != task);
        paces.remove(&task);
        Ok(())
    }

    /// Removes the former image of a disk, if there is one: what has become of it.
    pub fn drop_source(&mut self, vm: VmId, disk: DiskId) -> Option<FormerImage> {
        self.settle_conversion(disk);
        self.persisted.copies.sources.remove(&disk);
        let fate = self.persisted.copies.fates.remove(&disk)?;
        let name = self.known(vm).ok()?.spec.disk(disk)?.name.clone();
        Some(FormerImage { disk, name, fate, discard: Discard::NotKnown })
    }

    /// What will have become of the image of a disk that gets a copy: what linked clones share is left to them.
    fn fate(&self, disk: DiskId) -> FormerFate {
        let facts = self.persisted.disks.get(&disk).map(|image| &image.facts);
        let in_the_clear = facts == Some(&DiskFacts::Raw);
        if self.persisted.links.shares(disk) {
            let (clones, inodes) = (Vec::new(), vec![SHARED_INODE]);
            return FormerFate::Shared { in_the_clear, clones, inodes };
        }
        if in_the_clear { FormerFate::Overwritten } else { FormerFate::HeaderOverwritten }
    }

    /// A disk is removed, with all of it.
    pub fn forget_copies(&mut self, disk: DiskId) {
        self.settle_conversion(disk);
        self.persisted.copies.sources.remove(&disk);
        self.persisted.copies.fates.remove(&disk);
        self.persisted.copies.unfinished.remove(&disk);
    }
}
