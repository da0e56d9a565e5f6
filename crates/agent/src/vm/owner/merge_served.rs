//! Ends merges of the layers of a running guest's disk while its filter serves it (docs/decisions/140, 169).
//!
//! ```text
//!   the active layer   all opened, note written beside its place, the filter that merges started
//!                        │   ─► drained ─► merged ─► retired ─► note put ─► replaced ─► resumed ─► that filter has ended
//!                        └── not possible: nothing has changed        │           │         └── an error: the filter ends or is
//!                                  the guest goes on as before ◄── an error, or too long        ended, and starts by the notes
//!   another one        merged, noted ─► the rest opened ─► drained ─► replaced ─► resumed
//! ```
//! While it is merged, the active layer hides all that is written below it. So a guest that goes on meanwhile, as this agent has
//! died or the storage hangs, loses nothing: the merge is done again. From the note on the layer is out of date, and a guest must
//! not write there any more: before that the filter is told to end rather than do so ([`Waiting::retire`]).

use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::host::{DiskFacts, DiskSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Owner;
use super::stacks::{Put, unknown};
use crate::filter::{Control, NewLayers, Waiting, channel_of};
use crate::process::run_dir::ProcessDir;
use crate::storage::builder::is_preallocated;
use crate::storage::home::Home;
use crate::storage::layers::{self, Files, LayerId, PreparedNote};
use crate::storage::locked::lock_for_successors;
use crate::storage::opening;
use crate::vm::merging::{Begun, Merging, Written};
use crate::vm::{images, internal};

/// The longest that a guest waits for its active layer to be merged: what is left of [`vmseal_api::filter::DRAINED_MAX`] is for the
/// note and the new stack.
const MERGE_MAX: Duration = Duration::from_secs(7);

/// What a disk is to have, opened while it is served by something else.
struct Next {
    note: Option<PreparedNote>,
    new: NewLayers,
}

impl Owner {
    /// Merges the active layer of a disk while the guest waits, without a restart of its filter, if it can.
    pub(super) async fn merge_active_served(
        &mut self,
        disk: &DiskSpec,
        upper: LayerId,
        merging: Merging,
    ) -> Result<Put, Problem> {
        let served = self.filter_that_replaces(&[disk.disk]).await;
        let Some((control, status)) = served else { return Ok(Put::NotPossible) };
        if !status.retires {
            return Ok(Put::NotPossible);
        }
        let next = self.open_next(disk, Some(upper)).await?;
        let directory = merging.builder.directory.clone();
        // It reads nothing before it goes on: what it then reads is what the guest has written.
        let merging = merging.begin().await?;
        let waiting = match drain(self.spec.vm, control, disk).await {
            Ok(Some(waiting)) => waiting,
            other => {
                merging.give_up().await;
                return other.map(|_| Put::NotPossible);
            }
        };
        let begun = Instant::now();
        let written = merge(disk, merging, &directory).await?;
        let merged = begun.elapsed();
        let put = spawn_blocking(move || put(waiting, next)).await.map_err(internal).flatten();
        // The guest does not wait for its end.
        if let Err(problem) = written.leave().await {
            tracing::warn!(vm = %self.spec.vm, %problem, "the filter of a merge is left");
        }
        let put = put?;
        if matches!(put, Put::Served) {
            let (waited, merged) = (begun.elapsed().as_micros(), merged.as_micros());
            let vm = self.spec.vm;
            tracing::info!(%vm, disk = %disk.disk, microseconds = waited, merged, "the active layer is merged");
        }
        Ok(put)
    }

    /// Has the guest's filter let go of layers of a disk that were merged, without a restart, if it can.
    pub(super) async fn let_go_of_merged(&mut self, disk: &DiskSpec) -> Result<Put, Problem> {
        let served = self.filter_that_replaces(&[disk.disk]).await;
        let Some((control, _)) = served else { return Ok(Put::NotPossible) };
        let next = self.open_next(disk, None).await?;
        let Some(waiting) = drain(self.spec.vm, control, disk).await? else {
            return Ok(Put::NotPossible);
        };
        spawn_blocking(move || put(waiting, next)).await.map_err(internal)?
    }

    /// Opens what a disk is to have when its active layer is merged, or what it has on its note.
    async fn open_next(
        &mut self,
        disk: &DiskSpec,
        merged: Option<LayerId>,
    ) -> Result<Next, Problem> {
        let facts = self.facts(disk).ok_or_else(|| internal("a disk without facts"))?;
        let (vm, disk) = (self.spec.vm, disk.clone());
        let running = self.running().ok_or_else(|| internal("the VM has ended"))?;
        let directory = running.directory.clone();
        let open = move || open(vm, &directory, &disk, &facts, merged);
        spawn_blocking(open).await.map_err(internal)?
    }
}

/// Blocks.
fn open(
    vm: VmId,
    directory: &ProcessDir,
    disk: &DiskSpec,
    facts: &DiskFacts,
    merged: Option<LayerId>,
) -> Result<Next, Problem> {
    let home = Home::of(&disk.datastore, vm)?;
    let known = layers::read(&home, disk.disk)?;
    let (files, note) = match merged {
        Some(upper) => {
            let lower = layers::open_lower(&home, disk.disk, &known, upper)?;
            (lower, Some(layers::prepare_merged(&home, disk.disk, upper)?))
        }
        None => (layers::open_served(&home, disk.disk, &known)?, None),
    };
    images::check(directory, &[(disk, files.own())])?;
    lock_for_successors(files.written()).map_err(internal)?;
    let Files { image: file, layers, own, .. } = files;
    let (offset, keeps_room) = (opening::data_offset(facts), is_preallocated(disk));
    let (disk, channel) = (disk.disk, channel_of(&file, &layers));
    Ok(Next { note, new: NewLayers { disk, file, layers, offset, own, keeps_room, channel } })
}

/// Has a disk wait; none where the filter does not do that now.
async fn drain(vm: VmId, control: Control, disk: &DiskSpec) -> Result<Option<Waiting>, Problem> {
    let id = disk.disk;
    let drained = spawn_blocking(move || control.drain(vec![id])).await.map_err(internal)?;
    Ok(drained
        .inspect_err(|error| tracing::info!(%vm, disk = %id, %error, "the filter is restarted for the end of a merge"))
        .ok())
}

/// Merges a layer, unless that takes too long; nothing is written any more when this returns.
async fn merge(
    disk: &DiskSpec,
    merging: Begun,
    directory: &ProcessDir,
) -> Result<Written, Problem> {
    let merged = timeout(MERGE_MAX, merging.write(None, |_, _| ())).await;
    let problem = match merged {
        Ok(Ok(written)) => return Ok(written),
        Ok(Err(problem)) => problem,
        Err(_) => {
            let what = format!("disk '{}' takes too long to be merged", disk.name);
            Problem::new(ErrorCode::TimedOut, what)
        }
    };
    if let Err(error) = directory.sweep().await {
        tracing::warn!(directory = directory.name(), %error, "the filter of a merge is left");
    }
    Err(problem)
}

/// Puts the note, if there is one, and has the disk go on by it. Blocks.
fn put(mut waiting: Waiting, next: Next) -> Result<Put, Problem> {
    let Next { note, new } = next;
    if note.is_some()
        && let Err(error) = waiting.retire()
    {
        // It may have gone on, and the note is as before. It may also end now.
        let what = format!("the disk has not waited until its layer was merged: {error}");
        return Err(Problem::new(ErrorCode::TimedOut, what));
    }
    let put = note.map_or(Ok(()), PreparedNote::put);
    let replaced = put.and_then(|()| waiting.replace(&[new]).map_err(unknown));
    match replaced.and_then(|()| waiting.resume().map_err(unknown)) {
        Ok(()) => Ok(Put::Served),
        Err(problem) => Ok(Put::Unknown(problem)),
    }
}
