//! A disk that gets other stacks while its guest reads and writes: longer ones, and layers of QEMU's format, each above all before. The
//! filter may be killed at any instant, and the client that drains the disk may disconnect or send what makes no sense: the guest sees one disk.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use vmseal_api::filter::{
    BackendSpec, BackingSpec, BitmapChange, ControlReply, ControlRequest, Direct, DiskStatus,
    Handle, NewStack,
};
use vmseal_api::id::DiskId;
use vmseal_api::transfer::ImageFormat;
use vmseal_initiator::driver::Driver;
use vmseal_secret::SecretBytes;

use super::backends::{SIZE, qemu_img_check};
use super::chains;
use super::guest::{Guest, USED};
use crate::seed::seed;
use crate::successor::Filter;

const LIVES: usize = 5;
/// How long the disk is at first, and how often it gets longer until it has [`SIZE`].
const SHORT: u64 = SIZE / 2;
const GROWTHS: u64 = 2;
const TIMEOUT: Duration = Duration::from_secs(30);
pub(super) const OFFSET: u64 = 16 << 10;

pub(super) fn id() -> DiskId {
    "01890a5d-ac96-774b-bcce-b302099a8058".parse().unwrap()
}

/// The files of the disk, the image first: what the note of its layers says.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub(super) directory: PathBuf,
    pub(super) names: Vec<String>,
}

impl Files {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn format(index: usize) -> ImageFormat {
        if index == 0 { ImageFormat::Raw } else { ImageFormat::Qcow2 }
    }

    /// Makes an empty layer above what there is; it is not used yet.
    pub(super) fn begin(&self) -> Self {
        let index = self.names.len();
        let format = if index == 1 { "raw" } else { "qcow2" };
        let mut next = self.clone();
        next.names.push(format!("layer-{index}"));
        let (fresh, below) = (self.path("fresh"), self.path(&self.names[index - 1]));
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "-F", format, "-b"]);
        let made = create.arg(below).arg(&fresh).arg((OFFSET + SIZE).to_string()).status();
        assert!(made.unwrap().success());
        // It may be there already, in a file system that has no other files.
        let mut new = File::create(next.path(&next.names[index])).unwrap();
        new.write_all(&std::fs::read(fresh).unwrap()).unwrap();
        new.sync_all().unwrap();
        next
    }

    /// The backend for a filter that starts.
    pub(super) fn backend(&self) -> Value {
        let below = self.names.iter().enumerate().rev().skip(1);
        let below = below.map(|(index, name)| {
            json!({ "file": { "path": self.path(name) }, "format": Self::format(index) })
        });
        match self.names.len() {
            1 => json!({ "kind": "file", "offset": OFFSET }),
            _ => json!({ "kind": "qcow2", "backing": below.collect::<Vec<_>>(), "offset": OFFSET }),
        }
    }

    /// The stack for a filter that runs, and its descriptors.
    pub(super) fn stack(&self) -> (NewStack, Vec<OwnedFd>) {
        let open = |(depth, name): (usize, &String)| {
            let file = File::options().read(true).write(depth == 0).open(self.path(name));
            OwnedFd::from(file.unwrap())
        };
        let fds: Vec<OwnedFd> = self.names.iter().rev().enumerate().map(open).collect();
        if self.names.len() == 1 {
            let (file, direct, keeps_room) = (Handle::Fd(0), Direct::Auto, false);
            let (offset, channel) = (OFFSET, None);
            let backend = BackendSpec::File { file, offset, direct, keeps_room, channel };
            return (NewStack { disk: id(), chain: None, backend, size: None }, fds);
        }
        let below = (0..self.names.len() - 1).rev().zip(1..);
        let below = below
            .map(|(index, fd)| BackingSpec { file: Handle::Fd(fd), format: Self::format(index) });
        let (file, offset) = (Handle::Fd(0), OFFSET);
        let backend = BackendSpec::Qcow2 { file, backing: below.collect(), offset, lock: None };
        (NewStack { disk: id(), chain: None, backend, size: None }, fds)
    }

    pub(super) fn start(&self, chain: &Value) -> (Filter, UnixStream) {
        let top = self.names.last().unwrap();
        Filter::start_on(&self.directory, top, &self.backend(), SIZE, chain)
    }

    /// No layer has more than leaked clusters, or none of those.
    pub(super) fn check(&self, leaks: bool) {
        for name in &self.names[1..] {
            let (code, said) = qemu_img_check(&self.path(name), &[]);
            assert!(code == Some(0) || leaks && code == Some(3), "{name}: {code:?} {said}");
        }
    }
}

