//! The program, killed at any instant under a guest that reads while it writes, in parts of sectors, and
//! started again: what was answered is there, once, and the guest sees a pause. Not every chain on every
//! backend: each of them at least once, and together those that share a state that a kill could tear.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde_json::{Value, json};
use vm_memory::{Bytes, GuestAddress};

use crate::checker::{End, History, Read, Write};
use crate::initiator::{BASE, DATA, Initiator, NEXT, WRITE};
use crate::stamp::{self, Found, Stamp};
use crate::successor::Filter;
use crate::{BLOCK, seed};

const SIZE: u64 = 16 << 20;
/// The blocks that are used: enough that some are written for the first time all the while.
const BLOCKS: u64 = 2048;
/// Where half of the requests begin: in eight sectors, so that many meet in one.
const CROWDED: u64 = 64;
const LONGEST: u64 = 12;
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests of three descriptors in a ring of 16.
const SLOTS: u16 = 5;
const KILLS: usize = 10;
/// How long a filter may work on what it was asked for last before it is killed.
const LONGEST_PAUSE: Duration = Duration::from_micros(300);
const DISK: u64 = 0x6b69_6c6c;

const OK: u8 = 0;

/// What a slot has asked for and not been answered.
enum Asked {
    Write { index: usize, units: Range<u64> },
    Read { units: Range<u64>, asked: u64 },
}

struct Guest {
    driver: Initiator,
    random: fastrand::Rng,
    under_way: HashMap<u16, Asked>,
    history: History,
    failed: Failed,
}

/// How many requests failed.
#[derive(Default)]
struct Failed {
    reads: usize,
    writes: usize,
}

impl Guest {
    fn new(driver: Initiator, random: fastrand::Rng) -> Self {
        let history = History::new(vec![Found::Zeroes; BLOCKS as usize]);
        Self { driver, random, under_way: HashMap::new(), history, failed: Failed::default() }
    }

    fn data(head: u16) -> u64 {
        DATA + u64::from(head) * LONGEST * BLOCK as u64
    }

    /// Fills every free slot. No two writes under way have a block in common, as guests do it: a filter
    /// that replays them may do them in any order.
    fn fill(&mut self) {
        for head in (0..SLOTS).map(|slot| slot * 3) {
            let most = if self.random.bool() { CROWDED } else { BLOCKS };
            let first = self.random.u64(..most);
            let units = first..(first + self.random.u64(1..=LONGEST)).min(BLOCKS);
            let reads = self.random.u8(..3) == 0;
            let meets = |asked: &Asked| match asked {
                Asked::Write { units: other, .. } => {
                    !reads && units.start < other.end && other.start < units.end
                }
                Asked::Read { .. } => false,
            };
            if !self.under_way.contains_key(&head) && !self.under_way.values().any(meets) {
                self.ask(head, units, reads);
            }
        }
        self.driver.kick();
    }

    fn ask(&mut self, head: u16, units: Range<u64>, reads: bool) {
        let time = self.history.tick();
        let mut data = vec![0xee; (units.end - units.start) as usize * BLOCK];
        let asked = if reads {
            Asked::Read { units: units.clone(), asked: time }
        } else {
            let (index, sequence) = (self.history.writes.len(), time);
            for (unit, bytes) in units.clone().zip(data.chunks_mut(BLOCK)) {
                Stamp { disk: DISK, unit, sequence }.fill(bytes);
            }
            let (end, zeroes) = (End::Open, false);
            let write = Write { sequence, units: units.clone(), zeroes, asked: time, end };
            self.history.writes.push(write);
            Asked::Write { index, units: units.clone() }
        };
        let slot = u64::from(head);
        let (header, status) = (BASE + 0x3000 + slot * 32, BASE + 0x4000 + slot);
        let put = |bytes: &[u8], at| {
            self.driver.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        };
        put(&u32::from(!reads).to_le_bytes(), header);
        put(&units.start.to_le_bytes(), header + 8);
        put(&[0xff], status);
        put(&data, Self::data(head));
        let direction = if reads { WRITE } else { 0 };
        self.driver.describe(head, (header, 16, NEXT, head + 1));
        let memory = (Self::data(head), data.len() as u32, NEXT | direction, head + 2);
        self.driver.describe(head + 1, memory);
        self.driver.describe(head + 2, (status, 1, WRITE, 0));
        self.driver.offer(head);
        self.under_way.insert(head, asked);
    }

