//! Copying what nobody writes of a mirrored disk: the files beside it, memory and core dumps, which the agent seals anew; the room of its
//! copy, where zeroes are written for it; its image, and its layers but the active one, each by a filter that serves nobody, beside the
//! guest's.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::internal;
use super::merging::with_filter;
use super::report::{Progress, Report};
use crate::storage::builder::DiskBuilder;
use crate::storage::gate::{asked, stopped};
use crate::storage::mirror::tree::{self, FileBeside, Part, ToNote};

/// A disk whose layers are to be copied.
pub struct TreeCopying {
    pub spec: VmSpec,
    pub disk: DiskSpec,
    pub facts: DiskFacts,
    pub kek: Option<SecretBytes>,
    /// With the pace of its job.
    pub builder: DiskBuilder,
}

impl TreeCopying {
    /// Copies what is not copied yet, after a pause.
    ///
    /// # Errors
    /// The problem of the files or the filter; what was copied is kept.
    pub async fn run(
        self,
        pause: Duration,
        show: Progress,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<(), Problem> {
        let (this, show) = (Arc::new(self), Arc::new(show));
        let mut asked = pin!(asked(cancelled));
        let beside = async {
            sleep(pause).await;
            this.copy_beside(&show).await?;
            this.take_room(&show).await
        };
        let copied = this.builder.gate.close_when(asked.as_mut(), beside).await;
        copied.unwrap_or_else(|| Err(stopped()))?;
        let copied = tokio::select! {
            copied = this.copy_layers(&show) => copied,
            () = &mut asked => Err(stopped()),
        };
        let directory = &this.builder.directory;
        if copied.is_err()
            && let Err(error) = directory.sweep().await
        {
            tracing::warn!(directory = directory.name(), %error, "the filter of a copy is left");
        }
        copied
    }

    /// Copies each file that is beside the disk.
    async fn copy_beside(self: &Arc<Self>, show: &Arc<Progress>) -> Result<(), Problem> {
        loop {
            let of = Arc::clone(self);
            let next = move || tree::next_beside(&of.spec, &of.disk);
            let Some(file) = spawn_blocking(next).await.map_err(internal)?? else {
                return Ok(());
            };
            let (of, show) = (Arc::clone(self), Arc::clone(show));
            let copy = move || of.copy_file(&file, &show);
            spawn_blocking(copy).await.map_err(internal)??;
        }
    }

    /// Blocks.
    fn copy_file(&self, file: &FileBeside, show: &Progress) -> Result<(), Problem> {
        let progress = self.progress_at(file.place()?, show);
        file.copy((&self.spec, &self.disk), self.kek.as_ref(), &self.builder.gate, progress)
    }

    /// Shows how much is done of a file that has this place among all: bytes of it, and the total.
    fn progress_at(&self, place: (usize, usize), show: &Progress) -> impl Fn(u64, u64) {
        let size = self.disk.size;
        move |done, total| {
            let part = u128::from(size) * u128::from(done) / u128::from(total.max(1));
            show.progress(in_all(place, u64::try_from(part).unwrap_or(size), size));
        }
    }

    /// Takes the room of the copy where that is to be written.
    async fn take_room(self: &Arc<Self>, show: &Arc<Progress>) -> Result<(), Problem> {
        // A filter of an earlier attempt would write the image, too.
        self.builder.directory.sweep().await.map_err(internal)?;
        let of = Arc::clone(self);
        let next = move || tree::next_room(&of.spec, &of.disk);
        let Some(room) = spawn_blocking(next).await.map_err(internal)?? else { return Ok(()) };
        let progress = self.progress_at(room.place(), show);
        room.take(&self.builder.gate, progress).await
    }

    async fn copy_layers(self: &Arc<Self>, show: &Arc<Progress>) -> Result<(), Problem> {
        let Self { spec, disk, builder, .. } = &**self;
        loop {
            // No process is kept for a copy that does not go on.
            builder.gate.resumed().await;
            let of = Arc::clone(self);
            let open = move || {
                let part = tree::next(&of.spec, &of.disk, &of.facts, of.kek.as_ref())?;
                Ok(part.map(Part::split))
            };
            let progress = |to_note: &ToNote, done: u64, _: u64| {
                show.progress(in_all(to_note.place(), done, disk.size));
            };
            let copied = with_filter(spec.vm, builder, false, open, progress).await?;
            let Some(to_note) = copied else { return Ok(()) };
            spawn_blocking(move || to_note.note()).await.map_err(internal)??;
        }
    }
}

/// How far the copy is, in bytes of the disk, so that it is one figure for all files: so many before, in all, and this much of the
/// disk's size of the one that is being copied.
fn in_all((before, all): (usize, usize), done: u64, size: u64) -> Report {
    Report::Progress((before as u64 * size + done) / (all as u64).max(1), size)
}
