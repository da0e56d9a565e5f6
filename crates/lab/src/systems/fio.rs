//! fio with its engine for images, which has its way to the pool within it: librbd, without a server.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde::Deserialize;

use super::server::{last_words, on_cores};
use super::{Librbd, OwnLoad, OwnResult, Place, Program, Server, System, SystemError, librbd};
use crate::ceph::{client, tools};
use crate::clock::{self, ProcessClock};
use crate::load::{self, Direction, Order, Workload};
use crate::{children, stop};

/// How much longer than its load fio may take: it connects to the cluster, and ends what is in flight.
const MORE: Duration = Duration::from_secs(120);
/// How often it is looked whether it has ended: seldom enough that nothing of it shows in what is measured.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// fio on an image in the clear. The image is filled and read back through QEMU's storage daemon.
#[derive(Clone, Debug)]
pub struct FioRbd {
    /// The image.
    pub image: Librbd,
    /// fio.
    pub fio: Program,
}

/// Why fio cannot measure an image; none if it can.
#[must_use]
pub fn obstacle(fio: &Program) -> Option<String> {
    let path = fio.path.display();
    match fio.command().arg("--enghelp=rbd").output() {
        Ok(output) if output.status.success() => None,
        Ok(_) => Some(format!("{path} has no engine rbd; {}", fio.advice)),
        Err(_) => Some(format!("{path} cannot be run; {}", fio.advice)),
    }
}

impl System for FioRbd {
    fn id(&self) -> &'static str {
        self.image.id()
    }

    fn encrypts(&self) -> bool {
        self.image.encrypts()
    }

    fn has_files(&self) -> bool {
        self.image.has_files()
    }

    fn kept(&self, place: &Place) -> Result<Box<dyn Read>, SystemError> {
        self.image.kept(place)
    }

    fn own_load(&self) -> Option<&dyn OwnLoad> {
        Some(self)
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        self.image.prepare(place)
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        self.image.start(place, core)
    }
}

impl OwnLoad for FioRbd {
    fn measure(
        &self,
        place: &Place,
        workload: &Workload,
        times: (Duration, Duration),
        seed: u64,
    ) -> Result<OwnResult, SystemError> {
        let (results, log) = (place.directory.join("fio.json"), place.directory.join("fio.log"));
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| SystemError::File { path, source }
        };
        let errors = File::create(&log).map_err(file(&log))?;
        let mut command = tools::isolated(self.fio.command());
        command.env("CEPH_CONF", librbd::configuration(place));
        command.args(arguments(&self.image, workload, times, seed));
        command.arg("--output").arg(&results).stdout(Stdio::null()).stderr(errors);
        let begun = Instant::now();
        let not_run = |error| self.fio.failed(error);
        let spawned = match &self.image.cores {
            Some(cores) => on_cores(cores, || command.spawn()).map_err(not_run)?,
            None => command.spawn(),
        };
        let mut running = Running(spawned.map_err(not_run)?);
        let failed = |what: String| {
            let said = last_words(&log);
            SystemError::NothingMeasured { system: self.id(), what, said }
        };
        let told = |error: io::Error| failed(error.to_string());
        let machine = clock::machine().map_err(told)?;
        let process = running.until_ended(begun + times.0 + times.1 + MORE).map_err(told)?;
        let others = clock::machine().map_err(told)?.saturating_sub(machine + process);
        let whole = begun.elapsed();
        let status = running.0.wait().map_err(told)?;
        if !status.success() {
            return Err(failed(format!("it ended with {status}")));
        }
        let text = fs::read_to_string(&results).map_err(file(&results))?;
        let (requests, elapsed, latency) = parse(&text, workload.direction).map_err(failed)?;
        // Its process also connects and warms up: most of that is the same work, and is told apart by the time that it takes.
        let measured = elapsed.as_secs_f64();
        let cpu = process.mul_f64(measured / (times.0.as_secs_f64() + measured));
        let others = others.mul_f64(measured / whole.as_secs_f64().max(measured));
        Ok(OwnResult { requests, elapsed, cpu, others, latency })
    }
}

