//! Copying what nobody writes of a mirrored disk: the memory that snapshots keep beside it, which the agent seals anew; its image,
//! and its layers but the active one, each by a filter that serves nobody, beside the guest's.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::internal;
use super::merging::with_filter;
use super::report::{Progress, Report};
use crate::storage::builder::DiskBuilder;
use crate::storage::mirror::tree::{self, KeptMemory, Part, ToNote};

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
        let asked = async {
            // A sender that is gone has asked for nothing.
            if cancelled.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::pin!(asked);
        let memories = async {
            sleep(pause).await;
            this.copy_memories(&show).await
        };
        tokio::pin!(memories);
        tokio::select! {
            copied = &mut memories => copied?,
            () = &mut asked => {
                // A thread writes, which notices that, and ends.
                this.builder.gate.close();
                let _ = memories.await;
                return Err(stopped());
            }
        }
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

    /// Copies the memory of each snapshot.
    async fn copy_memories(self: &Arc<Self>, show: &Arc<Progress>) -> Result<(), Problem> {
        loop {
            let of = Arc::clone(self);
            let next = move || tree::next_memory(&of.spec, &of.disk);
            let Some(memory) = spawn_blocking(next).await.map_err(internal)?? else {
                return Ok(());
            };
            let (of, show) = (Arc::clone(self), Arc::clone(show));
            let copy = move || of.copy_memory(&memory, &show);
            spawn_blocking(copy).await.map_err(internal)??;
        }
    }

    /// Blocks.
    fn copy_memory(&self, memory: &KeptMemory, show: &Progress) -> Result<(), Problem> {
        let (size, place) = (self.disk.size, memory.place()?);
        let progress = |done: u64, total: u64| {
            let part = u128::from(size) * u128::from(done) / u128::from(total.max(1));
            show.progress(in_all(place, u64::try_from(part).unwrap_or(size), size));
        };
        memory.copy((&self.spec, &self.disk), self.kek.as_ref(), &self.builder.gate, progress)
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

fn stopped() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the copy is stopped")
}
