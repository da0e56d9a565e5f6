//! How far a migration is, as its task shows it, and how it went. The first is in memory alone; of the second the task keeps what
//! was measured when all was sent, and what follows from it.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use vmseal_api::host::{HostState, MigrationProgress};
use vmseal_api::migration::{Migrated, Migration, MigrationPhase};
use vmseal_api::transfer::Progress;

use super::{MigrateVmStep, is_handed_over};
use crate::store::tasks::Task;
use crate::tasks::run::Run;
use crate::tasks::step::Step;

/// What was seen of a guest while it was sent: the output of the transfer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Watched {
    /// What its source measured last; none where its agent has restarted since.
    progress: Option<MigrationProgress>,
    /// When this server had heard that all of the memory is sent: the guest stands still for longer. None where it has not seen it begin.
    all_sent: Option<Timestamp>,
    /// What the destination has placed of the memory; none where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    placed: Option<u64>,
}

impl Watched {
    /// What is known of a guest that was sent before.
    pub(super) fn late(run: &Run<'_>, source: &HostState) -> Self {
        let progress = run.job_in(source).and_then(|job| job.migration);
        Self { progress, ..Self::default() }
    }

    /// Notes how the destination has loaded the memory.
    pub(super) fn loaded(self, run: &Run<'_>, destination: &HostState) -> Self {
        let received = run.job_in(destination).and_then(|job| job.migration);
        Self { placed: received.and_then(|received| received.placed), ..self }
    }

    /// Notes what another control plane says of how its host has loaded the memory.
    pub(super) fn with_placed(self, placed: Option<u64>) -> Self {
        Self { placed, ..self }
    }

    /// Notes how far the source is, and publishes it.
    pub(super) fn note(&mut self, run: &Run<'_>, source: &HostState) {
        let measured = run.job_in(source).and_then(|job| job.migration);
        self.progress = measured.or(self.progress);
        let stands = self.progress.is_some_and(|it| it.all_sent) || is_handed_over(run, source);
        if stands {
            self.all_sent.get_or_insert_with(Timestamp::now);
        }
        self.show(run, phase(self.progress, stands));
    }

    /// Publishes a phase.
    pub(super) fn show(&self, run: &Run<'_>, phase: MigrationPhase) {
        let bytes = match (phase, self.progress) {
            (
                MigrationPhase::Disks | MigrationPhase::Memory,
                Some(MigrationProgress { sent: done, remaining, .. }),
            ) => Progress { done, total: done.saturating_add(remaining) },
            _ => Progress::default(),
        };
        run.show_migration(bytes, Migration { phase, progress: self.progress, encrypted: None });
    }

    /// How the migration went that began then, and whose guest has been heard to run at the destination now, where that was
    /// heard at once. The hosts have `said` how long the guest stood still when all was sent, if they do.
    pub(super) fn ended(
        &self,
        began: Timestamp,
        now: Timestamp,
        at_once: bool,
        said: Option<Duration>,
    ) -> Option<Migrated> {
        let progress = self.progress?;
        let said = said.map(|said| u64::try_from(said.as_millis()).unwrap_or(u64::MAX));
        // Without the time until this server had heard that all was sent.
        let heard = self.all_sent.map(|since| milliseconds(since, now));
        Some(Migrated {
            milliseconds: milliseconds(began, now),
            sent: progress.sent,
            memory_milliseconds: progress.memory_milliseconds,
            disks: progress.disks,
            passes: progress.passes,
            downtime_milliseconds: progress.downtime_milliseconds,
            switch_milliseconds: said.or(heard).filter(|_| at_once),
            sealing_milliseconds: progress.sealing.map(|sealing| sealing.cpu_milliseconds),
            placed: self.placed,
            encrypted: None,
        })
    }
}

/// What is under way, as the source's progress has it.
fn phase(progress: Option<MigrationProgress>, stands: bool) -> MigrationPhase {
    match progress {
        _ if stands => MigrationPhase::SwitchOver,
        // QEMU goes through all of the memory once before it sends any.
        Some(progress) if progress.passes > 0 => MigrationPhase::Memory,
        Some(progress) if progress.sent > 0 || progress.remaining > 0 => MigrationPhase::Disks,
        _ => MigrationPhase::Connecting,
    }
}

/// From one time to a later one.
fn milliseconds(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.duration_since(from).as_millis()).unwrap_or(0)
}

/// What was seen in the task's transfer.
pub(super) fn of(run: &Run<'_>) -> Watched {
    run.output(MigrateVmStep::Transfer.name()).unwrap_or_default()
}

/// How a task's migration went, once its guest runs at the destination.
pub(in crate::tasks) fn migrated(task: &Task) -> Option<Migrated> {
    if !task.operation.is_migration() {
        return None;
    }
    let found = serde_json::from_value(task.outputs.get(MigrateVmStep::Switch.name())?.clone());
    let migrated: Migrated = found.ok()?;
    Some(Migrated { encrypted: task.operation.is_sent_encrypted(), ..migrated })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(milliseconds).unwrap()
    }

    #[test]
    fn the_phase_follows_from_what_the_source_says() {
        let passes = |passes| Some(MigrationProgress { passes, ..MigrationProgress::default() });
        assert_eq!(phase(None, false), MigrationPhase::Connecting);
        assert_eq!(phase(passes(0), false), MigrationPhase::Connecting);
        let copied = MigrationProgress { remaining: 1, ..MigrationProgress::default() };
        assert_eq!(phase(Some(copied), false), MigrationPhase::Disks);
        assert_eq!(phase(passes(1), false), MigrationPhase::Memory);
        assert_eq!(phase(passes(1), true), MigrationPhase::SwitchOver);
        assert_eq!(phase(None, true), MigrationPhase::SwitchOver);
    }

    #[test]
    fn what_is_not_known_of_the_end_is_not_told() {
        let progress = MigrationProgress { sent: 7, passes: 2, ..MigrationProgress::default() };
        let all_sent = Some(at(3000));
        let seen = Watched { progress: Some(progress), all_sent, placed: None };
        let ended = seen.ended(at(1000), at(3050), true, None).unwrap();
        assert_eq!((ended.milliseconds, ended.sent, ended.passes), (2050, 7, 2));
        assert_eq!(ended.switch_milliseconds, Some(50));
        assert_eq!(ended.sealing_milliseconds, None);
        // The clock was set back.
        assert_eq!(seen.ended(at(1000), at(10), true, None).unwrap().milliseconds, 0);
        assert_eq!(seen.ended(at(1000), at(9000), false, None).unwrap().switch_milliseconds, None);
        assert!(Watched::default().ended(at(1000), at(9000), true, None).is_none());
    }

    #[test]
    fn what_the_hosts_say_of_the_standstill_counts_and_not_what_the_server_has_heard() {
        let progress = Some(MigrationProgress::default());
        let said = Some(Duration::from_millis(63));
        for all_sent in [Some(at(3000)), None] {
            let seen = Watched { progress, all_sent, placed: None };
            let ended = seen.ended(at(1000), at(3050), true, said).unwrap();
            assert_eq!(ended.switch_milliseconds, Some(63), "{all_sent:?}");
        }
    }
}
