//! Copying what nobody writes of a mirrored disk with layers: its image, and its layers but the active one, each by a filter that
//! serves nobody, beside the guest's.

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
use crate::storage::mirror::tree::{self, Part, ToNote};

/// A disk whose layers are to be copied.
pub struct TreeCopying {
    pub spec: VmSpec,
    pub disk: DiskSpec,
    pub facts: DiskFacts,
    pub kek: Option<SecretBytes>,
    pub builder: DiskBuilder,
    /// Whether a guest waits for it.
    pub guest_waits: bool,
}

impl TreeCopying {
    /// Copies what is not copied yet, after a pause.
    ///
    /// # Errors
    /// The problem of the files or the filter; what was copied is kept.
    pub async fn run(
        self,
        pause: Duration,
        show: &Progress,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<(), Problem> {
        let directory = self.builder.directory.clone();
        let copied = tokio::select! {
            copied = async { sleep(pause).await; self.copy_all(Some(show)).await } => copied,
            Ok(()) = cancelled => Err(Problem::new(ErrorCode::Cancelled, "the copy is stopped")),
        };
        if copied.is_err()
            && let Err(error) = directory.sweep().await
        {
            tracing::warn!(directory = directory.name(), %error, "the filter of a copy is left");
        }
        copied
    }

    /// The same at once.
    ///
    /// # Errors
    /// As [`TreeCopying::run`].
    pub async fn copy_all(self, show: Option<&Progress>) -> Result<(), Problem> {
        let this = Arc::new(self);
        let Self { spec, disk, builder, guest_waits, .. } = &*this;
        loop {
            let of = Arc::clone(&this);
            let open = move || {
                let part = tree::next(&of.spec, &of.disk, &of.facts, of.kek.as_ref())?;
                Ok(part.map(Part::split))
            };
            let progress = |to_note: &ToNote, done: u64, _: u64| {
                if let Some(show) = show {
                    // In bytes of the disk, so that it is one figure for all files.
                    let (before, all) = to_note.place();
                    let done = (before as u64 * disk.size + done) / (all as u64).max(1);
                    show.progress(Report::Progress(done, disk.size));
                }
            };
            let copied = with_filter(spec.vm, builder, *guest_waits, open, progress).await?;
            let Some(to_note) = copied else { return Ok(()) };
            spawn_blocking(move || to_note.note()).await.map_err(internal)??;
        }
    }
}
