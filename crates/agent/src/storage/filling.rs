//! Filling a disk from an image, through a filter process.
//!
//! ```text
//!  filter: written ─► flushed ─► says durable = N        agent: notes N beside the half-made disk
//!     ▲                                                     │
//!     └──────── killed: a new one goes on from N ◄──────────┘ (or from N after a restart of the agent)
//! ```
//! The note never claims more than is flushed, and names the image: with another image, or a changed one, the
//! import starts over.

use std::fs::File;
use std::time::Duration;

use tokio::task::spawn_blocking;
use vmseal_api::filter::{DiskActivity, Holes};
use vmseal_api::host::DiskSpec;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use crate::filter::pace::Pace;
use crate::filter::{self, Control, FilterError};
use crate::process::Process;
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal, is_preallocated};
use crate::storage::gate::Told;
use crate::storage::home::{Home, Note};
use crate::storage::image::Image;

/// How often an import is asked for its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// How often a filter may die without progress: then the image or the machine is the cause.
const FAILURES_MAX: u32 = 3;

/// A disk to fill.
pub struct Filling<'a> {
    /// The VM.
    pub vm: VmId,
    /// Which of its disks.
    pub disk: &'a DiskSpec,
    /// Its home.
    pub home: &'a Home,
    /// Its image, locked.
    pub file: &'a File,
    /// Where the guest's first byte is in it, in bytes.
    pub offset: u64,
    /// The DEK; none for a plain disk.
    pub key: Option<&'a SecretBytes>,
    /// What it is filled from.
    pub image: &'a Image,
}

/// Why a filter process did not do its work on a disk.
pub enum Failure {
    /// It died; a new one may continue.
    Died(Problem),
    /// The work cannot be done.
    Final(Problem),
}

impl From<FilterError> for Failure {
    fn from(error: FilterError) -> Self {
        match &error {
            // A filter that is slow to answer is treated as one that died: a new one continues.
            FilterError::Ended { .. } | FilterError::Io(_) | FilterError::TimedOut => {
                Self::Died(internal(error))
            }
            _ => Self::Final(internal(error)),
        }
    }
}

