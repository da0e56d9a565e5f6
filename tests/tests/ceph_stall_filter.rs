//! A disk whose requests fail while storage does not answer, on a real Ceph cluster whose OSDs stand still: what is in flight fails while
//! they do, the disk serves again by itself, and no write that has failed lands after one that was acknowledged later. So it is also where
//! the filter dies meanwhile. A client that writes each block again after an error says so by its history.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ops::Range;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmseal_api::filter::{Holes, StallSpec};
use vmseal_api::rbd::{MOUNTED_ATTRIBUTE, Mounted};
use vmseal_history::checker::{End, History, Read, Write};
use vmseal_history::stamp::{self, Found, Stamp};
use vmseal_initiator::{Completion, Initiator, Operation, VhostUser, Wait};
use vmseal_secret::SecretBytes;
use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_pool::Pool;
use vmseal_tests::eventually;
use vmseal_tests::filter::{Disk, Filter};
use vmseal_tests::held_steps::seeded;

use crate::ceph_files::{Mount, attribute, make};

/// What the client writes at once, or finds.
const UNIT: usize = 4096;

/// Few, so that most requests overlap with others.
const UNITS: u64 = 64;

/// Where they are on the disk: in two objects of the image, which may be on different OSDs.
const AT: u64 = (4 << 20) - UNITS / 2 * UNIT as u64;

const SIZE: u64 = 8 << 20;

/// Where the disk is in its image, as with a header of LUKS2.
const OFFSET: u64 = 16 << 20;

/// The most units of a request of the load.
const REQUEST_MAX: u64 = 8;

/// How many requests are in flight.
const DEPTH: u16 = 8;

/// From so many failed writes on nothing else is asked. While the disk fails they would become more and more, and in the end each is
/// written again alone.
const AGAIN_MAX: usize = 32;

/// The number of the disk in its stamps.
const DISK: u64 = 0x6365_7068;

/// The least that a policy may say.
const STALL: StallSpec = StallSpec { milliseconds: 5000 };

/// What the client does between two looks at the filter's status.
const STEPS: usize = 20;

enum Asked {
    Write(usize),
    Read { units: Range<u64>, asked: u64 },
    Flush,
}

/// A client of the disk, which writes again what has failed.
struct Client {
    disk: VhostUser,
    in_flight: Vec<Option<Asked>>,
    history: History,
    /// What has failed, and is to be written again.
    again: Vec<Range<u64>>,
    random: fastrand::Rng,
    answered: u64,
    failed: u64,
    /// Whether the last flush was done.
    flushed: bool,
}

fn connected(filter: &Filter) -> VhostUser {
    let all = u32::try_from(UNITS as usize * UNIT).unwrap();
    // Its socket is there a moment before it listens.
    let connect = || VhostUser::connect(filter.socket(), DEPTH, all, Wait::Sleep).ok();
    eventually("the filter takes a connection", connect).unwrap()
}

impl Client {
    fn new(filter: &Filter) -> Self {
        Self {
            disk: connected(filter),
            in_flight: (0..DEPTH).map(|_| None).collect(),
            history: History::new(vec![Found::Zeroes; UNITS as usize]),
            again: Vec::new(),
            random: seeded(),
            answered: 0,
            failed: 0,
            flushed: false,
        }
    }

    fn free(&self) -> Option<usize> {
        self.in_flight.iter().position(Option::is_none)
    }

    fn submit(&mut self, slot: usize, operation: Operation, units: &Range<u64>, asked: Asked) {
        let length = (units.end - units.start) as usize * UNIT;
        // A flush has none, and no place.
        let offset = if length == 0 { 0 } else { AT + units.start * UNIT as u64 };
        self.disk.submit(slot as u16, operation, offset, length as u32);
        self.in_flight[slot] = Some(asked);
        self.disk.publish().unwrap();
    }

