//! A disk that is copied to another stack and pivots there, while its guest reads and writes and the program is killed,
//! or hit by a power cut, at any instant, and the copy is paused, slowed and goes on: the guest sees one disk. At the end the
//! copy alone has everything. The copy begins with the program, or while it serves.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::{ControlReply, ControlRequest, DiskStatus, NewCopy};
use vmseal_api::pace::CopyPace;
use vmseal_initiator::driver::Driver;
use vmseal_secret::SecretBytes;

use super::backends::{BackendKind, SIZE, create};
use super::forgetful::Forgetful;
use super::guest::Guest;
use super::pause;
use super::replaced::{Agent, id};
use super::unplugged::can_mount;
use crate::history::SECTOR;
use crate::history::checker::Finding;
use crate::seed::seed;
use crate::successor::Filter;

const LIVES: usize = 5;
const TIMEOUT: Duration = Duration::from_secs(30);
/// How many runs may follow until filters were killed at every time that matters.
const MORE_RUNS: usize = 50;
/// Slow enough that the first copy is interrupted.
const RATE: u64 = 256 << 20;
const OFFSET: u64 = 16 << 10;
/// The file below the copy of a disk with a layer.
const BASE: &str = "copy-base";

/// The encryption of a place: none, or the file of its key and what a hole means.
type Sealed = Option<(&'static str, &'static str)>;

/// From where to where a disk is moved.
struct Move {
    kind: BackendKind,
    from: Sealed,
    to: Sealed,
    /// Whether the disk has a read cache, and so its copy.
    cached: bool,
}

impl Move {
    fn name(&self) -> String {
        let cached = if self.cached { ", with caches" } else { "" };
        format!("{:?}: {:?} to {:?}{cached}", self.kind, self.from, self.to)
    }

    /// The encryption of a place, and its cache.
    fn below(&self, sealed: Sealed, directory: &Path) -> Vec<Value> {
        let crypt = |(key, holes)| {
            let key = json!({ "path": directory.join(key) });
            json!({ "kind": "crypt", "key": key, "holes": holes })
        };
        sealed.map(crypt).into_iter().chain(self.cache()).collect()
    }

    fn cache(&self) -> Option<Value> {
        self.cached.then(|| json!({ "kind": "cache", "bytes": 1 << 20 }))
    }

    /// Whether the disk has a layer above its image. So has the copy, whose image is the same: with one key.
    fn layered(&self) -> bool {
        self.kind == BackendKind::Overlay
    }

    /// Puts a layer above what the guest has written, and above a copy of that.
    fn lay_over(&self, directory: &Path) {
        self.kind.lay_over(directory, "base");
        let [copy, base] = ["copy", BASE].map(|name| directory.join(name));
        std::fs::copy(directory.join("base"), &base).unwrap();
        std::fs::remove_file(&copy).unwrap();
        create(&copy, &["-b", base.to_str().unwrap(), "-F", "raw"]);
    }

    /// The copy in its file; `base` is the file below it.
    fn stored(&self, file: Option<Value>, base: &Value) -> Value {
        let mut backend = match self.layered() {
            true => {
                let below = json!([{ "file": base, "format": "raw" }]);
                json!({ "kind": "qcow2", "backing": below, "offset": OFFSET })
            }
            false => json!({ "kind": "file", "offset": OFFSET }),
        };
        if let Some(file) = file {
            backend["file"] = file;
        }
        backend
    }

    /// The chain of the disk with its mirror.
    fn chain(&self, directory: &Path) -> Value {
        let [copy, base] = ["copy", BASE].map(|name| json!({ "path": directory.join(name) }));
        let backend = self.stored(Some(copy), &base);
        let to = self.below(self.to, directory);
        let limit = json!({
            "kind": "limit", "requests": { "per_second": 50_000, "burst": 100 }
        });
        let mirror = json!({
            "kind": "mirror", "to": { "chain": to, "backend": backend },
            "map": { "path": directory.join("map") }, "pace": { "bytes_per_second": RATE },
            "same_below": self.layered()
        });
        [limit, mirror].into_iter().chain(self.below(self.from, directory)).collect()
    }

    /// The disk before it is copied, whose copy begins while it is served.
    fn start_alone(&self, directory: &Path) -> (Filter, UnixStream) {
        let chain: Value = self.below(self.from, directory).into();
        Filter::start(directory, &self.kind.backend(directory), SIZE, &chain)
    }

    /// The copy for a filter that runs, and its descriptors.
    fn copy(&self, directory: &Path) -> (NewCopy, Vec<OwnedFd>) {
        let open = |name: &str| File::options().read(true).write(true).open(directory.join(name));
        let mut fds: Vec<OwnedFd> = vec![open("copy").unwrap().into(), open("map").unwrap().into()];
        let crypt = self.to.map(|(name, holes)| {
            let key = SecretBytes::from_wiped(&mut std::fs::read(directory.join(name)).unwrap());
            let key = key.unwrap().to_memfd().unwrap();
            fds.push(key.as_fd().try_clone_to_owned().unwrap());
            json!({ "kind": "crypt", "key": { "fd": 2 }, "holes": holes })
        });
        let chain: Vec<Value> = crypt.into_iter().chain(self.cache()).collect();
        let base = json!({ "fd": fds.len() });
        if self.layered() {
            fds.push(File::open(directory.join(BASE)).unwrap().into());
        }
        let mirror = json!({
            "to": { "chain": chain, "backend": self.stored(Some(json!({ "fd": 0 })), &base) },
            "map": { "fd": 1 }, "pace": { "bytes_per_second": RATE },
            "same_below": self.layered()
        });
        (NewCopy { disk: id(), mirror: serde_json::from_value(mirror).unwrap() }, fds)
    }

