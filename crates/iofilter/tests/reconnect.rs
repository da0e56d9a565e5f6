//! A filter that is killed at any instant, and another one in its place: the guest sees a pause, and no
//! request is lost or answered twice.

#![allow(clippy::unwrap_used)] // a test

mod initiator;
mod seed;
mod successor;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use initiator::{BASE, DATA, Initiator, NEXT, WRITE};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use serde_json::{Value, json};
use successor::Filter;
use vm_memory::{Bytes, GuestAddress};

const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests of three descriptors in a ring of 16.
const SLOTS: usize = 5;
const KILLS: usize = 25;
/// How long a filter may work on what it was asked for last before it is killed.
const LONGEST_PAUSE: Duration = Duration::from_micros(300);

/// Where the disk rests.
#[derive(Clone, Copy, PartialEq)]
enum Rests {
    File,
    Qcow2,
}

impl Rests {
    /// How many blocks the guest uses: in a qcow2 image, enough for new clusters all the while.
    fn blocks(self) -> u64 {
        if self == Self::Qcow2 { 2048 } else { 64 }
    }

    fn make(self, at: &Path) {
        if self == Self::File {
            return File::create(at).unwrap().set_len(SIZE).unwrap();
        }
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
        let made = Command::new("qemu-img").args(create).arg(at).arg(SIZE.to_string()).status();
        assert!(made.unwrap().success());
    }

    fn backend(self) -> Value {
        json!({ "kind": if self == Self::Qcow2 { "qcow2" } else { "file" }, "offset": 0 })
    }

    /// A killed filter leaves leaked clusters at worst.
    fn check(self, at: &Path) {
        self.checked(at, &["check", "-f", "qcow2"], &[0, 3]);
    }

    /// They stay there until they are asked for, and are all that there is to mend.
    fn mend(self, at: &Path) {
        self.checked(at, &["check", "-f", "qcow2", "-r", "leaks"], &[0]);
        self.checked(at, &["check", "-f", "qcow2"], &[0]);
    }

    fn checked(self, at: &Path, how: &[&str], allowed: &[i32]) {
        if self == Self::Qcow2 {
            let check = Command::new("qemu-img").args(how).arg(at).output();
            let check = check.unwrap();
            let said = String::from_utf8_lossy(&check.stderr);
            assert!(check.status.code().is_some_and(|code| allowed.contains(&code)), "{said}");
        }
    }
}

/// What a slot has asked for and not been answered.
#[derive(Clone, Copy, Debug)]
struct Asked {
    block: u64,
    /// The stamp that is written; none: it is read.
    stamp: Option<u64>,
}

/// A guest that writes stamped blocks and checks each block that it reads.
struct Load {
    guest: Initiator,
    random: TestRng,
    under_way: HashMap<u16, Asked>,
    /// The stamp of the last write of a block that was answered.
    stamps: Vec<u64>,
    next: u64,
    answered: u64,
}

/// The content of a block: its place and stamp, over and over.
fn content(block: u64, stamp: u64) -> Vec<u8> {
    if stamp == 0 {
        return vec![0; BLOCK as usize];
    }
    [block.to_le_bytes(), stamp.to_le_bytes()].concat().repeat(BLOCK as usize / 16)
}

impl Load {
    fn pick(&mut self, below: u64) -> u64 {
        self.random.next_u64() % below
    }

    fn data(head: u16) -> u64 {
        DATA + u64::from(head) * BLOCK
    }

    /// Fills every free slot; no two requests under way have a block in common.
    fn fill(&mut self) {
        for slot in 0..SLOTS as u16 {
            let head = slot * 3;
            let block = self.pick(self.stamps.len() as u64);
            let busy = self.under_way.values().any(|asked| asked.block == block);
            if busy || self.under_way.contains_key(&head) {
                continue;
            }
            let stamp = (self.pick(3) > 0).then_some(self.next);
            self.next += 1;
            self.ask(head, Asked { block, stamp });
        }
        self.guest.kick();
    }

