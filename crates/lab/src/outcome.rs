//! What measuring gives: values, progress, and why it ended early.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::ceph::{self, CephError};
use crate::computed_limit::ComputedLimitError;
use crate::idle::Idle;
use crate::load::{Latencies, LoadError, Workload};
use crate::stop::Stopped;
use crate::system_error::SystemError;

/// What was measured at one point.
#[derive(Debug)]
pub enum Sample {
    /// Work, with its latencies where there are many requests.
    Cell(Box<Cell>, Option<Histogram<u64>>),
    /// No work.
    Idle(Idle),
}

/// One system under one load in one round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The round, from 0.
    pub round: u32,
    /// [`System::id`].
    pub system: String,
    /// [`Workload::id`].
    pub workload: String,
    /// Completed requests.
    pub requests: u64,
    /// The measured time, in seconds.
    pub seconds: f64,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub throughput: f64,
    /// How much an operation has read of the disks, in bytes.
    pub read_bytes: f64,
    /// The server's CPU time per request, in nanoseconds.
    pub cpu_per_io: f64,
    /// The median latency, in nanoseconds.
    pub p50: f64,
    /// The 99th percentile of the latency, in nanoseconds.
    pub p99: f64,
    /// The longest time in which no request ended, in nanoseconds; of a system with which something is done, only then; of
    /// a migration, the time in which the guest stood still, or the longest that a client waited for its answer.
    pub gap: f64,
    /// The private memory (RssAnon) of the server afterwards, or of those of all clients together, in bytes.
    pub memory: f64,
    /// The share of the time that the server was on a CPU; above 1 with several threads.
    pub server_busy: f64,
    /// The share of the time that the client was on its CPU.
    pub client_busy: f64,
    /// The CPU time of everything else, as a share of one CPU.
    pub others_busy: f64,
    /// The CPU time of all processes of a migration for a GiB of memory, in nanoseconds; none of what sends none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_per_gib: Option<f64>,
    /// The part of it at the host from which the guest moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_cpu_per_gib: Option<f64>,
    /// The part of it at the host to which it moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_cpu_per_gib: Option<f64>,
    /// The CPU time of the storage below the server, as of Ceph's OSDs, for a request, in nanoseconds; none where its
    /// processes are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_cpu_per_io: Option<f64>,
    /// How long requests took; none of what is no load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<Times>,
    /// The work in a second of CPU-bound neighbours, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<f64>,
    /// What a guest answered that moved, where a client asked it something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served: Option<Served>,
}

impl Cell {
    /// A cell of which nothing is measured yet. What stays so is not a number, so that no goal can be met by it.
    #[must_use]
    pub fn unmeasured(round: u32, system: &str, workload: &str) -> Self {
        Self {
            round,
            system: system.to_owned(),
            workload: workload.to_owned(),
            requests: 0,
            seconds: f64::NAN,
            iops: f64::NAN,
            throughput: f64::NAN,
            read_bytes: f64::NAN,
            cpu_per_io: f64::NAN,
            p50: f64::NAN,
            p99: f64::NAN,
            gap: f64::NAN,
            memory: f64::NAN,
            server_busy: f64::NAN,
            client_busy: f64::NAN,
            others_busy: f64::NAN,
            cpu_per_gib: None,
            source_cpu_per_gib: None,
            destination_cpu_per_gib: None,
            storage_cpu_per_io: None,
            times: None,
            neighbour: None,
            served: None,
        }
    }

    /// The requests of a load in a time, the server's CPU time meanwhile, and how long they took, in nanoseconds.
    pub(crate) fn with_requests(
        self,
        block: u32,
        requests: u64,
        (elapsed, cpu): (Duration, Duration),
        latency: &Histogram<u64>,
    ) -> Self {
        let (seconds, count) = (elapsed.as_secs_f64(), requests as f64);
        Self {
            requests,
            seconds,
            iops: count / seconds,
            throughput: count * f64::from(block) / seconds,
            cpu_per_io: cpu.as_nanos() as f64 / count,
            p50: latency.value_at_quantile(0.5) as f64,
            p99: latency.value_at_quantile(0.99) as f64,
            server_busy: cpu.as_secs_f64() / seconds,
            ..self
        }
    }
}

/// How long the requests of a load took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    /// All of them.
    pub all: RequestTimes,
    /// The reads, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<RequestTimes>,
    /// The writes, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<RequestTimes>,
}

/// How long requests took, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RequestTimes {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
}

impl Times {
    /// None if there was no request.
    #[must_use]
    pub fn of(latencies: &Latencies) -> Option<Self> {
        Some(Self {
            all: RequestTimes::of(&latencies.all())?,
            reads: RequestTimes::of(&latencies.reads),
            writes: RequestTimes::of(&latencies.writes),
        })
    }
}

impl RequestTimes {
    fn of(latencies: &Histogram<u64>) -> Option<Self> {
        (!latencies.is_empty()).then(|| Self {
            mean: latencies.mean(),
            p50: latencies.value_at_quantile(0.5) as f64,
            p95: latencies.value_at_quantile(0.95) as f64,
        })
    }
}

