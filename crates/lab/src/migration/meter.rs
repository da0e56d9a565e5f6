//! What a migration needs of the processor and sends over the line, looked at from outside again and again while it goes on:
//! processes of both hosts begin and end in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::line;
use crate::clock::ProcessClock;

/// How often it looks: what a process does after the last look before its end is lost.
const EVERY: Duration = Duration::from_millis(10);

/// The part of all bytes that have gone over the line when its rate begins to count, and when it ends.
const MIDDLE: (f64, f64) = (0.1, 0.9);

/// What either end of a migration has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends<T> {
    /// The host from which the guest moves.
    pub source: T,
    /// The host to which it moves.
    pub destination: T,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Spent {
    /// The CPU time of all processes of each end but what their guests did.
    pub cpu: Ends<Duration>,
    /// When, in seconds, how many bytes had gone over the line.
    pub(super) line: Vec<(f64, f64)>,
}

impl Spent {
    /// The rate of the line in bytes a second while the middle eight tenths of all went over it: without the time in which
    /// hosts prepare and finish.
    pub fn rate(&self) -> f64 {
        let (Some((_, first)), Some((_, last))) = (self.line.first(), self.line.last()) else {
            return f64::NAN;
        };
        let all = last - first;
        let when = |part: f64| reached(&self.line, first + part * all);
        match (when(MIDDLE.0), when(MIDDLE.1)) {
            (Some(from), Some(to)) if to > from => all * (MIDDLE.1 - MIDDLE.0) / (to - from),
            _ => f64::NAN,
        }
    }
}

/// When so many bytes had gone over the line; between two looks it is as fast all the time.
fn reached(line: &[(f64, f64)], bytes: f64) -> Option<f64> {
    let pair = line.windows(2).find(|pair| pair[1].1 >= bytes)?;
    let [(from, before), (to, after)] = [pair[0], pair[1]];
    let part = if after > before { ((bytes - before) / (after - before)).max(0.0) } else { 0.0 };
    Some(from + part * (to - from))
}

/// Does something while it looks at the processes of both ends, which may change.
pub(super) fn watched<T>(
    processes: impl Fn() -> Ends<Vec<i32>> + Sync,
    work: impl FnOnce() -> T,
) -> (T, Spent) {
    let ended = AtomicBool::new(false);
    let mut meter = Meter::default();
    // Those that are there have done something before.
    meter.look(&processes());
    meter.begin();
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(EVERY);
                meter.look(&processes());
            }
            meter.spent()
        });
        let done = work();
        ended.store(true, Ordering::Relaxed);
        (done, watching.join().expect("looking does not panic"))
    })
}

#[derive(Default)]
struct Meter {
    processes: Ends<BTreeMap<i32, Process>>,
    line: Vec<(f64, f64)>,
    begun: Option<Instant>,
}

impl Meter {
    fn look(&mut self, processes: &Ends<Vec<i32>>) {
        look_at(&mut self.processes.source, &processes.source);
        look_at(&mut self.processes.destination, &processes.destination);
        if let Some(sent) = line::sent() {
            let begun = *self.begun.get_or_insert_with(Instant::now);
            self.line.push((begun.elapsed().as_secs_f64(), sent as f64));
        }
    }

    /// What was done so far does not count.
    fn begin(&mut self) {
        let Ends { source, destination } = &mut self.processes;
        for process in source.values_mut().chain(destination.values_mut()) {
            process.before = process.now;
        }
    }

    fn spent(self) -> Spent {
        let Ends { source, destination } = &self.processes;
        let cpu = Ends { source: time_of_all(source), destination: time_of_all(destination) };
        Spent { cpu, line: self.line }
    }
}

fn time_of_all(processes: &BTreeMap<i32, Process>) -> Duration {
    processes.values().map(|process| process.now.saturating_sub(process.before)).sum()
}

/// Looks at the processes of one end, of which some may be new.
fn look_at(known: &mut BTreeMap<i32, Process>, there: &[i32]) {
    for &pid in there {
        known.entry(pid).or_insert_with(|| Process::new(pid)).look();
    }
}

/// A process: one that came later has done nothing before.
struct Process {
    pid: i32,
    clock: Option<ProcessClock>,
    /// The files with the times of threads that are guests' processors.
    guests: Vec<PathBuf>,
    before: Duration,
    now: Duration,
}

impl Process {
    fn new(pid: i32) -> Self {
        let clock = u32::try_from(pid).ok().and_then(|pid| ProcessClock::of(pid).ok());
        Self { pid, clock, guests: Vec::new(), before: Duration::ZERO, now: Duration::ZERO }
    }

    fn look(&mut self) {
        if self.guests.is_empty() {
            self.guests = guests(self.pid);
        }
        // One that has ended stays at what it had.
        let Some(all) = self.clock.as_ref().and_then(|clock| clock.read().ok()) else { return };
        let times: Option<Duration> = self.guests.iter().map(time_of_thread).sum();
        if let Some(guests) = times {
            // A guest's processor may have gone on between the two.
            self.now = self.now.max(all.saturating_sub(guests));
        }
    }
}

/// QEMU names such a thread `CPU 0/TCG`, or `CPU 0/KVM`.
fn guests(pid: i32) -> Vec<PathBuf> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let is_guest = |path: &PathBuf| {
        fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("CPU "))
    };
    threads.map(|it| it.path()).filter(is_guest).map(|path| path.join("schedstat")).collect()
}

/// By proc(5): the time that a thread was on a processor, in nanoseconds, comes first.
fn time_of_thread(path: &PathBuf) -> Option<Duration> {
    let text = fs::read_to_string(path).ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_rate_is_that_of_the_middle() {
        // A second of nothing, 100 bytes a second for ten seconds, a second of nothing.
        let mut line = vec![(0.0, 50.0), (1.0, 50.0)];
        line.extend(
            (1..=10).map(|second| (1.0 + f64::from(second), 50.0 + 100.0 * f64::from(second))),
        );
        line.push((12.0, 1050.0));
        let rate = Spent { line, ..Spent::default() }.rate();
        assert!((rate - 100.0).abs() < 1e-6, "{rate}");
        assert!(Spent::default().rate().is_nan());
        let nothing = vec![(0.0, 5.0), (1.0, 5.0)];
        assert!(Spent { line: nothing, ..Spent::default() }.rate().is_nan());
    }

    #[test]
    fn processes_that_begin_and_end_meanwhile_count_and_what_was_before_does_not() {
        let busy = |milliseconds: u64| {
            let begun = crate::clock::own().unwrap();
            while crate::clock::own().unwrap() - begun < Duration::from_millis(milliseconds) {}
        };
        busy(200);
        let child = std::sync::Mutex::new(None);
        let own = std::process::id().cast_signed();
        let processes = || Ends {
            source: child.lock().unwrap().iter().copied().collect(),
            destination: Vec::new(),
        };
        let ((), spent) = watched(processes, || {
            let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
            let mut shell = Command::new("sh").args(["-c", script]).spawn().unwrap();
            *child.lock().unwrap() = Some(shell.id().cast_signed());
            shell.wait().unwrap();
        });
        let milliseconds = spent.cpu.source.as_millis();
        assert!((20..20_000).contains(&milliseconds), "{milliseconds}");
        assert_eq!(spent.cpu.destination, Duration::ZERO, "the shell is of the source");
        let own_alone = || Ends { source: Vec::new(), destination: vec![own] };
        let spent = watched(own_alone, || ()).1.cpu;
        let before = spent.destination.as_millis();
        assert!(before < 200, "{before}: what was before counts");
        assert_eq!(spent.source, Duration::ZERO, "this process is of the destination");
    }
}