    fn write(&mut self, slot: usize, units: Range<u64>) {
        let sequence = self.history.tick();
        let mut data = vec![0; (units.end - units.start) as usize * UNIT];
        for (unit, bytes) in units.clone().zip(data.chunks_mut(UNIT)) {
            Stamp { disk: DISK, unit, sequence }.fill(bytes);
        }
        self.disk.fill(slot as u16, &data);
        let index = self.history.writes.len();
        let write = Write {
            sequence,
            units: units.clone(),
            zeroes: false,
            asked: sequence,
            end: End::Open,
        };
        self.history.writes.push(write);
        self.submit(slot, Operation::Write, &units, Asked::Write(index));
    }

    fn read(&mut self, slot: usize, units: Range<u64>) {
        let asked = self.history.tick();
        self.submit(slot, Operation::Read, &units.clone(), Asked::Read { units, asked });
    }

    /// Submits a request, if there is room for one, and takes the answers that have come.
    fn step(&mut self) {
        if let Some(slot) = self.free() {
            let first = self.random.u64(..UNITS);
            let some = first..(first + self.random.u64(1..=REQUEST_MAX)).min(UNITS);
            let is_full = self.again.len() >= AGAIN_MAX;
            if is_full || (!self.again.is_empty() && self.random.bool()) {
                let failed = self.again.remove(0);
                self.write(slot, failed);
            } else if self.random.u8(..4) == 0 {
                self.read(slot, some);
            } else {
                self.write(slot, some);
            }
        }
        self.take();
    }

    fn take(&mut self) {
        let mut completions = Vec::new();
        self.disk.reap(&mut completions).unwrap();
        for Completion { slot, status } in completions {
            let asked = self.in_flight[usize::from(slot)].take().expect("it is in flight");
            let (now, is_done) = (self.history.tick(), status == 0);
            self.answered += 1;
            self.failed += u64::from(!is_done);
            match asked {
                Asked::Write(index) => {
                    let write = &mut self.history.writes[index];
                    write.end = if is_done { End::Done(now) } else { End::Failed(now) };
                    if !is_done {
                        self.again.push(write.units.clone());
                    }
                }
                Asked::Read { units, asked } if is_done => {
                    let mut bytes = vec![0; (units.end - units.start) as usize * UNIT];
                    self.disk.copy(slot, &mut bytes);
                    let of_units = units.clone().zip(bytes.chunks(UNIT));
                    let found = of_units.map(|(unit, bytes)| stamp::find(bytes, DISK, unit));
                    let (first, found) = (units.start, found.collect());
                    self.history.reads.push(Read { first, found, asked, done: now });
                }
                Asked::Read { .. } => {}
                Asked::Flush => self.flushed = is_done,
            }
        }
    }

    /// Reads and writes until something is so.
    fn works_until(&mut self, what: &str, so: impl Fn(&Self) -> bool) {
        eventually(what, || {
            (0..STEPS).for_each(|_| self.step());
            so(self).then_some(())
        })
        .unwrap();
    }

    /// Waits until all that is in flight is answered.
    fn rests(&mut self, what: &str) {
        eventually(what, || {
            self.take();
            self.in_flight.iter().all(Option::is_none).then_some(())
        })
        .unwrap();
    }

    /// Flushes, with nothing else in flight; whether that is done.
    fn flush(&mut self) -> bool {
        self.rests("all is answered before a flush");
        self.submit(0, Operation::Flush, &(0..0), Asked::Flush);
        self.rests("a flush is answered");
        self.flushed
    }

    /// Writes all that has failed until it is done, flushes, and finds that what the disk has can be.
    fn finds_nothing_wrong(&mut self) {
        self.rests("all is answered");
        eventually("all is written again", || {
            for units in std::mem::take(&mut self.again) {
                self.write(0, units);
                self.rests("a write is answered");
            }
            self.again.is_empty().then_some(())
        })
        .unwrap();
        eventually("a flush is done", || self.flush().then_some(())).unwrap();
        let before = self.history.reads.len();
        eventually("all is read", || {
            self.read(0, 0..UNITS);
            self.rests("a read is answered");
            (self.history.reads.len() > before).then_some(())
        })
        .unwrap();
        let found = self.history.check();
        let first = found.first().map(|it| self.history.of_unit(it.unit));
        assert!(found.is_empty(), "{} wrong: {:?}\n{first:?}", found.len(), found[0]);
    }
}

