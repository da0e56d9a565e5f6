//! A disk whose active layer is merged into the one below it while its guest waits, as an agent does: drained, merged by
//! another filter, retired, noted, replaced, resumed. Either filter may be killed at any instant, the agent may go away at each step,
//! and the power may fail: the guest sees one disk.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::{ControlReply, ControlRequest, DiskActivity};
use vmseal_initiator::driver::Driver;

use super::backends::SIZE;
use super::forgetful::Forgetful;
use super::guest::Guest;
use super::replaced::{Agent, Files, OFFSET, id};
use super::unplugged::can_mount;
use super::{chains, pause};
use crate::history::SECTOR;
use crate::history::checker::Finding;
use crate::seed::seed;
use crate::successor::Filter;

const ROUNDS: usize = 6;
const TIMEOUT: Duration = Duration::from_secs(30);

/// How a filter exits that was told that its stack is out of date, and not given another one.
const RETIRED_EXIT: i32 = 3;

/// How far the agent comes before it goes away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// To the end.
    Done,
    /// The merge is under way.
    LeavesMerging,
    /// The stack is retired, the note is as before.
    LeavesRetired,
    /// The note is put.
    LeavesNoted,
}

/// What became of merges, over all runs.
#[derive(Debug, Default)]
struct Count {
    done: usize,
    left_merging: usize,
    left_retired: usize,
    left_noted: usize,
    killed: usize,
    cut: usize,
}

/// A filter that merges the active layer; killed when dropped.
struct Merger(Child);

