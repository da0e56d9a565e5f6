//! Measuring CPU time and memory: of a server process, of this process, and of the whole machine.

use std::io;
use std::time::Duration;

use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;

/// The CPU time of another process, or of several together, in nanoseconds: all threads, including ended ones and the
/// kernel's io_uring workers for them.
#[derive(Clone, Debug)]
pub struct ProcessClock {
    processes: Vec<ClockId>,
    /// Of the storage below them, which is counted apart.
    storage: Vec<ClockId>,
}

impl ProcessClock {
    /// The clock of process `pid`.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::of_all([pid])
    }

    /// The clock of these processes together.
    ///
    /// # Errors
    /// One of them is not there.
    pub fn of_all(pids: impl IntoIterator<Item = u32>) -> io::Result<Self> {
        Ok(Self { processes: clocks(pids)?, storage: Vec::new() })
    }

    /// The same, with the processes of the storage below.
    ///
    /// # Errors
    /// One of them is not there.
    pub fn above(self, storage: impl IntoIterator<Item = u32>) -> io::Result<Self> {
        Ok(Self { storage: clocks(storage)?, ..self })
    }

    /// The CPU time since they started.
    ///
    /// # Errors
    /// A process has ended.
    pub fn read(&self) -> io::Result<Duration> {
        sum(&self.processes)
    }

    /// The CPU time of the storage below since its processes started; none where they are not known.
    ///
    /// # Errors
    /// A process has ended.
    pub fn read_storage(&self) -> io::Result<Duration> {
        sum(&self.storage)
    }
}

fn clocks(pids: impl IntoIterator<Item = u32>) -> io::Result<Vec<ClockId>> {
    let clock = |pid: u32| -> io::Result<ClockId> {
        let pid = i32::try_from(pid).map_err(io::Error::other)?;
        Ok(clock_getcpuclockid(Pid::from_raw(pid))?)
    };
    pids.into_iter().map(clock).collect()
}

fn sum(clocks: &[ClockId]) -> io::Result<Duration> {
    let read = |clock: &ClockId| -> io::Result<Duration> { Ok(clock.now()?.into()) };
    clocks.iter().map(read).sum()
}

/// The CPU time of this process since it started.
///
/// # Errors
/// Those of the kernel.
pub fn own() -> io::Result<Duration> {
    Ok(ClockId::CLOCK_PROCESS_CPUTIME_ID.now()?.into())
}

/// How often the current threads of a process gave up their CPU to wait for something (proc(5)).
///
/// # Errors
/// The process has ended.
pub fn waits(pid: u32) -> io::Result<u64> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends meanwhile is skipped: its file cannot be opened or read.
        let Ok(status) = std::fs::read_to_string(thread?.path().join("status")) else { continue };
        sum += status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok())
            .unwrap_or(0u64);
    }
    Ok(sum)
}

/// The private memory of a process (RssAnon of proc(5)), in bytes: without mapped files and shared memory.
///
/// # Errors
/// The process has ended.
pub fn own_memory(pid: u32) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes =
        line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kilobytes.map(|count| count * 1024).ok_or_else(|| io::Error::other("no RssAnon in its status"))
}

/// The busy time of all CPUs together since the machine started, including stolen time; in steps of the
/// kernel's ticks (10 ms).
///
/// # Errors
/// /proc/stat cannot be read.
pub fn machine() -> io::Result<Duration> {
    let text = std::fs::read_to_string("/proc/stat")?;
    busy_of(&text).ok_or_else(|| io::Error::other("/proc/stat has no line for all CPUs"))
}

/// From proc(5): `cpu user nice system idle iowait irq softirq steal …`, in 1/100 s (USER_HZ).
fn busy_of(stat: &str) -> Option<Duration> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let busy: u64 = [0, 1, 2, 5, 6, 7].iter().map(|i| ticks.get(*i).copied().unwrap_or(0)).sum();
    Some(Duration::from_millis(busy * 10))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use super::*;

    #[test]
    fn idle_time_is_not_busy_time() {
        let stat = "cpu  100 20 30 9999 777 4 5 6 0 0\ncpu0 1 1 1 1\n";
        assert_eq!(busy_of(stat), Some(Duration::from_millis(1650)));
        assert_eq!(busy_of("intr 1 2 3\n"), None);
    }

    #[test]
    fn memory_of_ones_own_is_seen_when_it_is_used() {
        let before = own_memory(std::process::id()).unwrap();
        let used = vec![1u8; 64 << 20];
        let after = own_memory(std::process::id()).unwrap();
        assert!(after > before + (32 << 20), "{before} {after} {}", used.len());
        assert!(own_memory(u32::MAX).is_err());
    }

    #[test]
    fn a_working_process_is_distinguished_from_a_sleeping_one() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        let mut worker = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let clocks =
            [ProcessClock::of(sleeper.id()).unwrap(), ProcessClock::of(worker.id()).unwrap()];
        let begin = Instant::now();
        while clocks[1].read().unwrap() < Duration::from_millis(50) {
            assert!(begin.elapsed() < Duration::from_secs(30), "the worker got no CPU");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(clocks[0].read().unwrap() < Duration::from_millis(50));
        let both = ProcessClock::of_all([sleeper.id(), worker.id()]).unwrap();
        assert!(both.read().unwrap() >= Duration::from_millis(50));
        let apart = clocks[0].clone().above([worker.id()]).unwrap();
        assert!(apart.read_storage().unwrap() >= Duration::from_millis(50));
        assert!(apart.read().unwrap() < Duration::from_millis(50), "they are not added");
        assert_eq!(both.read_storage().unwrap(), Duration::ZERO);
        for child in [&mut sleeper, &mut worker] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(clocks[1].read().is_err(), "the process has ended");
    }

    #[test]
    fn a_process_that_wakes_up_and_waits_is_distinguished_from_a_sleeping_one() {
        // They end by themselves if this test fails, and hold none of our files open.
        let start = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::null());
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        let mut sleeper = start("exec sleep 60");
        let mut waker = start("for i in $(seq 5000); do sleep 0.001; done");
        let begin = Instant::now();
        let (mut asleep, first) = (waits(sleeper.id()).unwrap(), waits(waker.id()).unwrap());
        while waits(waker.id()).unwrap() < first + 20 {
            assert!(begin.elapsed() < Duration::from_secs(30), "the waker did not wake up");
            // Once it is asleep: it may still be starting.
            asleep = asleep.max(waits(sleeper.id()).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended = waits(sleeper.id()).unwrap();
        assert!(ended <= asleep + 1, "{asleep} {ended}");
        for child in [&mut sleeper, &mut waker] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(waits(u32::MAX).is_err());
    }
}