impl Filling<'_> {
    /// Fills it from byte `from` on. `progress` receives the bytes done and the total.
    ///
    /// # Errors
    /// The problem of the image, the disk or the process.
    pub async fn run(
        &self,
        from: u64,
        builder: &DiskBuilder,
        slot: &Slot,
        progress: impl Fn(u64, u64) + Send,
    ) -> Result<(), Problem> {
        let (mut durable, mut failures) = (from, 0);
        loop {
            let begun = durable;
            let result = self.attempt(&mut durable, builder, slot, &progress).await;
            failures = if durable > begun { 0 } else { failures + 1 };
            match result {
                Ok(()) => return self.image.check_unchanged(),
                Err(Failure::Final(problem)) => return Err(problem),
                Err(Failure::Died(problem)) if failures >= FAILURES_MAX => return Err(problem),
                Err(Failure::Died(problem)) => {
                    tracing::warn!(
                        vm = %self.vm, disk = %self.disk.disk, %problem, durable,
                        "the filter that fills a disk has died; another one goes on"
                    );
                }
            }
        }
    }

    /// Runs one filter process from `durable` on, which grows with each note.
    async fn attempt(
        &self,
        durable: &mut u64,
        builder: &DiskBuilder,
        slot: &Slot,
        progress: &(impl Fn(u64, u64) + Send),
    ) -> Result<(), Failure> {
        let directory = &builder.directory;
        directory.renew().await.map_err(final_)?;
        let disk = self.disk(*durable).map_err(Failure::Final)?;
        let (process, keys) =
            filter::start(&builder.filter, self.vm, directory, vec![disk], slot.filter())
                .await
                .map_err(final_)?;
        let control = Control::of(directory);
        control.ready(&process, directory).await?;
        drop(keys);
        self.follow(&control, &process, builder, durable, progress).await?;
        end_idle(&control, self.disk.disk).await.map_err(Failure::Final)?;
        process.end_within(filter::SHUTDOWN_TIMEOUT).await;
        directory.sweep().await.map_err(final_)
    }

    fn disk(&self, from: u64) -> Result<filter::Disk, Problem> {
        let key = self.key.map(|dek| dek.to_memfd().map_err(internal)).transpose()?;
        Ok(filter::Disk {
            disk: self.disk.disk,
            size: self.disk.size,
            file: self.file.try_clone().map_err(internal)?,
            layers: Vec::new(),
            offset: self.offset,
            key: key.map(|dek| (dek, Holes::Zero)),
            shared: filter::Shared::default(),
            keeps_room: is_preallocated(self.disk),
            work: filter::Work::Import {
                source: self.image.file.try_clone().map_err(internal)?,
                format: self.image.format,
                from,
            },
            beside: None,
            // No map is believed before the disk is complete: its replica begins empty
            // (crate::storage::replica).
            replica: None,
            mirror: None,
        })
    }

    async fn follow(
        &self,
        control: &Control,
        process: &Process,
        builder: &DiskBuilder,
        durable: &mut u64,
        progress: &(impl Fn(u64, u64) + Send),
    ) -> Result<(), Failure> {
        let (pace, mut told) = (Pace::up_to(PROGRESS_INTERVAL), Told::nothing(&builder.gate));
        loop {
            told.tell(control, &[self.disk.disk]).await;
            let status = control.status_of(process, &builder.directory).await?;
            match status.disks.into_iter().next().map(|disk| disk.state) {
                Some(DiskActivity::Importing { done, total, durable: flushed }) => {
                    progress(done, total);
                    if flushed > *durable {
                        self.note(flushed).await?;
                        *durable = flushed;
                    }
                }
                Some(DiskActivity::Idle) => return Ok(()),
                Some(DiskActivity::Failed { message }) => return Err(final_(message)),
                other => {
                    return Err(final_(format!("the filter that fills a disk says {other:?}")));
                }
            }
            tokio::select! {
                () = pace.pause() => {}
                () = told.changed() => {}
            }
        }
    }

    async fn note(&self, durable: u64) -> Result<(), Failure> {
        let (home, disk) = (self.home.clone(), self.disk.disk);
        let note = Note::new(self.image.identity.clone(), durable);
        let noted = spawn_blocking(move || home.note(disk, &note)).await.map_err(final_)?;
        noted.map_err(Failure::Final)
    }
}

/// Ends a filter whose data is flushed; returns whether it has answered, which is when its files are closed. The caller kills
/// one that does not exit.
///
/// # Errors
/// It reports that its last flush failed.
pub(crate) async fn end_idle(control: &Control, disk: DiskId) -> Result<bool, Problem> {
    match control.shut_down().await {
        Ok(()) => Ok(true),
        Err(error @ FilterError::Refused { .. }) => Err(internal(error)),
        Err(error) => {
            tracing::warn!(%disk, %error, "a filter that has finished does not exit and is killed");
            Ok(false)
        }
    }
}

fn final_(error: impl std::fmt::Display) -> Failure {
    Failure::Final(Problem::new(ErrorCode::Internal, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_filter_is_replaced_and_does_not_end_the_import() {
        let is_final = |error: FilterError| matches!(Failure::from(error), Failure::Final(_));
        assert!(!is_final(FilterError::TimedOut));
        let (code, message) = (ErrorCode::Internal, "no".to_owned());
        assert!(is_final(FilterError::Refused { code, message }));
    }

    #[tokio::test]
    async fn a_flushed_import_is_complete_even_if_its_filter_no_longer_answers() {
        let directory = tempfile::tempdir().unwrap();
        let run =
            crate::process::run_dir::RunDir::open(directory.path()).unwrap().import(DiskId::new());
        // Its socket is gone.
        end_idle(&Control::of(&run), DiskId::new()).await.unwrap();
    }
}
