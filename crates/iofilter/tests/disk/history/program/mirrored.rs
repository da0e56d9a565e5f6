//! A disk that is copied to another stack and pivots there, while its guest reads and writes and the program is killed,
//! or hit by a power cut, at any instant, and the copy is paused, slowed and goes on: the guest sees one disk. At the end the
//! copy alone has everything.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::{ControlReply, ControlRequest, DiskStatus};
use vmseal_api::pace::CopyPace;
use vmseal_initiator::driver::Driver;

use super::backends::{BackendKind, SIZE};
use super::forgetful::Forgetful;
use super::guest::Guest;
use super::pause;
use super::unplugged::can_mount;
use crate::history::SECTOR;
use crate::history::checker::Finding;
use crate::seed::seed;
use crate::successor::Filter;

const LIVES: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(30);
/// Slow enough that the first copy is interrupted.
const RATE: u64 = 256 << 20;
const OFFSET: u64 = 16 << 10;

/// The encryption of a place: none, or the file of its key and what a hole means.
type Sealed = Option<(&'static str, &'static str)>;

/// From where to where a disk is moved.
struct Move {
    kind: BackendKind,
    from: Sealed,
    to: Sealed,
}

impl Move {
    fn name(&self) -> String {
        format!("{:?}: {:?} to {:?}", self.kind, self.from, self.to)
    }

    fn crypt(sealed: Sealed, directory: &Path) -> Option<Value> {
        let (key, holes) = sealed?;
        Some(json!({ "kind": "crypt", "key": { "path": directory.join(key) }, "holes": holes }))
    }

    /// The chain of the disk with its mirror.
    fn chain(&self, directory: &Path) -> Value {
        let backend = json!({
            "kind": "file", "file": { "path": directory.join("copy") }, "offset": OFFSET
        });
        let to = Self::crypt(self.to, directory).into_iter().collect::<Vec<_>>();
        let limit = json!({
            "kind": "limit", "requests": { "per_second": 50_000, "burst": 100 }
        });
        let mirror = json!({
            "kind": "mirror", "to": { "chain": to, "backend": backend },
            "map": { "path": directory.join("map") }, "pace": { "bytes_per_second": RATE }
        });
        [Some(limit), Some(mirror), Self::crypt(self.from, directory)]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The chain of the copy alone.
    fn chain_after(&self, directory: &Path) -> Value {
        Self::crypt(self.to, directory).into_iter().collect()
    }

    fn make(&self, directory: &Path) {
        self.kind.make(directory);
        File::create(directory.join("copy")).unwrap().set_len(OFFSET + SIZE).unwrap();
        File::create(directory.join("map")).unwrap();
        for (name, first) in [("old", 0), ("new", 100)] {
            let key = directory.join(name);
            std::fs::write(&key, (first..first + 64u8).collect::<Vec<_>>()).unwrap();
            std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        }
    }

    fn start(&self, directory: &Path) -> (Filter, UnixStream) {
        Filter::start(directory, &self.kind.backend(directory), SIZE, &self.chain(directory))
    }
}

/// What a filter answers; none if it dies meanwhile.
fn ask(directory: &Path, request: &ControlRequest) -> Option<ControlReply> {
    let until = Instant::now() + TIMEOUT;
    let mut stream = loop {
        match UnixStream::connect(directory.join("control")) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < until, "no control socket: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    };
    let line = serde_json::to_vec(request).unwrap();
    stream.write_all(&[&line[..], b"\n"].concat()).ok()?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).ok()?;
    serde_json::from_str(&answer).ok()
}

fn status(directory: &Path) -> DiskStatus {
    match ask(directory, &ControlRequest::Status) {
        Some(ControlReply::Status(mut status)) => status.disks.remove(0),
        other => panic!("{other:?}"),
    }
}

const DISK: &str = "01890a5d-ac96-774b-bcce-b302099a8058";

fn pivot(directory: &Path) -> Option<ControlReply> {
    ask(directory, &ControlRequest::Pivot { disk: DISK.parse().unwrap() })
}

fn set_pace(directory: &Path, pace: CopyPace) {
    let answer = ask(directory, &ControlRequest::Pace { disk: DISK.parse().unwrap(), pace });
    assert_eq!(answer, Some(ControlReply::Done));
}

/// When filters were killed, over all runs.
#[derive(Debug, Default)]
struct Killed {
    copying: usize,
    pivoting: usize,
    pivoted: usize,
    paused: usize,
}

/// One run: the lives of a disk's filters, each ended by a kill, and by a power cut where the files forget.
struct Run<'a> {
    directory: &'a Path,
    plan: &'a Move,
    files: Option<Forgetful>,
    guest: Guest,
    findings: Vec<Finding>,
    random: fastrand::Rng,
}

