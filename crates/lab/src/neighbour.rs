//! CPU-bound neighbours: threads that do nothing but compute, on the core of the server that is measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::ClockId;
use nix::unistd::Pid;

/// Steps between two looks at whether to stop: well below a millisecond.
const STEPS: u64 = 10_000;

/// Neighbours that run until they are ended.
#[derive(Debug)]
pub struct Neighbours {
    threads: Vec<JoinHandle<Duration>>,
    done: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    begun: Instant,
}

/// What they did.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Steps in a second, of all together.
    pub rate: f64,
    /// The CPU time of their threads.
    pub cpu: Duration,
}

impl Neighbours {
    /// Starts `count` of them on `core`.
    ///
    /// # Errors
    /// A thread cannot be started or pinned.
    pub fn start(count: u32, core: Option<usize>) -> std::io::Result<Self> {
        let (done, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let mut this = Self { threads: Vec::new(), done, over, begun: Instant::now() };
        for _ in 0..count {
            let (done, over) = (Arc::clone(&this.done), Arc::clone(&this.over));
            let thread = std::thread::Builder::new().name("neighbour".to_owned());
            let (told, pinned) = std::sync::mpsc::channel();
            this.threads.push(thread.spawn(move || {
                let _ = told.send(pin(core));
                compute(&done, &over)
            })?);
            pinned.recv().map_err(std::io::Error::other)??;
        }
        this.begun = Instant::now();
        this.done.store(0, Ordering::Relaxed);
        Ok(this)
    }

    /// Ends them, and says what they did since they were started.
    #[must_use]
    pub fn end(mut self) -> Work {
        let (steps, seconds) = (self.done.load(Ordering::Relaxed), self.begun.elapsed());
        Work { rate: steps as f64 / seconds.as_secs_f64(), cpu: self.stop() }
    }

    fn stop(&mut self) -> Duration {
        self.over.store(true, Ordering::Relaxed);
        self.threads.drain(..).map(|thread| thread.join().unwrap_or_default()).sum()
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        self.stop();
    }
}

fn pin(core: Option<usize>) -> std::io::Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(core)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

fn compute(done: &AtomicU64, over: &AtomicBool) -> Duration {
    let mut random = fastrand::Rng::with_seed(1);
    while !over.load(Ordering::Relaxed) {
        for _ in 0..STEPS {
            std::hint::black_box(random.u64(..));
        }
        done.fetch_add(STEPS, Ordering::Relaxed);
    }
    ClockId::CLOCK_THREAD_CPUTIME_ID.now().map(Into::into).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_work_until_they_are_ended() {
        let neighbours = Neighbours::start(2, None).unwrap();
        let done = Arc::clone(&neighbours.done);
        while done.load(Ordering::Relaxed) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let work = neighbours.end();
        assert!(work.rate > 0.0 && work.cpu > Duration::ZERO, "{work:?}");
        let ended = done.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(done.load(Ordering::Relaxed), ended);
    }
}
