//! How far a migration is, and how it went, for people.

use vmseal_api::host::{MigrationProgress, SealingWork};
use vmseal_api::migration::{Migration, MigrationPhase};
use vmseal_api::model::Task;
use vmseal_api::size::Measured;

/// On one line.
pub fn line(migration: &Migration) -> String {
    let phase = migration.phase.name();
    match (migration.phase, &migration.progress) {
        (MigrationPhase::Disks, Some(progress)) => disks(phase, progress),
        (MigrationPhase::Memory, Some(progress)) => memory(progress),
        (MigrationPhase::SwitchOver, Some(progress)) => {
            let MigrationProgress { sent, passes, .. } = progress;
            format!("{phase}, {} sent, pass {passes}{}", Measured(*sent), beside(progress))
        }
        _ => phase.to_owned(),
    }
}

/// Agents of earlier versions do not say how fast disks are sent, and do not count what is sent of them.
fn disks(phase: &str, progress: &MigrationProgress) -> String {
    let MigrationProgress { sent, remaining, rate, dirty_rate, .. } = progress;
    let mut line = format!("{phase}, {} copied, {} left", Measured(*sent), Measured(*remaining));
    if progress.disks.is_some() {
        let (rate, dirty_rate) = (Measured(*rate), Measured(*dirty_rate));
        line += &format!(", sent at {rate}/s, the guest writes {dirty_rate}/s");
    }
    if let Some(sealing) = &progress.sealing {
        line += &format!(", sealing {}", cores(sealing));
    }
    line
}

/// What was sent of disks beside the memory; nothing where there were none.
fn beside(progress: &MigrationProgress) -> String {
    progress.disks.map_or_else(String::new, |disks| {
        format!(", {} of disks", Measured(disks.bytes.saturating_add(disks.later_bytes)))
    })
}

fn memory(progress: &MigrationProgress) -> String {
    let MigrationProgress { passes, sent, rate, remaining, dirty_rate, .. } = progress;
    let mut line = format!(
        "pass {passes}, {} sent at {}/s, {} left, the guest changes {}/s, switch-over {} ms",
        Measured(*sent),
        Measured(*rate),
        Measured(*remaining),
        Measured(*dirty_rate),
        progress.downtime_milliseconds
    );
    if progress.throttle > 0 {
        line += &format!(", slowed down by {} %", progress.throttle);
    }
    if let Some(sealing) = &progress.sealing {
        line += &format!(", sealing {}", cores(sealing));
    }
    line + &beside(progress)
}

fn cores(sealing: &SealingWork) -> String {
    format!("{}.{:02} cores", sealing.cpu_percent / 100, sealing.cpu_percent % 100)
}

/// What `task show` adds to a task's columns.
pub fn details(task: &Task) -> Vec<(&'static str, String)> {
    let mut details = Vec::new();
    let of_migrated = task.migrated.as_ref().and_then(|migrated| migrated.encrypted);
    let encrypted = task.migration.as_ref().and_then(|it| it.encrypted).or(of_migrated);
    let word = |is| if is { "yes" } else { "no" }.to_owned();
    details.extend(encrypted.map(|is| ("ENCRYPTED", word(is))));
    if let Some(migration) = &task.migration {
        details.push(("PHASE", migration.phase.name().to_owned()));
        details.extend(migration.progress.iter().flat_map(measured));
    }
    if let Some(migrated) = &task.migrated {
        details.push(("MIGRATED", migrated.to_string()));
        let cpu = |cpu| ("SEALING", format!("{} ms of CPU time", cpu));
        details.extend(migrated.sealing_milliseconds.map(cpu));
        let placed = |bytes| ("PLACED", format!("{} by the destination's agent", Measured(bytes)));
        details.extend(migrated.placed.map(placed));
    }
    details
}

fn measured(progress: &MigrationProgress) -> Vec<(&'static str, String)> {
    let rate = |bytes| format!("{}/s", Measured(bytes));
    let mut measured = vec![
        ("PASSES", progress.passes.to_string()),
        ("SENT", Measured(progress.sent).to_string()),
        ("REMAINING", Measured(progress.remaining).to_string()),
        ("SENT AT", rate(progress.rate)),
        ("CHANGED AT", rate(progress.dirty_rate)),
        ("SWITCH-OVER", format!("{} ms", progress.downtime_milliseconds)),
        ("SLOWED DOWN BY", format!("{} %", progress.throttle)),
    ];
    measured.extend(progress.sealing.iter().map(|sealing| ("SEALING", cores(sealing))));
    measured.extend(progress.disks.iter().map(|disks| ("DISKS", disks.to_string())));
    measured
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::DisksSent;

    use super::*;

    #[test]
    fn a_migration_is_told_on_one_line() {
        let progress = MigrationProgress {
            passes: 2,
            remaining: 96 << 20,
            sent: 1 << 30,
            dirty_rate: 8 << 20,
            rate: 300 << 20,
            downtime_milliseconds: 310,
            ..MigrationProgress::default()
        };
        let told = |phase, progress| line(&Migration { phase, progress, encrypted: None });
        assert_eq!(told(MigrationPhase::Connecting, None), "connecting");
        let usual = "pass 2, 1.0 GiB sent at 300.0 MiB/s, 96.0 MiB left, the guest changes 8.0 MiB/s, switch-over 310 ms";
        let disks = told(MigrationPhase::Disks, Some(progress));
        assert!(disks.starts_with("disks, ") && disks.ends_with(" left"), "{disks}");
        assert_eq!(told(MigrationPhase::Memory, Some(progress)), usual);
        let sealing = Some(SealingWork { cpu_milliseconds: 900, cpu_percent: 107 });
        let slowed = MigrationProgress { throttle: 20, sealing, ..progress };
        let all = format!("{usual}, slowed down by 20 %, sealing 1.07 cores");
        assert_eq!(told(MigrationPhase::Memory, Some(slowed)), all);
        let still = told(MigrationPhase::SwitchOver, Some(progress));
        assert_eq!(still, "switch-over, 1.0 GiB sent, pass 2");
        assert_eq!(told(MigrationPhase::Finishing, Some(progress)), "finishing");
    }

    #[test]
    fn what_is_sent_of_disks_is_told_apart() {
        let disks = DisksSent { bytes: 3 << 30, milliseconds: 12_000, later_bytes: 1 << 30 };
        let progress = MigrationProgress {
            remaining: 96 << 20,
            sent: 1 << 30,
            dirty_rate: 8 << 20,
            rate: 300 << 20,
            sealing: Some(SealingWork { cpu_milliseconds: 900, cpu_percent: 67 }),
            disks: Some(disks),
            ..MigrationProgress::default()
        };
        let told = |phase| line(&Migration { phase, progress: Some(progress), encrypted: None });
        let expected = "disks, 1.0 GiB copied, 96.0 MiB left, sent at 300.0 MiB/s, the guest writes 8.0 MiB/s, sealing 0.67 cores";
        assert_eq!(told(MigrationPhase::Disks), expected);
        let memory = told(MigrationPhase::Memory);
        assert!(memory.ends_with(", sealing 0.67 cores, 4.0 GiB of disks"), "{memory}");
        let still = told(MigrationPhase::SwitchOver);
        assert_eq!(still, "switch-over, 1.0 GiB sent, pass 0, 4.0 GiB of disks");
        let shown = measured(&progress);
        let row = shown.iter().find(|(name, _)| *name == "DISKS").map(|(_, row)| row.as_str());
        assert_eq!(row, Some("3.0 GiB in 12.0 s (256.0 MiB/s), and 1.0 GiB after that"));
    }
}