    fn ask(&mut self, head: u16, asked: Asked) {
        let (header, status) =
            (BASE + 0x3000 + u64::from(head) * 32, BASE + 0x4000 + u64::from(head));
        let kind = u32::from(asked.stamp.is_some());
        let put = |bytes: &[u8], at: u64| {
            self.guest.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        };
        put(&kind.to_le_bytes(), header);
        put(&(asked.block * BLOCK / 512).to_le_bytes(), header + 8);
        put(&[0xff], status);
        let data =
            asked.stamp.map_or(vec![0xee; BLOCK as usize], |stamp| content(asked.block, stamp));
        put(&data, Self::data(head));
        let writes = if asked.stamp.is_none() { WRITE } else { 0 };
        self.guest.describe(head, (header, 16, NEXT, head + 1));
        self.guest.describe(head + 1, (Self::data(head), BLOCK as u32, NEXT | writes, head + 2));
        self.guest.describe(head + 2, (status, 1, WRITE, 0));
        self.guest.offer(head);
        self.under_way.insert(head, asked);
    }

    /// Takes one answer and checks it; false if there is none for that long.
    fn answer(&mut self, patience: Duration) -> bool {
        let Some((head, _)) = self.guest.answer(patience) else { return false };
        let head = u16::try_from(head).unwrap();
        let asked = self.under_way.remove(&head).expect("an answer that nobody waits for");
        let status: u8 =
            self.guest.memory.read_obj(GuestAddress(BASE + 0x4000 + u64::from(head))).unwrap();
        assert_eq!(status, 0, "{asked:?}");
        match asked.stamp {
            Some(stamp) => self.stamps[asked.block as usize] = stamp,
            None => {
                let mut read = vec![0; BLOCK as usize];
                self.guest.memory.read_slice(&mut read, GuestAddress(Self::data(head))).unwrap();
                let expected = content(asked.block, self.stamps[asked.block as usize]);
                assert!(read == expected, "block {} is not as it was written", asked.block);
            }
        }
        self.answered += 1;
        true
    }

    fn finish(&mut self) {
        while !self.under_way.is_empty() {
            assert!(self.answer(PATIENCE), "lost: {:?}", self.under_way);
        }
    }
}

#[test]
fn no_request_is_lost_or_answered_twice_when_the_filter_is_killed() {
    killed_and_replaced(Rests::File);
}

#[test]
fn a_qcow2_image_is_sound_and_no_request_is_lost_when_the_filter_is_killed() {
    killed_and_replaced(Rests::Qcow2);
}

fn killed_and_replaced(rests: Rests) {
    let seed = seed::seed();
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path: PathBuf = place.path().into();
    std::fs::write(path.join("key"), (0..64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(path.join("key"), PermissionsExt::from_mode(0o600)).unwrap();
    rests.make(&path.join("disk"));

    let chain = json!([{ "kind": "crypt", "key": { "path": path.join("key") }, "holes": "zero" }]);
    let (mut filter, socket) = Filter::start(&path, &rests.backend(), SIZE, &chain);
    let guest = Initiator::connect_with_record(socket, u64::MAX);
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed.to_le_bytes().repeat(4));
    let (under_way, stamps) = (HashMap::new(), vec![0; rests.blocks() as usize]);
    let mut load = Load { guest, random, under_way, stamps, next: 1, answered: 0 };
    let mut resumed = 0;
    for _ in 0..KILLS {
        let rounds = load.pick(200);
        for _ in 0..rounds {
            load.fill();
            assert!(load.answer(PATIENCE), "lost: {:?}", load.under_way);
        }
        load.fill();
        // Not slept: that is longer than what it was asked for takes.
        let (kicked, pause) = (Instant::now(), LONGEST_PAUSE / (1 << load.pick(9)));
        while kicked.elapsed() < pause {
            std::hint::spin_loop();
        }
        filter.kill();
        while load.answer(Duration::ZERO) {}
        rests.check(&path.join("disk"));
        resumed += load.under_way.len();
        let socket;
        (filter, socket) = Filter::start(&path, &rests.backend(), SIZE, &chain);
        load.guest.reconnect(socket);
    }
    load.finish();
    for block in 0..rests.blocks() {
        load.ask(0, Asked { block, stamp: None });
        load.guest.kick();
        load.finish();
    }
    drop(load.guest);
    assert!(filter.end().success());
    rests.mend(&path.join("disk"));
    println!("{} answered; {resumed} were under way when a filter was killed", load.answered);
    assert!(resumed > 0, "no request was ever under way");
}
