//! What the threads of a migration's streams need of the processor.

use std::time::{Duration, Instant};

use vmseal_api::host::SealingWork;

use crate::migration::transport::Handle;

/// How long is measured before there is another percentage: long against the time slices of the kernel.
const MEASURED_OVER: Duration = Duration::from_millis(500);

/// Measures the threads of a session.
pub struct SealingMeter {
    session: Handle,
    usage: Usage,
}

impl SealingMeter {
    /// Begins to measure.
    pub fn new(session: Handle) -> Self {
        let usage = Usage::begin(cpu_of(&session), Instant::now());
        Self { session, usage }
    }

    /// What they have needed up to now.
    pub fn read(&mut self) -> SealingWork {
        self.usage.measure(cpu_of(&self.session), Instant::now())
    }
}

/// The CPU time of all threads of a session.
fn cpu_of(session: &Handle) -> Duration {
    session.counters().iter().map(|it| it.sending_cpu + it.receiving_cpu).sum()
}

/// CPU time, and the part of a core that it is of late.
struct Usage {
    since: Instant,
    before: Duration,
    percent: u64,
}

impl Usage {
    fn begin(cpu: Duration, now: Instant) -> Self {
        Self { since: now, before: cpu, percent: 0 }
    }

    /// So much CPU time has been needed by now.
    fn measure(&mut self, cpu: Duration, now: Instant) -> SealingWork {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed >= MEASURED_OVER {
            let used = cpu.saturating_sub(self.before);
            self.percent = (used.as_secs_f64() / elapsed.as_secs_f64() * 100.0).round() as u64;
            (self.since, self.before) = (now, cpu);
        }
        let cpu_milliseconds = u64::try_from(cpu.as_millis()).unwrap_or(u64::MAX);
        SealingWork { cpu_milliseconds, cpu_percent: self.percent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentage_is_of_the_time_since_the_last_one() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let cpu = Duration::from_millis;
        let mut usage = Usage::begin(cpu(1000), begin);
        let read = |usage: &mut Usage, used, time| {
            let SealingWork { cpu_milliseconds, cpu_percent } = usage.measure(cpu(used), at(time));
            (cpu_milliseconds, cpu_percent)
        };
        assert_eq!(read(&mut usage, 1100, 100), (1100, 0), "it is too early to say");
        assert_eq!(read(&mut usage, 2000, 500), (2000, 200));
        assert_eq!(read(&mut usage, 2010, 510), (2010, 200), "the last one stands");
        assert_eq!(read(&mut usage, 2500, 1500), (2500, 50));
        assert_eq!(read(&mut usage, 2500, 2500), (2500, 0));
    }
}