impl Run<'_> {
    /// Lets the guest work while the disk may be asked to pivot, and kills the filter; whether the pivot was confirmed.
    fn live(&mut self, mut filter: Filter, pivots: bool, killed: &mut Killed) -> bool {
        let was = status(self.directory).mirror.unwrap();
        let directory = self.directory.to_owned();
        self.guest.go_on();
        let mut pace = CopyPace::default();
        for _ in 0..self.random.usize(..3) {
            // A pivot is refused while it is paused.
            let paused = self.random.u8(..3) == 0;
            let bytes_per_second = self.random.bool().then_some(RATE / 8);
            pace = CopyPace { bytes_per_second, paused };
            set_pace(self.directory, pace);
            self.guest.go_on();
        }
        let asked = pivots.then(|| thread::spawn(move || pivot(&directory)));
        self.guest.go_on();
        let answered = self.random.u8(..3) == 0;
        let mut answer = None;
        let asked = match asked {
            Some(asked) if answered => {
                self.guest.finish();
                answer = asked.join().unwrap();
                self.guest.go_on();
                None
            }
            other => other,
        };
        pause(&mut self.random);
        filter.kill();
        killed.paused += usize::from(pace.paused && !was.pivoted);
        match (was.pivoted, asked.is_some()) {
            (true, _) => killed.pivoted += 1,
            (false, true) => killed.pivoting += 1,
            (false, false) => killed.copying += 1,
        }
        if let Some(asked) = asked {
            answer = asked.join().unwrap();
        }
        while self.guest.answer(Duration::ZERO) {}
        was.pivoted || answer == Some(ControlReply::Done)
    }

    /// Starts the next filter, after a power cut if the files forget.
    fn next(&mut self) -> Filter {
        let cut = self.files.as_ref().filter(|_| self.random.bool());
        if let Some(files) = cut {
            files.cut();
            let (filter, socket) = self.plan.start(self.directory);
            let driver = Driver::connect_with_record(socket, u64::MAX);
            let (history, found) = self.guest.reboot(driver);
            self.findings.extend(history.check());
            self.findings.extend(history.check_cut(&found));
            return filter;
        }
        let (filter, socket) = self.plan.start(self.directory);
        self.guest.driver.reconnect(socket);
        filter
    }

    /// Has the disk pivot at last, and reads everything from the copy alone.
    fn end(mut self, filter: Filter) -> Vec<Finding> {
        let until = Instant::now() + TIMEOUT;
        while pivot(self.directory) != Some(ControlReply::Done) {
            assert!(Instant::now() < until, "{:?}", status(self.directory));
        }
        self.guest.go_on();
        self.guest.finish();
        assert!(filter.end().success());
        let chain = self.plan.chain_after(self.directory);
        let backend = json!({ "kind": "file", "offset": OFFSET });
        let (filter, socket) = Filter::start_on(self.directory, "copy", &backend, SIZE, &chain);
        self.guest.driver.reconnect(socket);
        self.guest.read_all();
        assert!(filter.end().success());
        self.findings.extend(self.guest.history.check());
        self.findings
    }
}

fn run(plan: &Move, forgets: bool, mut random: fastrand::Rng, killed: &mut Killed) {
    let place = tempfile::tempdir_in(plan.kind.directory()).unwrap();
    let directory = place.path();
    plan.make(directory);
    let files = forgets.then(|| {
        let cuts = random.fork();
        Forgetful::mount(directory, &["disk", "copy", "map"], SECTOR as u64, true, cuts).unwrap()
    });
    let (mut filter, socket) = plan.start(directory);
    let guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random.fork());
    let mut run = Run { directory, plan, files, guest, findings: Vec::new(), random };
    let mut confirmed = false;
    for life in 0..LIVES {
        let pivots = life > 0 && run.random.bool();
        confirmed |= run.live(filter, pivots, killed);
        filter = run.next();
        let pivoted = status(directory).mirror.unwrap().pivoted;
        assert!(pivoted || !confirmed, "a pivot that was confirmed is undone");
        confirmed = pivoted;
    }
    let findings = run.end(filter);
    let log = std::fs::read_to_string(directory.join("log")).unwrap();
    assert!(!log.contains("not allowed"), "{log}");
    let first: Vec<_> = findings.iter().take(5).collect();
    assert!(first.is_empty(), "{}: {} wrong: {first:?}\n{log}", plan.name(), findings.len());
}

fn check_all(forgets: bool) {
    let (plain, old, new) = (None, Some(("old", "zero")), Some(("new", "zero")));
    let full = Some(("new", "ciphertext"));
    let moves = [
        (BackendKind::Storage, plain, new),
        (BackendKind::Storage, old, plain),
        (BackendKind::Storage, old, new),
        (BackendKind::Storage, plain, full),
        (BackendKind::Qcow2, plain, new),
    ];
    let mut random = fastrand::Rng::with_seed(seed());
    let mut killed = Killed::default();
    for (kind, from, to) in moves {
        let plan = Move { kind, from, to };
        println!("{}", plan.name());
        for _ in 0..3 {
            run(&plan, forgets, random.fork(), &mut killed);
        }
    }
    println!("{killed:?}");
    let Killed { copying, pivoting, pivoted, paused } = killed;
    let all = [copying, pivoting, pivoted, paused];
    assert!(all.iter().all(|count| *count > 0), "the test proves nothing: {killed:?}");
}

#[test]
fn a_disk_that_is_copied_and_pivots_is_one_disk_whenever_its_filter_is_killed() {
    check_all(false);
}

#[test]
fn of_a_disk_that_pivots_only_what_was_not_flushed_goes_with_the_power() {
    if can_mount() {
        check_all(true);
    }
}
