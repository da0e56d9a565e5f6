//! Every target on its seeds, and for a while on mutations of them; on any compiler. The mutations
//! follow from a seed, which is printed: `VMSEAL_FUZZ_SEED=N` does the same again.

#![allow(clippy::unwrap_used)] // a test

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use vmseal_fuzz::{INPUT_MAX, TARGETS};

/// How long mutations of one target are tried.
const WHILE: Duration = Duration::from_millis(1500);

/// The longest that one input may take, on a busy machine.
const SLOW: Duration = Duration::from_secs(10);

/// After how long an input is given up that does not come to an end.
const STUCK: Duration = Duration::from_secs(60);

/// The most changes to one input.
const CHANGES_MAX: u64 = 6;

/// Numbers that parsers stumble over.
const NUMBERS: [u64; 10] =
    [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX / 2, u64::MAX];

/// SplitMix64: all that follows from a seed.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn of<'a>(&mut self, seeds: &'a [Vec<u8>]) -> &'a [u8] {
        &seeds[self.below(seeds.len())]
    }
}

/// One change: of a bit, a byte, a number, or of what is there at all.
fn change(input: &mut Vec<u8>, seeds: &[Vec<u8>], chance: &mut Chance) {
    let at = chance.below(input.len() + 1);
    let until = at + chance.below(64.min(input.len() - at) + 1);
    match chance.next() % 8 {
        0 if at < input.len() => input[at] ^= 1 << chance.below(8),
        1 if at < input.len() => input[at] = chance.next() as u8,
        2 | 3 => {
            let width = 1 << chance.below(4);
            let number = NUMBERS[chance.below(NUMBERS.len())].to_be_bytes();
            let mut bytes = number[8 - width..].to_vec();
            if chance.below(2) == 0 {
                bytes.reverse();
            }
            let room = width.min(input.len() - at);
            input[at..at + room].copy_from_slice(&bytes[..room]);
        }
        4 => drop(input.drain(at..until)),
        5 => {
            let copy = input[at..until].to_vec();
            input.splice(at..at, copy);
        }
        6 => {
            let other = chance.of(seeds);
            let start = chance.below(other.len());
            let end = start + chance.below(256.min(other.len() - start) + 1);
            input.splice(at..until, other[start..end].iter().copied());
        }
        _ => input.truncate(at),
    }
}

fn seeds(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// Runs the target; says how to see a failure again.
fn attempt(target: &str, run: fn(&[u8]), input: &[u8], what: &str) {
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        run(input);
        assert!(start.elapsed() < SLOW, "it took {:?}", start.elapsed());
    }));
    if let Err(panic) = outcome {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{target}.input"));
        std::fs::write(&path, input).unwrap();
        eprintln!("{target} fails on {what}; the input is in {}", path.display());
        resume_unwind(panic);
    }
}

/// Ends the process when nothing is sent for too long: a thread that is stuck cannot be ended.
fn watch(message: String) -> Sender<()> {
    let (alive, heard) = mpsc::channel();
    thread::spawn(move || {
        loop {
            match heard.recv_timeout(STUCK) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    // Not by a macro: the test's output is kept until its end.
                    let _ = writeln!(std::io::stderr(), "{message}");
                    std::process::abort();
                }
            }
        }
    });
    alive
}

fn replay(target: &str) {
    let (_, run) = TARGETS.iter().find(|(name, _)| *name == target).unwrap();
    let seeds = seeds(target);
    assert!(!seeds.is_empty());
    for (path, seed) in &seeds {
        assert!(seed.len() <= INPUT_MAX + 1, "{} is too long for a seed", path.display());
        attempt(target, *run, seed, &path.display().to_string());
    }
    let given = std::env::var("VMSEAL_FUZZ_SEED").map(|seed| seed.parse().unwrap());
    let seed = given.unwrap_or_else(|_| RandomState::new().hash_one(target));
    println!("VMSEAL_FUZZ_SEED={seed}");
    let alive = watch(format!("{target} is stuck; VMSEAL_FUZZ_SEED={seed}"));
    let (mut chance, start) = (Chance(seed), Instant::now());
    let contents: Vec<Vec<u8>> = seeds.into_iter().map(|(_, content)| content).collect();
    let mut count = 0u64;
    while start.elapsed() < WHILE {
        let mut input = chance.of(&contents).to_vec();
        for _ in 0..1 + chance.next() % CHANGES_MAX {
            change(&mut input, &contents, &mut chance);
        }
        count += 1;
        alive.send(()).unwrap();
        attempt(target, *run, &input, &format!("VMSEAL_FUZZ_SEED={seed}, mutation {count}"));
    }
    println!("{target}: {} seeds and {count} mutations", contents.len());
}

macro_rules! replayed {
    ($($target:ident)*) => {
        $(#[test] fn $target() { replay(stringify!($target)); })*

        #[test]
        fn no_target_is_forgotten() {
            let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($target)),*]);
        }
    };
}

replayed! {
    backup_manifest
    filter_config
    filter_control
    in_place
    join_token
    key_file
    kmip_ttlv
    luks_header
    migration_stream
    migration_wire
    nbd_negotiation
    nbd_replies
    nbd_transmission
    provider_backup
    qcow2_disk
    qcow2_image
    qmp
    replica_map
    rest_body
    run_record
    sealed
    sealed_file
    server_backup
    vhost_user_messages
    vhost_user_queue
    vm_descriptor
}