#[test]
fn no_write_that_failed_lands_later_when_osds_that_stood_still_go_on() {
    if !is_installed() {
        return;
    }
    let pool = Pool::of_own_cluster("crc", false);
    let mount = Mount::new(&pool);
    let stop = || pool.cluster.stop_daemons("osd.");
    let socket = channel(&mount);
    fails_and_serves_again(&mount, "shared-memory", Some(socket.as_path()), stop, || ());
    fails_and_serves_again(&mount, "files", None, stop, || ());
}

/// The socket at which filters get to images of a mount without their files.
pub(crate) fn channel(mount: &Mount) -> PathBuf {
    let mounted = attribute(&mount.path(""), MOUNTED_ATTRIBUTE).unwrap();
    let mounted: Mounted = serde_json::from_str(&mounted).unwrap();
    mounted.channel.expect("it has a socket").into()
}

/// Twice the cluster does not answer: from when `silence` is called until what it returns is dropped. In between, `meanwhile` is called the
/// first time, and the filter is killed the second time.
pub(crate) fn fails_and_serves_again<Silence>(
    mount: &Mount,
    name: &str,
    channel: Option<&Path>,
    silence: impl Fn() -> Silence,
    meanwhile: impl FnOnce(),
) {
    let image = mount.path(name);
    make(&image).unwrap().set_len(OFFSET + SIZE).unwrap();
    let home = tempfile::tempdir().unwrap();
    let dek = SecretBytes::random(64).unwrap();
    let (offset, size, dek) = (OFFSET, SIZE, Some(&dek));
    let (holes, stall) = (Holes::Zero, Some(STALL));
    let disk = Disk { image: &image, offset, size, dek, holes, stall, channel };
    let filter = Filter::start(home.path(), &disk).unwrap();
    let mut client = Client::new(&filter);
    client.works_until("requests are answered", |client| client.answered >= 200);
    assert_eq!(client.failed, 0, "{name}: the cluster is well");

    let silent = silence();
    client.works_until("requests fail", |_| fails(&filter) == Some(true));
    client.rests("what was in flight has failed");
    assert!(client.failed > 0, "{name}: nothing was in flight");
    fail_at_once(&mut client, &filter, name);
    meanwhile();
    drop(silent);
    client.works_until("the disk serves again", |_| fails(&filter) == Some(false));
    assert!(!client.flush(), "{name}: a flush hides that writes have failed");
    client.finds_nothing_wrong();

    let silent = silence();
    client.works_until("requests fail again", |_| fails(&filter) == Some(true));
    client.rests("what was in flight has failed again");
    // Where data goes through files it may not end before the cluster answers.
    kill(Pid::from_raw(filter.id()), Signal::SIGKILL).unwrap();
    drop(silent);
    filter.kill();
    // Nobody serves it before its former filter's requests have ended: till then its lock is held.
    let next = eventually("another filter serves it", || Filter::start(home.path(), &disk).ok());
    let next = next.unwrap();
    client.disk = connected(&next);
    client.works_until("what has failed is written again", |client| client.again.is_empty());
    client.finds_nothing_wrong();
    drop(client);
    next.stop().unwrap();
}

/// Whether requests of the disk fail; none if the filter does not say.
fn fails(filter: &Filter) -> Option<bool> {
    filter.status().map(|status| status.disks[0].fails)
}

/// What comes while requests fail does so itself, though storage does not answer.
fn fail_at_once(client: &mut Client, filter: &Filter, name: &str) {
    let (answered, failed) = (client.answered, client.failed);
    (0..STEPS).for_each(|_| client.step());
    client.rests("what came later has failed");
    assert!(client.answered > answered, "{name}: nothing was asked");
    assert_eq!(client.answered - answered, client.failed - failed, "{name}");
    assert_eq!(fails(filter), Some(true), "{name}: it serves before storage has answered");
}
