//! A guest that has several requests of every kind in flight, in parts of sectors, and keeps the history of them.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};
use vmseal_initiator::driver::{BASE, DATA, Driver, NEXT, WRITE};

use crate::history::BLOCK;
use crate::history::checker::{End, History, Read, Write};
use crate::history::stamp::{self, Found, Stamp};

/// The blocks that are used: enough that some are written for the first time throughout.
const BLOCKS: u64 = 2048;
/// The same, in bytes.
pub const USED: u64 = BLOCKS * BLOCK as u64;
/// The range where half of the requests begin: eight sectors, so that many meet in one.
const CROWDED: u64 = 64;
/// The length that most requests do not exceed: otherwise all of them would meet.
const SHORT: u64 = 12;
/// Five sectors: a torn write of this length is torn after some of them.
const LONGEST: u64 = 40;
const TIMEOUT: Duration = Duration::from_secs(30);
/// Requests of three descriptors in a ring of 16.
const SLOTS: u16 = 5;
const DISK: u64 = 0x6b69_6c6c;

const OK: u8 = 0;

/// The numbers of virtio 1.2, 5.2.6.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Read = 0,
    Write = 1,
    Flush = 4,
    Discard = 11,
    WriteZeroes = 13,
}

/// A request that is not answered yet.
struct Asked {
    kind: Kind,
    units: Range<u64>,
    /// When.
    at: u64,
    /// The index of its write in the history, if it changes anything.
    index: Option<usize>,
}

impl Asked {
    fn meets(&self, kind: Kind, units: &Range<u64>) -> bool {
        let changes = |kind| !matches!(kind, Kind::Read | Kind::Flush);
        changes(self.kind)
            && changes(kind)
            && units.start < self.units.end
            && self.units.start < units.end
    }
}

pub struct Guest {
    pub driver: Driver,
    pub history: History,
    pub failed: Failed,
    random: fastrand::Rng,
    under_way: HashMap<u16, Asked>,
    /// The sequence number of the last write, in this history and those before it.
    sequence: u64,
}

/// How many requests failed.
#[derive(Default)]
pub struct Failed {
    pub reads: usize,
    pub others: usize,
}

impl Guest {
    pub fn new(driver: Driver, random: fastrand::Rng) -> Self {
        let history = History::new(vec![Found::Zeroes; BLOCKS as usize]);
        let (failed, under_way) = (Failed::default(), HashMap::new());
        Self { driver, random, history, failed, under_way, sequence: 0 }
    }

    /// Starts again with this driver and nothing in flight. Returns the history so far, and the
    /// content of its disk, with which a new one begins.
    pub fn reboot(&mut self, driver: Driver) -> (History, Vec<Found>) {
        self.driver = driver;
        self.under_way.clear();
        let tears_beside_writes = self.history.tears_beside_writes;
        let before = std::mem::replace(&mut self.history, History::new(Vec::new()));
        self.read_all();
        let found: Vec<_> =
            self.history.reads.drain(..).flat_map(|read: Read| read.found).collect();
        self.history = History::new(found.clone());
        self.history.tears_beside_writes = tears_beside_writes;
        (before, found)
    }

    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    fn data(head: u16) -> u64 {
        DATA + u64::from(head) * LONGEST * BLOCK as u64
    }

    /// Fills every free slot. No two changes in flight have a block in common, as with real guests: a filter
    /// that replays them may do them in any order.
    fn fill(&mut self) {
        for head in (0..SLOTS).map(|slot| slot * 3) {
            let most = if self.random.bool() { CROWDED } else { BLOCKS };
            let first = self.random.u64(..most);
            let longest = if self.random.u8(..4) == 0 { LONGEST } else { SHORT };
            let units = first..(first + self.random.u64(1..=longest)).min(BLOCKS);
            let kind = match self.random.u8(..24) {
                0..8 => Kind::Read,
                8..20 => Kind::Write,
                20..22 => Kind::WriteZeroes,
                22 => Kind::Discard,
                _ => Kind::Flush,
            };
            let free = !self.under_way.contains_key(&head);
            if free && !self.under_way.values().any(|asked| asked.meets(kind, &units)) {
                self.ask(head, kind, units);
            }
        }
        self.driver.kick();
    }