    /// Takes one answer; false if there is none for that long.
    fn answer(&mut self, patience: Duration) -> bool {
        let Some((head, _)) = self.driver.answer(patience) else { return false };
        let head = u16::try_from(head).unwrap();
        let asked = self.under_way.remove(&head).expect("an answer that nobody waits for");
        let status = GuestAddress(BASE + 0x4000 + u64::from(head));
        let status: u8 = self.driver.memory.read_obj(status).unwrap();
        let done = self.history.tick();
        let failed = match &asked {
            Asked::Write { .. } => &mut self.failed.writes,
            Asked::Read { .. } => &mut self.failed.reads,
        };
        *failed += usize::from(status != OK);
        match asked {
            Asked::Write { index, .. } => {
                let end = if status == OK { End::Done(done) } else { End::Failed(done) };
                self.history.writes[index].end = end;
            }
            Asked::Read { units, asked } if status == OK => {
                let mut data = vec![0; (units.end - units.start) as usize * BLOCK];
                let address = GuestAddress(Self::data(head));
                self.driver.memory.read_slice(&mut data, address).unwrap();
                let parts = units.clone().zip(data.chunks(BLOCK));
                let found = parts.map(|(unit, bytes)| stamp::find(bytes, DISK, unit)).collect();
                self.history.reads.push(Read { first: units.start, found, asked, done });
            }
            Asked::Read { .. } => {}
        }
        true
    }

    /// Has some answers, and asks for more.
    fn go_on(&mut self) {
        for _ in 0..self.random.usize(..120) {
            self.fill();
            assert!(self.answer(PATIENCE), "{} requests are lost", self.under_way.len());
        }
        self.fill();
    }

    fn finish(&mut self) {
        while !self.under_way.is_empty() {
            assert!(self.answer(PATIENCE), "{} requests are lost", self.under_way.len());
        }
    }

    /// All that is used, in parts that one request can have.
    fn parts() -> impl Iterator<Item = Range<u64>> {
        let part = |first: u64| first..(first + LONGEST).min(BLOCKS);
        (0..BLOCKS).step_by(LONGEST as usize).map(part)
    }

    /// Reads everything, until none of it fails.
    fn read_all(&mut self) {
        for units in Self::parts() {
            let reads = self.history.reads.len();
            while self.history.reads.len() == reads {
                self.ask_alone(units.clone(), true);
            }
        }
    }

    /// Writes everything: what was a hole is none any more.
    fn write_all(&mut self) {
        Self::parts().for_each(|units| self.ask_alone(units, false));
    }

    fn ask_alone(&mut self, units: Range<u64>, reads: bool) {
        self.ask(0, units, reads);
        self.driver.kick();
        self.finish();
    }
}

/// Where the disk rests.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rests {
    /// In a file on storage: requests are under way in the kernel when the filter dies.
    Storage,
    /// In a file in memory: a system call is under way, if anything.
    Memory,
    /// In a qcow2 image on storage, of small clusters: many are new.
    Qcow2,
}

impl Rests {
    fn directory(self) -> &'static Path {
        Path::new(if self == Self::Memory { "/dev/shm" } else { env!("CARGO_TARGET_TMPDIR") })
    }

    fn kind(self) -> &'static str {
        if self == Self::Qcow2 { "qcow2" } else { "file" }
    }

    fn make(self, disk: &Path) {
        if self != Self::Qcow2 {
            return File::create(disk).unwrap().set_len(SIZE).unwrap();
        }
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
        let made = Command::new("qemu-img").args(create).arg(disk).arg(SIZE.to_string()).status();
        assert!(made.unwrap().success());
    }

    /// Of a filter that was killed leaked clusters are left at worst, and now none.
    fn repair(self, disk: &Path) {
        if self == Self::Qcow2 {
            let (code, said) = qemu_img_check(disk, &[]);
            assert!(matches!(code, Some(0 | 3)), "{said}");
            qemu_img_check(disk, &["-r", "leaks"]);
            self.is_sound(disk);
        }
    }

    /// Nor does a filter leave any that ended in order.
    fn is_sound(self, disk: &Path) {
        if self == Self::Qcow2 {
            let (code, said) = qemu_img_check(disk, &[]);
            assert_eq!(code, Some(0), "{said}");
        }
    }
}