/// What a guest answered while it moved from one host to another: requests per second, and how long they took.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Served {
    /// Before.
    pub before: f64,
    /// Meanwhile.
    pub during: f64,
    /// Afterwards.
    pub after: f64,
    /// When it began and ended, in seconds after the client began.
    pub moved: (f64, f64),
    /// The longest time without any answer that ended after the move had begun, in seconds.
    pub silence: f64,
    /// From its beginning until as much was answered as before, in seconds.
    pub recovery: f64,
    /// How long the guest stood still by what the task says of the move, in seconds.
    pub stood_still: f64,
    /// The median time of the requests that were answered before, in nanoseconds.
    pub latency_before: f64,
    /// Meanwhile.
    pub latency_during: f64,
    /// Afterwards.
    pub latency_after: f64,
    /// The answers in each tenth of a second after the client began.
    pub by_tenth: Vec<u64>,
}

/// The results.
#[derive(Debug, Default)]
pub struct Outcome {
    /// In the order in which they were measured.
    pub cells: Vec<Cell>,
    /// The results without work.
    pub idle: Vec<Idle>,
    /// The latencies of all rounds together, by system and workload, in nanoseconds.
    pub latencies: BTreeMap<(String, String), Histogram<u64>>,
}

impl Outcome {
    /// Adds what was measured.
    pub(crate) fn extend(&mut self, sample: Option<Sample>) {
        match sample {
            Some(Sample::Cell(cell, Some(latency))) => self.add(*cell, latency),
            Some(Sample::Cell(cell, None)) => self.cells.push(*cell),
            Some(Sample::Idle(idle)) => self.idle.push(idle),
            None => {}
        }
    }

    /// What of it was measured under some of the loads, and without any.
    pub(crate) fn under(&self, workloads: &[Workload]) -> Self {
        let is_one = |id: &str| workloads.iter().any(|workload| workload.id == id);
        let latencies = self.latencies.iter().filter(|((_, workload), _)| is_one(workload));
        Self {
            cells: self.cells.iter().filter(|cell| is_one(&cell.workload)).cloned().collect(),
            idle: self.idle.clone(),
            latencies: latencies.map(|(key, latency)| (key.clone(), latency.clone())).collect(),
        }
    }

    fn add(&mut self, cell: Cell, latency: Histogram<u64>) {
        let key = (cell.system.clone(), cell.workload.clone());
        self.cells.push(cell);
        match self.latencies.get_mut(&key) {
            Some(merged) => merged.add(&latency).expect("all have the same bounds"),
            None => drop(self.latencies.insert(key, latency)),
        }
    }
}

/// Why an experiment ended early.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    /// A signal has asked for that.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A system did not start.
    #[error(transparent)]
    System(#[from] SystemError),
    /// A load failed.
    #[error("{system} under {workload}")]
    Load {
        /// Which system.
        system: &'static str,
        /// Which load.
        workload: &'static str,
        /// How.
        source: LoadError,
    },
    /// An operation of an installation failed.
    #[error(transparent)]
    Operation(#[from] OperationError),
    /// The Ceph cluster cannot be used.
    #[error(transparent)]
    Ceph(#[from] CephError),
    /// The limit of this machine cannot be computed.
    #[error(transparent)]
    ComputedLimit(#[from] ComputedLimitError),
    /// Not enough room for the disks.
    #[error(
        "{} has room for {available} bytes, and the disks need {needed}; choose smaller disks or another directory",
        directory.display()
    )]
    Room {
        /// Where.
        directory: PathBuf,
        /// How much is free.
        available: u64,
        /// How much is needed.
        needed: u64,
    },
    /// The directory or the client's core cannot be used.
    #[error("{what}")]
    Setting {
        /// The attempt.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// The next step of an experiment, for progress messages.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// A section begins: its name and its title.
    Section(&'a str, &'a str),
    /// A disk is made, filled and checked.
    Filling(&'a str),
    /// VMs of a policy are made.
    Making(&'a str),
    /// Something of a Ceph cluster is there.
    Cluster(&'a ceph::Progress),
    /// A round begins: its number from 1, and the number of rounds.
    Round(u32, u32),
}

/// Why an operation could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// A signal has asked for the end.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A program cannot be run.
    #[error("{} cannot be run", program.display())]
    Program {
        /// Which.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A command failed.
    #[error("`{what}` failed: {said}")]
    Command {
        /// The command.
        what: String,
        /// What it said.
        said: String,
    },
    /// A command did not print what it should.
    #[error("`vmseal {what} -o json` printed no task with its times")]
    Answer {
        /// The command.
        what: String,
    },
    /// A file cannot be made or written.
    #[error("{} cannot be used", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It did not come about in time.
    #[error("it never came about that {what}; the log ends: {log}")]
    Never {
        /// What.
        what: &'static str,
        /// The end of the log.
        log: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::latencies;

    #[test]
    fn reads_and_writes_have_times_of_their_own() {
        let mut both = Latencies { reads: latencies(), writes: latencies() };
        assert_eq!(Times::of(&both), None);
        for value in 1..=100 {
            both.reads.record(value * 10).unwrap();
        }
        let times = Times::of(&both).unwrap();
        assert_eq!((times.reads, times.writes), (Some(times.all), None));
        // Values are kept with two digits.
        let near = |found: f64, value: f64| (found / value - 1.0).abs() < 0.01;
        assert!(near(times.all.mean, 505.0) && near(times.all.p50, 500.0), "{times:?}");
        assert!(near(times.all.p95, 950.0), "{times:?}");
        for _ in 0..100 {
            both.writes.record(5000).unwrap();
        }
        let times = Times::of(&both).unwrap();
        let (reads, writes) = (times.reads.unwrap(), times.writes.unwrap());
        assert!(near(reads.p95, 950.0) && near(writes.p50, 5000.0), "{times:?}");
        assert!(near(times.all.mean, 2752.5) && near(times.all.p95, 5000.0), "{times:?}");
    }
}