    fn ask(&mut self, head: u16, kind: Kind, units: Range<u64>) {
        let at = self.history.tick();
        let index = match kind {
            Kind::Read | Kind::Flush => None,
            Kind::Write | Kind::WriteZeroes | Kind::Discard => {
                let (zeroes, units) = (kind != Kind::Write, units.clone());
                self.sequence += 1;
                let (sequence, end) = (self.sequence, End::Open);
                let write = Write { sequence, units, zeroes, asked: at, end };
                self.history.writes.push(write);
                Some(self.history.writes.len() - 1)
            }
        };
        let data = content(kind, &units, self.sequence);
        let slot = u64::from(head);
        let (header, status) = (BASE + 0x3000 + slot * 32, BASE + 0x4000 + slot);
        let put = |bytes: &[u8], at| {
            self.driver.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        };
        put(&(kind as u32).to_le_bytes(), header);
        // For other operations this field has no meaning (5.2.6).
        let sector = if matches!(kind, Kind::Read | Kind::Write) { units.start } else { 0 };
        put(&sector.to_le_bytes(), header + 8);
        put(&[0xff], status);
        put(&data, Self::data(head));
        let direction = if kind == Kind::Read { WRITE } else { 0 };
        let next = if data.is_empty() { head + 2 } else { head + 1 };
        self.driver.describe(head, (header, 16, NEXT, next));
        let memory = (Self::data(head), data.len() as u32, NEXT | direction, head + 2);
        self.driver.describe(head + 1, memory);
        self.driver.describe(head + 2, (status, 1, WRITE, 0));
        self.driver.offer(head);
        self.under_way.insert(head, Asked { kind, units, at, index });
    }

    /// Takes one answer; false if there is none within the timeout.
    pub fn answer(&mut self, timeout: Duration) -> bool {
        let Some((head, _)) = self.driver.answer(timeout) else { return false };
        let head = u16::try_from(head).unwrap();
        let asked = self.under_way.remove(&head).expect("an answer that nobody waits for");
        let status = GuestAddress(BASE + 0x4000 + u64::from(head));
        let status: u8 = self.driver.memory.read_obj(status).unwrap();
        let done = self.history.tick();
        if status != OK {
            let Failed { reads, others } = &mut self.failed;
            *if asked.kind == Kind::Read { reads } else { others } += 1;
        }
        if let Some(index) = asked.index {
            // A discard is a hint: each block is zeroes then, or what it was.
            let all = status == OK && asked.kind != Kind::Discard;
            let end = if all { End::Done(done) } else { End::Failed(done) };
            self.history.writes[index].end = end;
        }
        match asked.kind {
            Kind::Read if status == OK => self.note_read(head, asked, done),
            Kind::Flush if status == OK => self.history.flushes.push(asked.at),
            _ => {}
        }
        true
    }

    fn note_read(&mut self, head: u16, asked: Asked, done: u64) {
        let Asked { units, at, .. } = asked;
        let mut data = vec![0; bytes(&units)];
        self.driver.memory.read_slice(&mut data, GuestAddress(Self::data(head))).unwrap();
        let parts = units.clone().zip(data.chunks(BLOCK));
        let found = parts.map(|(unit, bytes)| stamp::find(bytes, DISK, unit)).collect();
        self.history.reads.push(Read { first: units.start, found, asked: at, done });
    }

    /// Takes some answers, and submits more.
    pub fn go_on(&mut self) {
        for _ in 0..self.random.usize(..120) {
            self.fill();
            assert!(self.answer(TIMEOUT), "{} requests are lost", self.under_way());
        }
        self.fill();
    }

    pub fn finish(&mut self) {
        while !self.under_way.is_empty() {
            assert!(self.answer(TIMEOUT), "{} requests are lost", self.under_way());
        }
    }

    /// The whole used range, in parts of one request each.
    fn parts() -> impl Iterator<Item = Range<u64>> {
        let part = |first: u64| first..(first + SHORT).min(BLOCKS);
        (0..BLOCKS).step_by(SHORT as usize).map(part)
    }

    /// Reads everything.
    pub fn read_all(&mut self) {
        Self::parts().for_each(|units| self.insist(Kind::Read, &units));
    }

    /// Writes everything: no hole is left.
    pub fn write_all(&mut self) {
        Self::parts().for_each(|units| self.insist(Kind::Write, &units));
    }

    /// Repeats this request alone until it does not fail.
    fn insist(&mut self, kind: Kind, units: &Range<u64>) {
        let failed = |guest: &Self| guest.failed.reads + guest.failed.others;
        loop {
            let before = failed(self);
            self.ask(0, kind, units.clone());
            self.driver.kick();
            self.finish();
            if failed(self) == before {
                return;
            }
        }
    }
}

fn bytes(units: &Range<u64>) -> usize {
    (units.end - units.start) as usize * BLOCK
}

/// The buffer of a request when it is submitted.
fn content(kind: Kind, units: &Range<u64>, sequence: u64) -> Vec<u8> {
    match kind {
        Kind::Flush => Vec::new(),
        // Neither zeroes nor a stamp.
        Kind::Read => vec![0xee; bytes(units)],
        Kind::Write => {
            let mut data = vec![0; bytes(units)];
            for (unit, bytes) in units.clone().zip(data.chunks_mut(BLOCK)) {
                Stamp { disk: DISK, unit, sequence }.fill(bytes);
            }
            data
        }
        Kind::WriteZeroes | Kind::Discard => {
            // A segment: first sector, sectors, flags, where write-zeroes may unmap.
            let unmap = u32::from(kind == Kind::WriteZeroes && sequence.is_multiple_of(2));
            let length = (units.end - units.start) as u32;
            let words = [&units.start.to_le_bytes()[..], &length.to_le_bytes()];
            [words.concat(), unmap.to_le_bytes().to_vec()].concat()
        }
    }
}