impl Merger {
    fn start(files: &Files) -> Self {
        let open = |name: &String, write: bool| -> OwnedFd {
            File::options().read(true).write(write).open(files.path(name)).unwrap().into()
        };
        let names = || files.names.iter().rev();
        let upper: Vec<OwnedFd> = names().map(|name| open(name, false)).collect();
        let lower: Vec<OwnedFd> =
            names().skip(1).enumerate().map(|(depth, name)| open(name, depth == 0)).collect();
        let lock: OwnedFd = File::create(files.path("merge-lock")).unwrap().into();
        let config = json!({
            "version": 1,
            "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
            "control": { "path": files.path("merging") },
            "disks": [{
                "disk": id(),
                "size": OFFSET + SIZE,
                "serial": "vmseal-0",
                "read_only": true,
                "chain": [],
                "backend": stored(&upper),
                "merge": { "into": { "chain": [], "backend": stored(&lower) }, "lock": { "fd": lock.as_raw_fd() } }
            }]
        });
        let path = files.path("merge-config");
        std::fs::write(&path, config.to_string()).unwrap();
        let log = File::options().create(true).append(true).open(files.path("log")).unwrap();
        let inherited: Vec<RawFd> =
            upper.iter().chain(&lower).chain([&lock]).map(AsRawFd::as_raw_fd).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal-filter"));
        command.arg("--config").arg(path).stderr(Stdio::from(log));
        // SAFETY: fcntl is async-signal-safe, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                for fd in &inherited {
                    libc::fcntl(*fd, libc::F_SETFD, 0);
                }
                Ok(())
            });
        }
        Self(command.spawn().unwrap())
    }

    /// Waits until all is merged and flushed.
    fn finish(self, files: &Files) {
        let state = self.ended(files);
        assert_eq!(state, DiskActivity::Idle, "it is not merged");
    }

    /// Waits for the end of the merge, or for its failure.
    fn ended(mut self, files: &Files) -> DiskActivity {
        let until = Instant::now() + TIMEOUT;
        loop {
            let socket = UnixStream::connect(files.path("merging"));
            let status =
                socket.ok().and_then(|socket| Agent::on(socket).ask(&ControlRequest::Status, &[]));
            match status {
                Some(ControlReply::Status(mut status)) => match status.disks.remove(0).state {
                    DiskActivity::Merging { .. } => {}
                    ended => break ended,
                },
                Some(other) => panic!("{other:?}"),
                None => {}
            }
            let log = || std::fs::read_to_string(files.path("log")).unwrap();
            assert!(self.0.try_wait().unwrap().is_none(), "the merge has ended\n{}", log());
            assert!(Instant::now() < until, "it is not merged");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An image and the layers above it, the active one first, in these files.
fn stored(files: &[OwnedFd]) -> Value {
    let fd = |file: &OwnedFd| json!({ "fd": file.as_raw_fd() });
    if let [file] = files {
        return json!({ "kind": "file", "file": fd(file), "offset": 0, "direct": "off" });
    }
    let below = files.iter().enumerate().skip(1).map(|(depth, file)| {
        let format = if depth + 1 == files.len() { "raw" } else { "qcow2" };
        json!({ "file": fd(file), "format": format })
    });
    json!({ "kind": "qcow2", "file": fd(&files[0]), "backing": below.collect::<Vec<_>>(), "offset": 0 })
}

/// Gives the disk the stack that `next` says.
fn replace(agent: &mut Agent, next: &Files) -> Option<()> {
    let (stack, fds) = next.stack();
    let replaced = agent.ask(&ControlRequest::Replace { stacks: vec![stack] }, &fds)?;
    assert_eq!(replaced, ControlReply::Done);
    let resumed = agent.ask(&ControlRequest::Resume, &[])?;
    assert_eq!(resumed, ControlReply::Done);
    Some(())
}

fn drained(files: &Files, killed: &AtomicBool) -> Option<Agent> {
    let mut agent = Agent::connect(&files.directory, killed)?;
    let drained = agent.ask(&ControlRequest::Drain { disks: vec![id()] }, &[])?;
    assert_eq!(drained, ControlReply::Done);
    Some(agent)
}

/// Puts a layer above the disk; returns what the note says then.
fn put_above(files: &Files, killed: &AtomicBool) -> Files {
    let next = files.begin();
    let mut note = files.clone();
    let mut put = || -> Option<()> {
        let mut agent = drained(files, killed)?;
        note = next.clone();
        replace(&mut agent, &next)
    };
    put();
    note
}

/// Gives the disk the same files again, as after a merge below them; returns what the note says.
fn again(files: &Files, killed: &AtomicBool) -> Files {
    let again = || replace(&mut drained(files, killed)?, files);
    again();
    files.clone()
}

/// Merges the active layer; returns what the note says then.
fn merge(files: &Files, way: Way, killed: &AtomicBool, random: &mut fastrand::Rng) -> Files {
    let mut next = files.clone();
    next.names.pop();
    let mut note = files.clone();
    let mut merge = || -> Option<()> {
        let mut agent = drained(files, killed)?;
        let merger = Merger::start(files);
        if way == Way::LeavesMerging {
            // The guest goes on above what is being written.
            drop(agent);
            if random.bool() {
                thread::sleep(Duration::from_millis(random.u64(..30)));
                return Some(());
            }
            // It may find what is newer than the length of the layer that it knows, and fail.
            let ended = merger.ended(files);
            let ends = matches!(ended, DiskActivity::Idle | DiskActivity::Failed { .. });
            assert!(ends, "{ended:?}");
            return Some(());
        }
        merger.finish(files);
        assert_eq!(agent.ask(&ControlRequest::Retire, &[])?, ControlReply::Done);
        if way == Way::LeavesRetired {
            return Some(());
        }
        note = next.clone();
        if way == Way::LeavesNoted {
            return Some(());
        }
        replace(&mut agent, &next)
    };
    merge();
    note
}

struct Run<'a> {
    directory: &'a Path,
    chain: Value,
    files: Files,
    power: Option<Forgetful>,
    guest: Guest,
    findings: Vec<Finding>,
    random: fastrand::Rng,
}

impl Run<'_> {
    /// One change of the layers beside the guest; returns the filter that serves then.
    fn round(&mut self, mut filter: Filter, count: &mut Count) -> Filter {
        self.guest.go_on();
        let (files, mut of_agent) = (self.files.clone(), self.random.fork());
        let killed = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&killed);
        let depth = files.names.len();
        let merges = depth == 3 || depth == 2 && self.random.bool();
        let way = match self.random.u8(..7) {
            _ if !merges => Way::Done,
            0 | 1 => Way::LeavesMerging,
            2 => Way::LeavesRetired,
            3 => Way::LeavesNoted,
            _ => Way::Done,
        };
        let agent = thread::spawn(move || match merges {
            true => merge(&files, way, &of_thread, &mut of_agent),
            false if depth > 1 && of_agent.bool() => again(&files, &of_thread),
            false => put_above(&files, &of_thread),
        });
        let ends = matches!(way, Way::LeavesRetired | Way::LeavesNoted);
        let kills = self.random.u8(..4) == 0;
        if kills {
            pause(&mut self.random);
            thread::sleep(Duration::from_millis(self.random.u64(..60)));
            filter.kill();
            killed.store(true, Ordering::Relaxed);
        }
        while !kills && !ends && !agent.is_finished() {
            self.guest.go_on();
        }
        self.files = agent.join().unwrap();
        if kills {
            count.killed += 1;
        } else if ends {
            assert_eq!(filter.ended().code(), Some(RETIRED_EXIT), "it serves what is out of date");
        }
        match way {
            _ if !merges || kills => {}
            Way::Done => count.done += 1,
            Way::LeavesMerging => count.left_merging += 1,
            Way::LeavesRetired => count.left_retired += 1,
            Way::LeavesNoted => count.left_noted += 1,
        }
        if !kills && !ends {
            self.guest.go_on();
            if self.random.bool() {
                return filter;
            }
            filter.kill();
        }
        while self.guest.answer(Duration::ZERO) {}
        self.next(count)
    }

    /// Starts the next filter by the note, perhaps after a power cut.
    fn next(&mut self, count: &mut Count) -> Filter {
        let cut = self.power.as_ref().filter(|_| self.random.bool());
        if let Some(power) = cut {
            count.cut += 1;
            power.cut();
            let (filter, socket) = self.files.start(&self.chain);
            let driver = Driver::connect_with_record(socket, u64::MAX);
            let (history, found) = self.guest.reboot(driver);
            self.findings.extend(history.check());
            self.findings.extend(history.check_cut(&found));
            return filter;
        }
        self.files.check(true);
        let (filter, socket) = self.files.start(&self.chain);
        self.guest.driver.reconnect(socket);
        filter
    }
}

