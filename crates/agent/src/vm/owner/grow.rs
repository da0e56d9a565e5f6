//! Making a disk longer, of a VM that is off as of one that runs.
//!
//! ```text
//!  image grown ─► size on record ─► disk drained ─► its stack replaced by a longer one ─► resumed ─► QEMU told
//!                                     └── not possible: the filter is replaced by one that serves the new size ──^
//! ```
//! A replica grows before its disk does (docs/decisions/247), and has the filter be replaced.
//!
//! The other disks are not disturbed (docs/decisions/234). In the disk's dirty bitmaps what is new is dirty. An agent that ends in
//! between finds the new size on record, or is asked again. A filter that still serves the former size harms nothing.

use std::fs::File;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::Owner;
use crate::filter::{Control, FilterError, NewLayers, channel_of};
use crate::process::run_dir::ProcessDir;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::builder::is_preallocated;
use crate::storage::grow::{Growth, Holder};
use crate::storage::home::Home;
use crate::storage::layers::{self, Files};
use crate::storage::locked::{Access, lock_for_successors};
use crate::storage::opening;
use crate::storage::replica::length;
use crate::timed;
use crate::vm::{images, internal};

/// Checks that a file is the image that the guest's filter has.
fn check_file(growth: &Growth, directory: &ProcessDir, file: &File) -> Result<(), Problem> {
    match growth.holder {
        Holder::Filter => images::check(directory, &[(&growth.disk, file)]),
        Holder::Nobody => Ok(()),
    }
}

/// Makes the replica of a disk that is to grow longer, before anything else is. Where that is not possible the disk grows all the same:
/// its next filter makes the replica as long, and copies all of it again.
async fn lengthen_replica(growth: &Growth) {
    let Growth { spec, disk, facts, size, holder } = growth;
    let access = match holder {
        Holder::Filter => Access::BesideGuest,
        Holder::Nobody => Access::Write,
    };
    if let Err(problem) =
        length::lengthen(spec.vm, disk, opening::data_offset(facts), *size, access).await
    {
        tracing::warn!(vm = %spec.vm, disk = %disk.disk, %problem, "a replica does not grow with its disk, all of which will be copied again");
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
        if used && disk.size != size && self.filter_that_grows(disk.disk).await.is_none() {
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
        lengthen_replica(&growth).await;
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
        let mut only = None;
        if disk.size != size {
            let Some(running) = self.running() else { return Err(internal("it has ended")) };
            let known = running.live.disks.iter_mut().filter(|known| known.disk == disk.disk);
            known.for_each(|known| known.grown = true);
            self.keep(spec).await?;
            self.describe();
            // The others are served so already: a client of theirs does not matter.
            only = self.serves_sizes.then_some(disk.disk);
            self.serves_sizes = false;
        }
        if !self.serves_sizes {
            self.serve_sizes(only).await?;
        }
        self.tell_of_growth().await;
        Ok(())
    }

    /// The guest's filter, where it can make this disk longer while it runs.
    async fn filter_that_grows(&mut self, disk: DiskId) -> Option<Control> {
        // What keeps a replica is not exchanged while it serves (docs/decisions/226).
        if self.spec.disk(disk).is_some_and(|disk| disk.replica.is_some()) {
            return None;
        }
        let (control, status) = self.filter_that_replaces(&[disk]).await?;
        status.grows.then_some(control)
    }

    /// Has the disks that have grown, or only this one of them, served with the sizes that are on record.
    async fn serve_sizes(&mut self, only: Option<DiskId>) -> Result<(), Problem> {
        let Some(running) = self.running() else { return Err(internal("it has ended")) };
        let meant = |disk: DiskId| only.is_none_or(|only| only == disk);
        let disks = running.live.disks.iter().filter(|disk| disk.grown && meant(disk.disk));
        let disks: Vec<DiskId> = disks.map(|disk| disk.disk).collect();
        let mut served = true;
        for disk in disks {
            served = served && self.lengthen_served(disk).await;
        }
        if !served {
            let replaced = match self.may_replace_filter().await {
                Ok(()) => self.replace_filter().await,
                refused => refused,
            };
            if let Err(problem) = replaced {
                // It is started again until it serves: the guest waits.
                self.serve_again();
                return Err(problem);
            }
        }
        self.serves_sizes = true;
        Ok(())
    }

    /// Has the filter serve a disk with the size that is on record, without a restart; false where that is not possible.
    async fn lengthen_served(&mut self, disk: DiskId) -> bool {
        let Some(control) = self.filter_that_grows(disk).await else { return false };
        let Some(disk) = self.spec.disk(disk).cloned() else { return false };
        let Some(facts) = self.facts(&disk) else { return false };
        let (vm, directory) = (self.spec.vm, self.shared.run_dir.vm(self.spec.vm));
        let lengthened = spawn_blocking(move || lengthen(vm, &control, &directory, &disk, &facts));
        let lengthened = lengthened.await.map_err(internal).flatten();
        lengthened
            .inspect_err(
                |problem| tracing::info!(%vm, %problem, "the filter is replaced for a longer disk"),
            )
            .is_ok()
    }

    /// Has QEMU look at disks that have grown since it looked. It does not look while its guest's driver does not use
    /// the disk; then it is told later.
    pub(super) async fn tell_of_growth(&mut self) {
        let spec = self.spec.clone();
        if !self.running().is_some_and(|running| running.live.disks.iter().any(|disk| disk.grown)) {
            return;
        }
        // An earlier agent may have ended between putting the size on record and having it served.
        if !self.serves_sizes
            && let Err(problem) = self.serve_sizes(None).await
        {
            tracing::info!(vm = %spec.vm, %problem, "a disk is not served with its new size yet");
            return;
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

/// Has a filter serve a disk, whose image is long enough, with the size that it has in `disk`. Blocks.
fn lengthen(
    vm: VmId,
    control: &Control,
    directory: &ProcessDir,
    disk: &DiskSpec,
    facts: &DiskFacts,
) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, vm)?;
    let known = layers::read(&home, disk.disk)?;
    let files = layers::open_served(&home, disk.disk, &known)?;
    images::check(directory, &[(disk, files.own())])?;
    // Where the filter has it as one that it only read before a layer was merged into it, it writes it by this descriptor.
    lock_for_successors(files.written()).map_err(internal)?;
    let Files { image: file, layers, own, .. } = files;
    let (offset, keeps_room) = (opening::data_offset(facts), is_preallocated(disk));
    let channel = channel_of(&file, &layers);
    let new = NewLayers { disk: disk.disk, file, layers, offset, keeps_room, own, channel };
    let mut waiting = control.drain(vec![disk.disk]).map_err(internal)?;
    let begun = std::time::Instant::now();
    waiting.lengthen(new, disk.size).map_err(internal)?;
    match waiting.resume() {
        Ok(()) => {
            let waited = begun.elapsed().as_micros();
            tracing::info!(%vm, disk = %disk.disk, size = disk.size, microseconds = waited, "the disk is longer");
            Ok(())
        }
        // They have gone on by themselves, with what they have now.
        Err(FilterError::Refused { .. }) => Ok(()),
        Err(error) => Err(internal(error)),
    }
}
