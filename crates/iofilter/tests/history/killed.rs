//! The program, killed at any instant under a guest that reads while it writes, in parts of sectors, and
//! started again: what was answered is there, once, and the guest sees a pause.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use serde_json::{Value, json};
use vm_memory::{Bytes, GuestAddress};

use crate::checker::{End, History, Read, Write};
use crate::initiator::{BASE, DATA, Initiator, NEXT, WRITE};
use crate::stamp::{self, Found, Stamp};
use crate::successor::Filter;
use crate::{BLOCK, seed};

const SIZE: u64 = 16 << 20;
/// The blocks that are used: eight sectors, so that many requests meet in one.
const BLOCKS: u64 = 64;
const LONGEST: u64 = 12;
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests of three descriptors in a ring of 16.
const SLOTS: u16 = 5;
const KILLS: usize = 10;
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
    failed: usize,
}

impl Guest {
    fn data(head: u16) -> u64 {
        DATA + u64::from(head) * LONGEST * BLOCK as u64
    }

    /// Fills every free slot. No two writes under way have a block in common, as guests do it: a filter
    /// that replays them may do them in any order.
    fn fill(&mut self) {
        for head in (0..SLOTS).map(|slot| slot * 3) {
            let first = self.random.u64(..BLOCKS);
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
        self.failed += usize::from(status != OK);
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

    fn finish(&mut self) {
        while !self.under_way.is_empty() {
            assert!(self.answer(PATIENCE), "{} requests are lost", self.under_way.len());
        }
    }

    /// Reads everything, until none of it fails.
    fn read_all(&mut self) {
        for first in (0..BLOCKS).step_by(LONGEST as usize) {
            let reads = self.history.reads.len();
            while self.history.reads.len() == reads {
                self.ask(0, first..(first + LONGEST).min(BLOCKS), true);
                self.driver.kick();
                self.finish();
            }
        }
    }
}

/// Kills the filter again and again; how many requests were under way then.
fn check(name: &str, chain: &Value, random: fastrand::Rng) -> usize {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = place.path();
    File::create(path.join("disk")).unwrap().set_len(SIZE).unwrap();
    let key = path.join("key");
    std::fs::write(&key, (0..64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    File::create(path.join("replica")).unwrap().set_len(SIZE).unwrap();
    File::create(path.join("map")).unwrap();
    let mut named = chain.to_string().replace("KEY", key.to_str().unwrap());
    for (word, name) in [("REPLICA", "replica"), ("MAP", "map")] {
        named = named.replace(word, path.join(name).to_str().unwrap());
    }
    let chain: Value = serde_json::from_str(&named).unwrap();
    let (mut filter, socket) = Filter::start(path, "file", SIZE, &chain);
    let driver = Initiator::connect_with_record(socket, u64::MAX);
    let history = History::new(vec![Found::Zeroes; BLOCKS as usize]);
    let mut guest = Guest { driver, random, under_way: HashMap::new(), history, failed: 0 };
    let mut resumed = 0;
    for _ in 0..KILLS {
        for _ in 0..guest.random.usize(..120) {
            guest.fill();
            assert!(guest.answer(PATIENCE), "{} requests are lost", guest.under_way.len());
        }
        guest.fill();
        std::thread::sleep(Duration::from_micros(guest.random.u64(..300)));
        filter.kill();
        while guest.answer(Duration::ZERO) {}
        resumed += guest.under_way.len();
        let socket;
        (filter, socket) = Filter::start(path, "file", SIZE, &chain);
        guest.driver.reconnect(socket);
    }
    guest.finish();
    guest.read_all();
    let findings = guest.history.check();
    let log = std::fs::read_to_string(path.join("log")).unwrap();
    assert!(findings.is_empty(), "{name}: {findings:?}\n{log}");
    assert!(!log.contains("not allowed"), "{name}: {log}");
    let faulty = chain.to_string().contains("fault");
    assert_eq!(guest.failed > 0, faulty, "{name}: {} requests failed", guest.failed);
    resumed
}

#[test]
fn a_filter_that_is_killed_loses_doubles_and_tears_nothing() {
    let crypt = json!({ "kind": "crypt", "key": { "path": "KEY" }, "holes": "zero" });
    let limit = json!({ "kind": "limit", "requests": { "per_second": 20_000, "burst": 2 } });
    let delay = json!({ "kind": "delay", "microseconds": 50, "jitter_microseconds": 200 });
    let errors =
        json!({ "operations": ["write"], "kind": { "is": "error", "errno": 5 }, "one_in": 20 });
    let torn = json!({ "operations": ["write"], "kind": { "is": "torn" }, "one_in": 20 });
    let fault = json!({ "kind": "fault", "seed": 1, "rules": [errors, torn] });
    let replicate = json!({
        "kind": "replicate", "replica": { "path": "REPLICA" }, "map": { "path": "MAP" },
        "bytes_per_second": 1_u64 << 30
    });
    let chains = [
        ("plain", json!([])),
        ("crypt", json!([crypt])),
        ("limit, crypt", json!([limit, crypt])),
        ("crypt, delay", json!([crypt, delay])),
        ("fault, crypt", json!([fault, crypt])),
        ("crypt, replicate", json!([crypt, replicate])),
    ];
    let mut random = fastrand::Rng::with_seed(seed());
    let mut in_all = 0;
    for (name, chain) in chains {
        let resumed = check(name, &chain, random.fork());
        println!("{name}: {resumed} requests were under way when a filter was killed");
        in_all += resumed;
    }
    // A quick chain may have answered whatever it was asked each time; one that delays has not.
    assert!(in_all > 0, "no request was ever under way");
}