fn run(place: &Path, chain: &[Value], forgets: bool, mut random: fastrand::Rng, count: &mut Count) {
    let place = tempfile::tempdir_in(place).unwrap();
    let directory = place.path();
    let chain = chains::in_place(chain, directory);
    File::create(directory.join("disk")).unwrap().set_len(OFFSET + SIZE).unwrap();
    let power = forgets.then(|| {
        let layers = ["disk", "layer-1", "layer-2"];
        layers[1..].iter().for_each(|name| drop(File::create(directory.join(name)).unwrap()));
        // A sector of ciphertext is all zeroes, or none of it.
        Forgetful::mount(directory, &layers, SECTOR as u64, true, random.fork()).unwrap()
    });
    let files = Files { directory: directory.to_owned(), names: vec!["disk".to_owned()] };
    let (mut filter, socket) = files.start(&chain);
    let mut guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random.fork());
    guest.history.tears_beside_writes = true;
    guest.write_all();
    let mut run = Run { directory, chain, files, power, guest, findings: Vec::new(), random };
    for _ in 0..ROUNDS {
        filter = run.round(filter, count);
    }
    run.guest.go_on();
    run.guest.finish();
    let ended = filter.end();
    let log = std::fs::read_to_string(run.directory.join("log")).unwrap();
    assert!(ended.success() && !log.contains("not allowed"), "{ended:?}\n{log}");
    assert!(!log.contains("no io_uring"), "a spare ring was not there\n{log}");
    assert!(forgets || !log.contains("leaked"), "{log}");
    let (filter, socket) = run.files.start(&run.chain);
    run.guest.driver.reconnect(socket);
    run.guest.read_all();
    assert!(filter.end().success());
    run.findings.extend(run.guest.history.check());
    let first: Vec<_> = run.findings.iter().take(5).collect();
    assert!(first.is_empty(), "{} wrong: {first:?}\n{log}", run.findings.len());
}

fn check_all(place: &Path, forgets: bool) {
    let mut random = fastrand::Rng::with_seed(seed());
    let mut count = Count::default();
    let crypt = json!({ "kind": "crypt", "key": { "path": "KEY" }, "holes": "zero" });
    let cache = json!({ "kind": "cache", "bytes": 1 << 20 });
    for chain in [vec![], vec![crypt.clone()], vec![crypt, cache]] {
        println!("{}", chains::name(&chain));
        for _ in 0..5 {
            run(place, &chain, forgets, random.fork(), &mut count);
        }
    }
    println!("{count:?}");
    let Count { done, left_merging, left_retired, left_noted, killed, cut } = count;
    let all = [done, left_merging, left_retired, left_noted, killed];
    let proves = all.iter().all(|count| *count > 0) && (cut > 0) == forgets;
    assert!(proves, "the test proves nothing: {count:?}");
}

#[test]
fn a_disk_whose_active_layer_is_merged_is_one_disk_whatever_is_killed() {
    check_all(Path::new(env!("CARGO_TARGET_TMPDIR")), false);
}

#[test]
fn of_a_disk_whose_active_layer_is_merged_only_what_was_not_flushed_goes_with_the_power() {
    if can_mount() {
        check_all(Path::new(env!("CARGO_TARGET_TMPDIR")), true);
    }
}
