//! The cost of a disk that is connected and has nothing to do.

use std::io;
use std::time::{Duration, Instant};

use serde::Serialize;
use vmseal_initiator::{Operation, Wait};

use crate::clock::{self, ProcessClock};
use crate::load::{self, Extent, LoadError, Workload};
use crate::stop;
use crate::systems::Server;

/// The name of that measurement, used like the name of a load.
pub const IDLE: &str = "idle";

/// How long a server may take to become idle: one that polls looks again for a while.
const SETTLING: Duration = Duration::from_millis(200);
/// The number of requests before that, so that the disk has done some work.
const WAKING: u64 = 10_000;

/// One system without work in one round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Idle {
    /// The round, from 0.
    pub round: u32,
    /// [`crate::systems::System::id`].
    pub system: String,
    /// The measured time, in seconds.
    pub seconds: f64,
    /// The server's CPU time within it, in nanoseconds: the run time of its threads according to the
    /// scheduler (sum_exec_runtime), not sampled by ticks.
    pub cpu: f64,
    /// How often its threads woke up and waited again within it.
    pub waits: f64,
}

/// Gives a disk some work, lets it settle, and then leaves it idle with the client connected.
///
/// # Errors
/// [`LoadError`].
pub fn measure(
    server: &Server,
    workload: &Workload,
    time: Duration,
    round: u32,
    system: &str,
) -> Result<Idle, LoadError> {
    let clock = ProcessClock::of(server.pid()).map_err(LoadError::Clock)?;
    let mut initiator = server.connect(0, workload.depth, workload.block, Wait::Sleep)?;
    let extent = Extent::Requests(WAKING);
    load::run(initiator.as_mut(), workload, extent, None, &clock, 0)?;
    stop::sleep(SETTLING);
    let begin = Instant::now();
    let read = || -> io::Result<_> { Ok((clock.read()?, clock::waits(server.pid())?)) };
    let before = read().map_err(LoadError::Clock)?;
    stop::sleep(time);
    stop::check()?;
    let after = read().map_err(LoadError::Clock)?;
    let seconds = begin.elapsed().as_secs_f64();
    // Checks that it was idle, not gone.
    let status = initiator.run_one(Operation::Read, 0, workload.block)?;
    if status != 0 {
        return Err(LoadError::Request { operation: Operation::Read, offset: 0, status });
    }
    Ok(Idle {
        round,
        system: system.to_owned(),
        seconds,
        cpu: after.0.saturating_sub(before.0).as_nanos() as f64,
        waits: after.1.saturating_sub(before.1) as f64,
    })
}