/// What fio is called with, but for where its results go. Blocks are drawn as the laboratory draws them, with repetitions.
fn arguments(
    image: &Librbd,
    workload: &Workload,
    (warm_up, measured): (Duration, Duration),
    seed: u64,
) -> Vec<String> {
    let direction = match (workload.order, workload.direction) {
        (Order::Random, Direction::Read) => "randread",
        (Order::Random, Direction::Write) => "randwrite",
        (Order::Random, Direction::Mixed(_)) => "randrw",
        (Order::Sequential, Direction::Read) => "read",
        (Order::Sequential, Direction::Write) => "write",
        (Order::Sequential, Direction::Mixed(_)) => "rw",
    };
    let mixed = match workload.direction {
        Direction::Mixed(reads) => Some(format!("--rwmixread={reads}")),
        Direction::Read | Direction::Write => None,
    };
    let fixed = [
        "--name=load",
        "--ioengine=rbd",
        // One process, whose clock has all.
        "--thread",
        "--time_based",
        "--norandommap",
        "--eta=never",
        // Latencies from submitting to reaping, and how often each occurred.
        "--lat_percentiles=1",
        "--clat_percentiles=0",
        "--output-format=json+",
    ];
    let chosen = [
        format!("--clientname={}", client::user(&image.pool)),
        format!("--pool={}", image.pool.pool),
        format!("--rbdname={}", image.id),
        format!("--rw={direction}"),
        format!("--bs={}", workload.block),
        format!("--iodepth={}", workload.depth),
        format!("--ramp_time={}ms", warm_up.as_millis()),
        format!("--runtime={}ms", measured.as_millis().max(1)),
        // Never 0, which fio replaces.
        format!("--randseed={}", seed.saturating_add(1)),
    ];
    fixed.into_iter().map(str::to_owned).chain(chosen).chain(mixed).collect()
}

/// A process that is ended when this is dropped.
struct Running(Child);