/// Its exit code, and all that it has to say but which clusters are leaked.
fn qemu_img_check(disk: &Path, options: &[&str]) -> (Option<i32>, String) {
    let check = [&["check", "-f", "qcow2"], options].concat();
    let checked = Command::new("qemu-img").args(check).arg(disk).output().unwrap();
    let said = [checked.stdout, checked.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let lines = said.lines().filter(|line| !line.starts_with("Leaked cluster "));
    (checked.status.code(), lines.collect::<Vec<_>>().join("\n"))
}

/// The chain, with the files that it names made in this directory.
fn in_place(chain: &Value, path: &Path) -> Value {
    let key = path.join("key");
    std::fs::write(&key, (0..64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    File::create(path.join("replica")).unwrap().set_len(SIZE).unwrap();
    File::create(path.join("map")).unwrap();
    let mut named = chain.to_string();
    for (word, name) in [("KEY", "key"), ("REPLICA", "replica"), ("MAP", "map")] {
        named = named.replace(word, path.join(name).to_str().unwrap());
    }
    serde_json::from_str(&named).unwrap()
}

/// Whether a rule of the chain has some of these operations fail.
fn fails(chain: &Value, operation: &str) -> bool {
    let rules = chain.as_array().unwrap().iter().filter_map(|link| link["rules"].as_array());
    let mut named = rules.flatten().flat_map(|rule| rule["operations"].as_array().unwrap());
    named.any(|named| named == operation)
}

/// Kills the filter again and again, and ends the last two in order; how many requests were under way then.
fn check(rests: Rests, name: &str, chain: &Value, random: fastrand::Rng) -> usize {
    let place = tempfile::tempdir_in(rests.directory()).unwrap();
    let path = place.path();
    rests.make(&path.join("disk"));
    let chain = in_place(chain, path);
    let (mut filter, socket) = Filter::start(path, rests.kind(), SIZE, &chain);
    let mut guest = Guest::new(Initiator::connect_with_record(socket, u64::MAX), random);
    if chain[0]["holes"] == "ciphertext" {
        // What was never written is noise there.
        guest.write_all();
    }
    let mut resumed = 0;
    for _ in 0..KILLS {
        guest.go_on();
        // Mostly short: a system call or two of a file in memory. A sleep would be longer than that.
        let (kicked, pause) = (Instant::now(), LONGEST_PAUSE / (1 << guest.random.u32(..9)));
        while kicked.elapsed() < pause {}
        filter.kill();
        while guest.answer(Duration::ZERO) {}
        resumed += guest.under_way.len();
        let socket;
        (filter, socket) = Filter::start(path, rests.kind(), SIZE, &chain);
        guest.driver.reconnect(socket);
    }
    guest.finish();
    let mut ended = vec![filter.end()];
    rests.repair(&path.join("disk"));
    let (filter, socket) = Filter::start(path, rests.kind(), SIZE, &chain);
    guest.driver.reconnect(socket);
    guest.go_on();
    guest.finish();
    guest.read_all();
    ended.push(filter.end());
    rests.is_sound(&path.join("disk"));
    let findings = guest.history.check();
    let log = std::fs::read_to_string(path.join("log")).unwrap();
    let first: Vec<_> = findings.iter().take(5).collect();
    assert!(first.is_empty(), "{rests:?}, {name}: {} wrong: {first:?}\n{log}", findings.len());
    assert!(!log.contains("not allowed"), "{rests:?}, {name}: {log}");
    let well = ended.iter().all(ExitStatus::success);
    assert!(well, "{rests:?}, {name}: {ended:?}\n{log}");
    let Failed { reads, writes } = guest.failed;
    let expected = (fails(&chain, "read"), fails(&chain, "write"));
    let failed = format!("{reads} reads and {writes} writes failed");
    assert_eq!((reads > 0, writes > 0), expected, "{rests:?}, {name}: {failed}");
    resumed
}

fn crypt() -> Value {
    json!({ "kind": "crypt", "key": { "path": "KEY" }, "holes": "zero" })
}

fn limit() -> Value {
    json!({ "kind": "limit", "requests": { "per_second": 20_000, "burst": 2 } })
}

fn delay() -> Value {
    json!({ "kind": "delay", "microseconds": 50, "jitter_microseconds": 200 })
}

fn cache() -> Value {
    json!({ "kind": "cache", "bytes": 1 << 20 })
}

fn replicate() -> Value {
    json!({
        "kind": "replicate", "replica": { "path": "REPLICA" }, "map": { "path": "MAP" },
        "bytes_per_second": 1_u64 << 30
    })
}

/// Errors of these operations, and torn writes.
fn fault(operations: &[&str]) -> Value {
    let errors =
        json!({ "operations": operations, "kind": { "is": "error", "errno": 5 }, "one_in": 20 });
    let torn = json!({ "operations": ["write"], "kind": { "is": "torn" }, "one_in": 20 });
    json!({ "kind": "fault", "seed": 1, "rules": [errors, torn] })
}

fn check_each(rests: Rests, chains: &[(&str, Value)]) {
    let mut random = fastrand::Rng::with_seed(seed());
    let mut in_all = 0;
    for (name, chain) in chains {
        let resumed = check(rests, name, chain, random.fork());
        println!("{rests:?}, {name}: {resumed} requests were under way when a filter was killed");
        in_all += resumed;
    }
    // A quick chain may have answered whatever it was asked each time; one that delays has not.
    assert!(in_all > 0, "no request was ever under way");
}

#[test]
fn a_filter_that_is_killed_over_a_file_loses_doubles_and_tears_nothing() {
    let full = json!({ "kind": "crypt", "key": { "path": "KEY" }, "holes": "ciphertext" });
    let chains = [
        ("plain", json!([])),
        ("crypt", json!([crypt()])),
        ("crypt without holes", json!([full])),
        ("limit, crypt", json!([limit(), crypt()])),
        ("crypt, delay", json!([crypt(), delay()])),
        ("fault, crypt", json!([fault(&["write"]), crypt()])),
        ("crypt, replicate", json!([crypt(), replicate()])),
        ("crypt, cache", json!([crypt(), cache()])),
        (
            "crypt, cache, delay, fault",
            json!([crypt(), cache(), delay(), fault(&["read", "write"])]),
        ),
    ];
    check_each(Rests::Storage, &chains);
}

#[test]
fn a_filter_that_is_killed_over_a_file_in_memory_loses_doubles_and_tears_nothing() {
    let directory = Rests::Memory.directory();
    if !statfs(directory).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC) {
        // Not by a macro, whose words the harness keeps to itself when a test passes.
        let message = "skipped: /dev/shm is no tmpfs, so no file in memory is tried here\n";
        return std::io::stderr().write_all(message.as_bytes()).unwrap();
    }
    let chains = [
        ("plain", json!([])),
        ("fault, crypt, delay", json!([fault(&["write"]), crypt(), delay()])),
        ("crypt, cache", json!([crypt(), cache()])),
        ("limit, crypt, cache, replicate", json!([limit(), crypt(), cache(), replicate()])),
    ];
    check_each(Rests::Memory, &chains);
}

#[test]
fn a_filter_that_is_killed_over_a_qcow2_image_loses_doubles_and_tears_nothing() {
    let chains = [
        ("plain", json!([])),
        ("crypt, cache", json!([crypt(), cache()])),
        ("crypt, replicate", json!([crypt(), replicate()])),
        ("limit, crypt, cache, replicate", json!([limit(), crypt(), cache(), replicate()])),
        (
            "crypt, cache, delay, fault",
            json!([crypt(), cache(), delay(), fault(&["read", "write"])]),
        ),
    ];
    check_each(Rests::Qcow2, &chains);
}