/// A connection of an agent; what it asks is answered with none when the filter is dead.
pub(super) struct Agent(BufReader<UnixStream>);

impl Agent {
    pub(super) fn connect(directory: &Path, killed: &AtomicBool) -> Option<Self> {
        let until = Instant::now() + TIMEOUT;
        loop {
            match UnixStream::connect(directory.join("control")) {
                Ok(stream) => return Some(Self(BufReader::new(stream))),
                Err(_) if killed.load(Ordering::Relaxed) => return None,
                Err(error) => assert!(Instant::now() < until, "no control socket: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn on(stream: UnixStream) -> Self {
        Self(BufReader::new(stream))
    }

    pub(super) fn ask(
        &mut self,
        request: &ControlRequest,
        fds: &[OwnedFd],
    ) -> Option<ControlReply> {
        let line = [&serde_json::to_vec(request).unwrap()[..], b"\n"].concat();
        let numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        let rights = if numbers.is_empty() { &[] } else { &rights[..] };
        let (socket, flags) = (self.0.get_ref().as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
        let sent = sendmsg::<()>(socket, &[IoSlice::new(&line)], rights, flags, None).ok()?;
        assert_eq!(sent, line.len());
        let mut answer = String::new();
        self.0.read_line(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    fn status(&mut self) -> Option<DiskStatus> {
        match self.ask(&ControlRequest::Status, &[])? {
            ControlReply::Status(mut status) => Some(status.disks.remove(0)),
            other => panic!("{other:?}"),
        }
    }
}

/// What became of attempts, over all runs.
#[derive(Debug, Default)]
struct Count {
    replaced: usize,
    refused: usize,
    given_up: usize,
    killed_meanwhile: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    /// The disk has the stack that is on the note.
    Replaced,
    /// The disk has the stack of before; the note may say otherwise.
    Refused,
    GivenUp,
    /// The filter has died.
    Dead,
}

/// Takes a snapshot as an agent does; returns what the note says then.
fn snapshot(files: &Files, killed: &AtomicBool, random: &mut fastrand::Rng) -> (Files, Outcome) {
    let next = files.begin();
    let (stack, mut fds) = next.stack();
    let mut note = files.clone();
    let mut drain = || -> Option<Outcome> {
        let mut agent = Agent::connect(&files.directory, killed)?;
        let before = agent.status()?;
        let begin = ControlRequest::Bitmap {
            disk: id(),
            name: format!("b{}", random.u64(..)),
            change: BitmapChange::Start,
        };
        let marked = matches!(agent.ask(&begin, &[])?, ControlReply::Bitmaps { .. });
        assert!(marked || before.bitmaps.len() == 4);
        let drained = agent.ask(&ControlRequest::Drain { disks: vec![id()] }, &[])?;
        assert_eq!(drained, ControlReply::Done);
        let way = random.u8(..8);
        if way == 0 {
            return Some(Outcome::GivenUp);
        }
        if way == 1 {
            // A file that is no image, one too few, and one that is in the chain twice.
            match random.u8(..3) {
                0 => fds[0] = File::open("/dev/null").unwrap().into(),
                1 => drop(fds.pop()),
                _ => fds[0] = fds[1].try_clone().unwrap(),
            }
        } else {
            note = next.clone();
        }
        let stacks = vec![stack.clone()];
        let replaced = agent.ask(&ControlRequest::Replace { stacks }, &fds)?;
        assert_eq!(replaced == ControlReply::Done, way != 1, "{replaced:?}");
        if way == 2 {
            // It has the new one.
            return Some(Outcome::Replaced);
        }
        assert_eq!(agent.ask(&ControlRequest::Resume, &[])?, ControlReply::Done);
        let until = Instant::now() + TIMEOUT;
        let mut after = agent.status()?;
        while after.waits.is_some() {
            assert!(Instant::now() < until, "{after:?}");
            after = agent.status()?;
        }
        assert_eq!(after.bitmaps.len(), before.bitmaps.len() + usize::from(marked));
        assert!(after.counters.writes >= before.counters.writes && after.counters.writes > 0);
        assert_eq!(after.file != before.file, way != 1, "{after:?}");
        Some(if way == 1 { Outcome::Refused } else { Outcome::Replaced })
    };
    let outcome = drain().unwrap_or(Outcome::Dead);
    (note, outcome)
}

/// How long the disk is when it has been given its image so often.
fn length(times: u64) -> u64 {
    SHORT + (SIZE - SHORT) / GROWTHS * times.min(GROWTHS)
}

/// Gives the disk its image once more, which needs a ring each time, and every other time its filters, too. At first it gets longer
/// with that; it never gets shorter. What is new is dirty.
fn again(files: &Files, chain: &Value) {
    let mut agent = Agent::connect(&files.directory, &AtomicBool::new(false)).unwrap();
    let change = |agent: &mut Agent, change| {
        let (disk, name) = (id(), "grown".to_owned());
        let changed = agent.ask(&ControlRequest::Bitmap { disk, name, change }, &[]);
        assert!(matches!(changed, Some(ControlReply::Bitmaps { .. })), "{changed:?}");
    };
    change(&mut agent, BitmapChange::Start);
    for time in 0..4 {
        let size = length(time + 1);
        let file = File::options().read(true).write(true).open(files.path("disk")).unwrap();
        let key = SecretBytes::from_wiped(&mut std::fs::read(files.path("key")).unwrap());
        let key = key.unwrap().to_memfd().unwrap();
        let key = key.as_fd().try_clone_to_owned().unwrap();
        let backend = BackendSpec::File {
            file: Handle::Fd(0),
            offset: OFFSET,
            direct: Direct::Auto,
            keeps_room: false,
            channel: None,
        };
        let mut filters = chain.clone();
        for link in filters.as_array_mut().unwrap() {
            if link["kind"] == "crypt" {
                link["key"] = json!({ "fd": 1 });
            }
        }
        let cached = filters.as_array().unwrap().iter().any(|link| link["kind"] == "cache");
        let filters = (time % 2 == 1 && !cached).then(|| serde_json::from_value(filters).unwrap());
        file.set_len(OFFSET + size).unwrap();
        // Longer, then as long as it is, as where an agent asks again, and then whatever it is.
        let size = (time <= GROWTHS).then_some(size);
        let stacks = vec![NewStack { disk: id(), chain: filters, backend, size }];
        let drain = ControlRequest::Drain { disks: vec![id()] };
        assert_eq!(agent.ask(&drain, &[]), Some(ControlReply::Done));
        let shorter = vec![NewStack { size: Some(length(time) - 4096), ..stacks[0].clone() }];
        let others = [file.try_clone().unwrap().into(), key.try_clone().unwrap()];
        let refused = agent.ask(&ControlRequest::Replace { stacks: shorter }, &others);
        assert!(matches!(refused, Some(ControlReply::Error { .. })), "{refused:?}");
        let passed = file.try_clone().unwrap();
        let replaced = agent.ask(&ControlRequest::Replace { stacks }, &[file.into(), key]);
        let log = || std::fs::read_to_string(files.path("log")).unwrap();
        assert_eq!(replaced, Some(ControlReply::Done), "{time}: {}", log());
        // A descriptor that is used has this flag from then on, where the file system takes it. This one has no lock.
        let flags = OFlag::from_bits_retain(fcntl(&passed, FcntlArg::F_GETFL).unwrap());
        assert!(!flags.contains(OFlag::O_DIRECT), "{time}: it is not written by what has its lock");
        assert_eq!(agent.ask(&ControlRequest::Resume, &[]), Some(ControlReply::Done));
    }
    let dirty = agent.status().unwrap().bitmaps[0].dirty_bytes;
    let new = SIZE - SHORT;
    assert!((new..=new + USED).contains(&dirty), "{dirty}");
    change(&mut agent, BitmapChange::Remove);
}

/// The guest sees the size of now, and what is new is there to write to.
fn see_all(guest: &mut Guest) {
    guest.finish();
    let space = guest.driver.config();
    assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()) * 512, SIZE);
    let (last, data) = (SIZE / 512 - 8, [0x5a; 4096]);
    let (write, read) = (1, 0);
    assert_eq!(guest.driver.request(read, last, &data), (0, vec![0; 4096]), "it is new");
    assert_eq!(guest.driver.request(write, last, &data).0, 0);
    assert_eq!(guest.driver.request(read, last, &[0; 4096]), (0, data.to_vec()));
    assert_ne!(guest.driver.request(read, last + 8, &data).0, 0, "beyond the end");
}

fn run(place: &Path, chain: &[Value], mut random: fastrand::Rng, count: &mut Count) {
    let place = tempfile::tempdir_in(place).unwrap();
    let directory = place.path().to_owned();
    let chain = chains::in_place(chain, &directory);
    File::create(directory.join("disk")).unwrap().set_len(OFFSET + SHORT).unwrap();
    let mut files = Files { directory: directory.clone(), names: vec!["disk".to_owned()] };
    let (mut filter, socket) = Filter::start(&directory, &files.backend(), SHORT, &chain);
    let mut guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random.fork());
    guest.history.tears_beside_writes = true;
    guest.write_all();
    let (image, filters) = (files.clone(), chain.clone());
    let agent = thread::spawn(move || again(&image, &filters));
    while !agent.is_finished() {
        guest.go_on();
    }
    agent.join().unwrap();
    see_all(&mut guest);
    for _ in 0..LIVES {
        guest.go_on();
        let (before, mut of_agent) = (files.clone(), random.fork());
        let killed = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&killed);
        let agent = thread::spawn(move || snapshot(&before, &of_thread, &mut of_agent));
        guest.go_on();
        let kill = random.u8(..3);
        if kill == 0 {
            thread::sleep(Duration::from_millis(random.u64(..20)));
            filter.kill();
            killed.store(true, Ordering::Relaxed);
        }
        while kill != 0 && !agent.is_finished() {
            guest.go_on();
        }
        let (note, outcome) = agent.join().unwrap();
        files = note;
        match outcome {
            Outcome::Replaced => count.replaced += 1,
            Outcome::Refused => count.refused += 1,
            Outcome::GivenUp => count.given_up += 1,
            Outcome::Dead => count.killed_meanwhile += 1,
        }
        let log = || std::fs::read_to_string(directory.join("log")).unwrap();
        assert!(kill == 0 || outcome != Outcome::Dead, "the filter has died\n{}", log());
        if kill != 0 {
            guest.go_on();
        }
        if kill < 2 {
            if kill != 0 {
                filter.kill();
            }
            files.check(true);
            while guest.answer(Duration::ZERO) {}
            let socket;
            (filter, socket) = files.start(&chain);
            guest.driver.reconnect(socket);
        }
    }
    guest.go_on();
    guest.finish();
    let ended = filter.end();
    let log = std::fs::read_to_string(directory.join("log")).unwrap();
    assert!(ended.success() && !log.contains("not allowed"), "{ended:?}\n{log}");
    assert!(!log.contains("io_uring"), "a spare ring was not there\n{log}");
    files.check(true);
    let (filter, socket) = files.start(&chain);
    guest.driver.reconnect(socket);
    guest.read_all();
    assert!(filter.end().success());
    let findings = guest.history.check();
    let first: Vec<_> = findings.iter().take(5).collect();
    assert!(first.is_empty(), "{} wrong: {first:?}\n{log}", findings.len());
}

fn check_all(place: &Path) {
    let mut random = fastrand::Rng::with_seed(seed());
    let mut count = Count::default();
    let crypt = json!({ "kind": "crypt", "key": { "path": "KEY" }, "holes": "zero" });
    let cache = json!({ "kind": "cache", "bytes": 1 << 20 });
    for chain in [vec![], vec![crypt.clone()], vec![crypt, cache]] {
        println!("{}", chains::name(&chain));
        for _ in 0..4 {
            run(place, &chain, random.fork(), &mut count);
        }
    }
    println!("{count:?}");
    let Count { replaced, refused, given_up, killed_meanwhile } = count;
    let all = replaced > 0 && refused > 0 && given_up > 0 && killed_meanwhile > 0;
    assert!(all, "the test proves nothing: {count:?}");
}

#[test]
fn a_disk_that_gets_other_stacks_is_one_disk_whenever_its_filter_is_killed() {
    check_all(Path::new(env!("CARGO_TARGET_TMPDIR")));
}

#[test]
fn a_disk_in_memory_that_gets_other_stacks_is_one_disk_whenever_its_filter_is_killed() {
    check_all(Path::new("/dev/shm"));
}
