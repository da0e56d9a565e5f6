//! Making a disk longer, of a VM that is off as of one that runs.
//!
//! The image grows first, then what is on record of the disk, then the filter is replaced by one that serves the new
//! size, and then QEMU is told. In the disk's dirty bitmaps what is new is dirty. An agent that ends in between finds the new
//! size on record, or is asked again.

use std::fs::File;

use vmseal_api::host::VmSpec;
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::Owner;
use crate::process::run_dir::ProcessDir;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::grow::{Growth, Holder};
use crate::storage::timed;
use crate::vm::{images, internal};

/// Checks that a file is the image that the guest's filter has.
fn check_file(growth: &Growth, directory: &ProcessDir, file: &File) -> Result<(), Problem> {
    match growth.holder {
        Holder::Filter => images::check(directory, &[(&growth.disk, file)]),
        Holder::Nobody => Ok(()),
    }
}

impl Owner {
    /// Checks that a disk may grow, as far as that can be told without its image.
    async fn may_grow(&mut self, disk: DiskId, size: u64) -> Result<Growth, Problem> {
        let disk = find_disk(&self.spec, disk)?.clone();
        self.situation().may(Action::GrowDisk, Some(&disk))?;
        let facts = self.facts(&disk);
        rules::check_growth(&self.spec, &disk, facts.is_some(), size)?;
        let Some(facts) = facts else { return Err(internal("a disk without facts")) };
        let used = self.running().is_some_and(|running| running.live.disk(disk.disk).is_some());
        if used && disk.size != size {
            self.may_replace_filter().await?;
        }
        let holder = if used { Holder::Filter } else { Holder::Nobody };
        Ok(Growth { spec: self.spec.clone(), disk, facts, size, holder })
    }

    /// Checks that a disk could be made `size` bytes long now.
    pub(super) async fn examine_growth(&mut self, disk: DiskId, size: u64) -> Result<(), Problem> {
        let growth = self.may_grow(disk, size).await?;
        let directory = self.shared.run_dir.vm(self.spec.vm);
        let path = growth.disk.datastore.location.path().to_owned();
        let look = move || growth.examine(|file| check_file(&growth, &directory, file));
        timed::call(&path, look).await
    }

    /// Makes a disk `size` bytes long; one that is, stays so.
    pub(super) async fn grow_disk(&mut self, disk: DiskId, size: u64) -> Result<(), Problem> {
        let growth = self.may_grow(disk, size).await?;
        let (disk, used) = (growth.disk.clone(), growth.holder == Holder::Filter);
        let directory = self.shared.run_dir.vm(self.spec.vm);
        let path = disk.datastore.location.path().to_owned();
        let growing = move || growth.make(|file| check_file(&growth, &directory, file));
        timed::call(&path, growing).await?;
        let longer = |spec: &VmSpec| {
            let mut spec = spec.clone();
            spec.disks_mut().filter(|known| known.disk == disk.disk).for_each(|it| it.size = size);
            spec
        };
        let (spec, next) = (longer(&self.spec), self.next.as_ref().map(longer));
        self.next = next;
        if !used {
            self.spec = spec;
            self.describe();
            return Ok(());
        }
        if disk.size != size {
            let Some(running) = self.running() else { return Err(internal("it has ended")) };
            let known = running.live.disks.iter_mut().filter(|known| known.disk == disk.disk);
            known.for_each(|known| known.grown = true);
            self.keep(spec)?;
            self.describe();
            if let Err(problem) = self.replace_filter().await {
                // It is started again until it serves: the guest waits.
                self.serve_again();
                return Err(problem);
            }
        }
        self.tell_of_growth().await;
        Ok(())
    }

    /// Has QEMU look at disks that have grown since it looked. It does not look while its guest's driver does not use
    /// the disk; then it is told later.
    pub(super) async fn tell_of_growth(&mut self) {
        let spec = self.spec.clone();
        if !self.running().is_some_and(|running| running.live.disks.iter().any(|disk| disk.grown)) {
            return;
        }
        // An earlier agent may have ended between putting the size on record and having it served.
        if !self.serves_sizes {
            let served = match self.may_replace_filter().await {
                Ok(()) => self.replace_filter().await,
                refused => refused,
            };
            if let Err(problem) = served {
                tracing::info!(vm = %spec.vm, %problem, "a disk is not served with its new size yet");
                return self.serve_again();
            }
        }
        let Some(running) = self.running() else { return };
        let control = running.control.clone();
        let mut told = false;
        for disk in running.live.disks.iter_mut().filter(|disk| disk.grown) {
            match control.announce_size(disk.disk).await {
                Ok(()) => (disk.grown, told) = (false, true),
                Err(error) => tracing::info!(disk = %disk.disk, %error, "QEMU is not told yet"),
            }
        }
        if told && let Err(problem) = running.write(&spec) {
            tracing::warn!(vm = %spec.vm, %problem, "QEMU will be told of a disk's size again");
        }
    }
}
