//! Puts layers above the disks of a running guest while its filter serves them (docs/decisions/140).
//!
//! ```text
//!   layers open, notes written beside their places ─► drained ─► notes put ─► stacks replaced ─► resumed
//!        └── not possible: nothing has changed         └── refused: nothing has changed
//!                                          an error once a note may be put: the filter is restarted, by the notes ◄──┘
//! ```
//! An agent that dies after a note was put leaves a filter that may serve the disks as before: the next one restarts it
//! ([`crate::vm::serve::has_stacks_of`]). What a snapshot keeps is then of that later instant, of all disks together.

use std::sync::Arc;

use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmseal_api::filter::FilterStatus;
use vmseal_api::host::{DiskFacts, DiskSpec};
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::problem::Problem;

use super::Owner;
use crate::filter::{Control, FilterError, NewLayers, channel_of};
use crate::storage::backup::TpmToKeep;
use crate::storage::builder::is_preallocated;
use crate::storage::home::Home;
use crate::storage::layers::{self, Files, Layer, PreparedNote};
use crate::storage::opening;
use crate::vm::internal;
use crate::vm::service::Service;

/// How disks got new layers.
pub(super) enum Put {
    /// They are served with them.
    Served,
    /// Nothing has changed, and the filter must be restarted for it.
    NotPossible,
    /// Notes may be put: the filter is restarted.
    Unknown(Problem),
}

/// A disk's next layer, ready to be put.
struct Ready {
    note: PreparedNote,
    new: NewLayers,
}

impl Owner {
    /// Puts layers above served disks without a restart of their filter, if it can.
    pub(super) async fn put_above_served(
        &mut self,
        begun: &[(DiskSpec, Layer)],
        keep: Option<(SnapshotId, Uuid)>,
        tpm: Option<Arc<TpmToKeep>>,
    ) -> Result<Put, Problem> {
        let vm = self.spec.vm;
        let facts = |(disk, layer): &(DiskSpec, Layer)| {
            Some((disk.clone(), layer.clone(), self.facts(disk)?))
        };
        let Some(disks) = begun.iter().map(facts).collect::<Option<Vec<_>>>() else {
            return Ok(Put::NotPossible);
        };
        let named: Vec<DiskId> = disks.iter().map(|(disk, ..)| disk.disk).collect();
        match self.filter_that_replaces(&named).await {
            Some((control, _)) => {
                let put = move || put(vm, &control, disks, keep, tpm.as_deref());
                spawn_blocking(put).await.map_err(internal)?
            }
            None => Ok(Put::NotPossible),
        }
    }

    /// The guest's filter and its status, where it can give these disks other stacks while it runs, and another filter could
    /// be started after an error.
    pub(super) async fn filter_that_replaces(
        &mut self,
        disks: &[DiskId],
    ) -> Option<(Control, FilterStatus)> {
        if self.spec.disks().any(|disk| disk.encrypted) && self.kek.is_none() {
            return None;
        }
        let running = self.running()?;
        if !matches!(running.service, Service::Served(_)) {
            return None;
        }
        let control = running.control.clone();
        let status = control.status().await.ok().filter(|status| status.replaces)?;
        let all = disks.iter().all(|disk| status.disks.iter().any(|served| served.disk == *disk));
        all.then_some((control, status))
    }
}

/// Blocks.
fn put(
    vm: VmId,
    control: &Control,
    disks: Vec<(DiskSpec, Layer, DiskFacts)>,
    keep: Option<(SnapshotId, Uuid)>,
    tpm: Option<&TpmToKeep>,
) -> Result<Put, Problem> {
    let ready = disks.into_iter().map(|disk| ready(vm, disk, keep));
    let ready = ready.collect::<Result<Vec<_>, Problem>>()?;
    let (notes, new): (Vec<_>, Vec<_>) = ready.into_iter().map(|it| (it.note, it.new)).unzip();
    let mut waiting = match control.drain(new.iter().map(|new| new.disk).collect()) {
        Ok(waiting) => waiting,
        Err(error) => {
            tracing::info!(%vm, %error, "the filter is restarted for new layers");
            return Ok(Put::NotPossible);
        }
    };
    let begun = std::time::Instant::now();
    if let Some(tpm) = tpm {
        tpm.take();
    }
    let put = PreparedNote::put_all(notes);
    let replaced = put.and_then(|()| waiting.replace(&new).map_err(unknown));
    let resumed = replaced.and_then(|()| waiting.resume().map_err(unknown));
    match resumed {
        Ok(()) => {
            let waited = begun.elapsed();
            tracing::info!(%vm, microseconds = waited.as_micros(), "the disks have new layers");
            Ok(Put::Served)
        }
        Err(problem) => Ok(Put::Unknown(problem)),
    }
}

pub(super) fn unknown(error: FilterError) -> Problem {
    internal(error)
}

/// Opens what a disk is to have, and writes its note beside its place. Blocks.
fn ready(
    vm: VmId,
    (disk, layer, facts): (DiskSpec, Layer, DiskFacts),
    keep: Option<(SnapshotId, Uuid)>,
) -> Result<Ready, Problem> {
    let home = Home::of(&disk.datastore, vm)?;
    let Files { image: file, layers, own, .. } = layers::open_above(&home, disk.disk, &layer)?;
    let offset = opening::data_offset(&facts);
    let note = layers::prepare_active(&home, disk.disk, layer, keep)?;
    let keeps_room = is_preallocated(&disk);
    let (disk, channel) = (disk.disk, channel_of(&file, &layers));
    Ok(Ready { note, new: NewLayers { disk, file, layers, offset, own, keeps_room, channel } })
}