impl Running {
    /// Waits until it has ended by itself; its CPU time.
    fn until_ended(&self, until: Instant) -> io::Result<Duration> {
        let clock = ProcessClock::of(self.0.id())?;
        let pid = Pid::from_raw(i32::try_from(self.0.id()).map_err(io::Error::other)?);
        // While nobody has been told that it ended, its clock can be read.
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        while waitid(Id::Pid(pid), flags)? == WaitStatus::StillAlive {
            if stop::asked() {
                return Err(io::Error::other(stop::Stopped));
            }
            if Instant::now() > until {
                return Err(io::Error::other("it does not end"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        clock.read()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        children::end(&mut self.0);
    }
}

/// What fio prints, as far as it is used.
#[derive(Deserialize)]
struct Printed {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i64,
    read: Side,
    write: Side,
}

#[derive(Deserialize)]
struct Side {
    /// In milliseconds.
    runtime: u64,
    lat_ns: Latencies,
}

#[derive(Deserialize)]
struct Latencies {
    /// How many requests took so many nanoseconds.
    #[serde(default)]
    bins: BTreeMap<u64, u64>,
}

/// Requests, the time that they took together, and the latency of each, of what fio prints.
fn parse(text: &str, direction: Direction) -> Result<(u64, Duration, Histogram<u64>), String> {
    // Notes come first.
    let json = text.find('{').map_or(text, |at| &text[at..]);
    let printed: Printed = serde_json::from_str(json)
        .map_err(|error| format!("its results are not what fio 3.33 prints: {error}"))?;
    let [job] = &printed.jobs[..] else {
        return Err(format!("its results are of {} loads", printed.jobs.len()));
    };
    if job.error != 0 {
        return Err(format!(
            "a request failed: {}",
            io::Error::from_raw_os_error(job.error as i32)
        ));
    }
    let sides = match direction {
        Direction::Read => &[&job.read][..],
        Direction::Write => &[&job.write],
        Direction::Mixed(_) => &[&job.read, &job.write],
    };
    let runtime = sides.iter().map(|side| side.runtime).max().unwrap_or_default();
    let mut latency = load::latencies();
    for (nanoseconds, count) in sides.iter().flat_map(|side| &side.lat_ns.bins) {
        latency.saturating_record_n(*nanoseconds, *count);
    }
    if runtime == 0 || latency.is_empty() {
        return Err("no request ended within the measured time".to_owned());
    }
    // `total_ios` counts what was begun in the measured time, which goes on until all of it has ended.
    Ok((latency.len(), Duration::from_millis(runtime), latency))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::librbd::tests::librbd;
    use super::*;

    const LOAD: Workload = Workload {
        id: "w",
        order: Order::Random,
        direction: Direction::Write,
        block: 4 << 20,
        depth: 128,
    };

    /// As fio 3.33 prints it, without what is not used.
    fn printed(error: i32, began: u64) -> String {
        format!(
            r#"note: something
{{"fio version": "fio-3.33", "jobs": [{{"jobname": "load", "error": {error},
"read": {{"total_ios": 1, "runtime": 0, "lat_ns": {{"min": 0, "N": 0}}}},
"write": {{"total_ios": {began}, "runtime": 2002, "iops": 1.5, "lat_ns":
    {{"min": 100, "N": 4, "percentile": {{"50.000000": 100}}, "bins": {{"1000": 3, "90000000000": 1}}}}}}
}}]}}"#
        )
    }

    #[test]
    fn results_are_those_of_the_load_s_direction() {
        // One more had ended than was begun meanwhile.
        let (requests, elapsed, latency) = parse(&printed(0, 3), Direction::Write).unwrap();
        assert_eq!((requests, elapsed), (4, Duration::from_millis(2002)));
        assert_eq!((latency.len(), latency.value_at_quantile(0.5)), (4, 1003));
        // Above what is recorded, it is the highest that is.
        assert!(latency.max() >= 60_000_000_000, "{}", latency.max());
        let mixed = parse(&printed(0, 4), Direction::Mixed(20)).unwrap();
        assert_eq!((mixed.0, mixed.1, mixed.2.len()), (4, Duration::from_millis(2002), 4));
        let none = parse(&printed(0, 4), Direction::Read).unwrap_err();
        assert!(none.contains("no request ended"), "{none}");
    }

    #[test]
    fn what_did_not_measure_is_no_result() {
        for (text, why) in [
            (
                printed(0, 4)
                    .replace("\"bins\": {\"1000\": 3, \"90000000000\": 1}", "\"bins\": {}"),
                "no request ended",
            ),
            (printed(5, 4), "a request failed: Input/output error"),
            (printed(0, 4).replace("runtime", "time"), "not what fio 3.33 prints"),
            (String::new(), "not what fio 3.33 prints"),
            (r#"{"jobs": []}"#.to_owned(), "of 0 loads"),
        ] {
            let found = parse(&text, Direction::Write).unwrap_err();
            assert!(found.contains(why), "{found}\nnot: {why}");
        }
    }

    #[test]
    fn a_load_is_told_to_fio_as_the_laboratory_has_it() {
        let times = (Duration::from_millis(200), Duration::from_secs(2));
        let told = |load: &Workload| arguments(&librbd("fio-rbd"), load, times, 0);
        let words = told(&LOAD);
        for word in [
            "--ioengine=rbd",
            "--clientname=one",
            "--pool=some",
            "--rbdname=fio-rbd",
            "--rw=randwrite",
            "--bs=4194304",
            "--iodepth=128",
            "--ramp_time=200ms",
            "--runtime=2000ms",
            "--randseed=1",
        ] {
            assert!(words.iter().any(|it| it == word), "{word}: {words:?}");
        }
        let read =
            Workload { order: Order::Sequential, direction: Direction::Read, depth: 1, ..LOAD };
        assert!(told(&read).contains(&"--rw=read".to_owned()));
        let mixed = told(&Workload { direction: Direction::Mixed(70), ..LOAD });
        assert!(mixed.contains(&"--rw=randrw".to_owned()), "{mixed:?}");
        assert!(mixed.contains(&"--rwmixread=70".to_owned()), "{mixed:?}");
    }

    #[test]
    fn fio_s_own_results_are_understood_where_it_is_installed() {
        let program = Program { path: "fio".into(), advice: "" };
        if let Some(obstacle) = program.obstacle() {
            // Not by a macro, whose output the harness hides when a test passes.
            let message = format!("skipped: {obstacle}\n");
            return std::io::Write::write_all(&mut std::io::stderr(), message.as_bytes()).unwrap();
        }
        // The same arguments with an engine that needs no cluster.
        let load = Workload { direction: Direction::Read, block: 4096, depth: 4, ..LOAD };
        let times = (Duration::from_millis(10), Duration::from_millis(100));
        let mut words = arguments(&librbd("fio-rbd"), &load, times, 0);
        let of_images = ["--ioengine", "--clientname", "--pool", "--rbdname"];
        words.retain(|word| !of_images.iter().any(|it| word.starts_with(it)));
        let output =
            program.command().args(&words).args(["--ioengine=null", "--size=64m"]).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let (requests, elapsed, latency) = parse(&text, Direction::Read).unwrap();
        assert!(requests > 0 && elapsed >= Duration::from_millis(90), "{requests} {elapsed:?}");
        assert!(latency.len() > requests / 2, "{} of {requests}", latency.len());
    }

    #[test]
    fn the_cpu_time_of_what_has_ended_is_known_and_what_does_not_end_is_ended() {
        let script = |text: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", text]).stdin(Stdio::null());
            Running(command.spawn().unwrap())
        };
        let later = || Instant::now() + Duration::from_secs(60);
        let worked = script("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done");
        assert!(worked.until_ended(later()).unwrap() > Duration::from_millis(1));
        let sleeper = script("exec sleep 60");
        let pid = sleeper.0.id();
        let told = sleeper.until_ended(Instant::now()).unwrap_err().to_string();
        assert!(told.contains("does not end"), "{told}");
        drop(sleeper);
        assert!(ProcessClock::of(pid).and_then(|it| it.read()).is_err());
    }

    #[test]
    fn fio_without_the_engine_is_told() {
        let none = Program { path: "/nonexistent/fio".into(), advice: "install Debian's fio" };
        let told = obstacle(&none).unwrap();
        assert!(told.contains("cannot be run; install Debian's fio"), "{told}");
        let without = obstacle(&Program { path: "false".into(), ..none }).unwrap();
        assert!(without.contains("has no engine rbd"), "{without}");
    }
}