    /// The chain of the copy alone.
    fn chain_after(&self, directory: &Path) -> Value {
        self.below(self.to, directory).into()
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

/// What a filter that lives answers.
fn ask(directory: &Path, request: &ControlRequest) -> Option<ControlReply> {
    Agent::connect(directory, &AtomicBool::new(false))?.ask(request, &[])
}

fn status(directory: &Path) -> DiskStatus {
    match ask(directory, &ControlRequest::Status) {
        Some(ControlReply::Status(mut status)) => status.disks.remove(0),
        other => panic!("{other:?}"),
    }
}

fn pivot() -> ControlRequest {
    ControlRequest::Pivot { disk: id() }
}

fn set_pace(directory: &Path, pace: CopyPace) {
    let dead = AtomicBool::new(false);
    let request = ControlRequest::Pace { disk: id(), pace, rests: false };
    let answer = Agent::connect(directory, &dead).and_then(|mut agent| agent.ask(&request, &[]));
    assert_eq!(answer, Some(ControlReply::Done));
}

/// When filters were killed, over all runs.
#[derive(Debug, Default)]
struct Killed {
    /// While the copy of a disk that is served was asked for.
    beginning: usize,
    /// Not then.
    begun: usize,
    copying: usize,
    pivoting: usize,
    pivoted: usize,
    paused: usize,
}

impl Killed {
    /// Whether filters were killed at every time that matters.
    fn at_all_times(&self) -> bool {
        let Self { beginning: _, begun, copying, pivoting, pivoted, paused } = self;
        [begun, copying, pivoting, pivoted, paused].into_iter().all(|count| *count > 0)
    }
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
    /// Has the disk be copied from now on while its guest works; the filter may be killed meanwhile.
    fn begin(&mut self, mut filter: Filter, killed: &mut Killed) -> Filter {
        self.guest.go_on();
        let (directory, (copy, fds)) = (self.directory.to_owned(), self.plan.copy(self.directory));
        let ended = Arc::new(AtomicBool::new(false));
        let dead = Arc::clone(&ended);
        let asked = thread::spawn(move || {
            let mut agent = Agent::connect(&directory, &dead)?;
            // A map that is no file, which changes nothing.
            let null = File::open("/dev/null").unwrap().into();
            let mut refused: Vec<OwnedFd> = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
            refused[1] = null;
            let request = ControlRequest::Mirror { copies: vec![copy] };
            let answer = agent.ask(&request, &refused)?;
            assert!(matches!(answer, ControlReply::Error { .. }), "{answer:?}");
            agent.ask(&request, &fds)
        });
        if self.random.bool() {
            pause(&mut self.random);
            filter.kill();
            ended.store(true, Ordering::Relaxed);
            let answered = asked.join().unwrap();
            killed.beginning += usize::from(answered.is_none());
            while self.guest.answer(Duration::ZERO) {}
            return self.next();
        }
        while !asked.is_finished() {
            self.guest.go_on();
        }
        let log = || std::fs::read_to_string(self.directory.join("log")).unwrap();
        assert_eq!(asked.join().unwrap(), Some(ControlReply::Done), "{}", log());
        killed.begun += 1;
        filter
    }

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
        let ended = Arc::new(AtomicBool::new(false));
        let dead = Arc::clone(&ended);
        // None if it is killed meanwhile, perhaps before the thread has connected.
        let turn = move || Agent::connect(&directory, &dead)?.ask(&pivot(), &[]);
        let asked = pivots.then(|| thread::spawn(turn));
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
        ended.store(true, Ordering::Relaxed);
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
        while ask(self.directory, &pivot()) != Some(ControlReply::Done) {
            assert!(Instant::now() < until, "{:?}", status(self.directory));
        }
        self.guest.go_on();
        self.guest.finish();
        assert!(filter.end().success());
        let chain = self.plan.chain_after(self.directory);
        let base = json!({ "path": self.directory.join(BASE) });
        let backend = self.plan.stored(None, &base);
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
    let served = random.bool();
    let start = || if served { plan.start_alone(directory) } else { plan.start(directory) };
    let (mut filter, socket) = if plan.layered() { plan.start_alone(directory) } else { start() };
    let mut guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random.fork());
    if plan.layered() {
        guest.go_on();
        guest.finish();
        assert!(filter.end().success());
        plan.lay_over(directory);
        let socket;
        (filter, socket) = start();
        guest.driver.reconnect(socket);
    }
    let mut run = Run { directory, plan, files, guest, findings: Vec::new(), random };
    if served {
        filter = run.begin(filter, killed);
    }
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
    for trouble in ["not allowed", "cannot be restricted", "no io_uring"] {
        assert!(!log.contains(trouble), "{log}");
    }
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
        (BackendKind::Overlay, plain, plain),
        (BackendKind::Overlay, old, old),
    ];
    // The files of an image that is made later do not forget.
    let moves = moves.into_iter().filter(|(kind, ..)| !forgets || *kind != BackendKind::Overlay);
    let mut random = fastrand::Rng::with_seed(seed());
    let mut killed = Killed::default();
    for (kind, from, to) in moves {
        let first = random.bool();
        for cached in [first, !first, random.bool()] {
            let plan = Move { kind, from, to, cached };
            println!("{}", plan.name());
            run(&plan, forgets, random.fork(), &mut killed);
        }
    }
    println!("{killed:?}");
    // When a filter is killed is up to chance.
    for _ in 0..MORE_RUNS {
        if killed.at_all_times() {
            return;
        }
        let plan = Move { kind: BackendKind::Storage, from: old, to: new, cached: false };
        run(&plan, forgets, random.fork(), &mut killed);
    }
    panic!("the test proves nothing: {killed:?}");
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
