//! An image is interrupted anywhere: by a kill of the process, after which the file holds every write so
//! far, or by a power cut, after which any write that was not made durable may be missing, in parts and in any
//! order. Each time it must be sound, hold the data it has to, and be usable further.
//!
//! Sometimes the datastore is full for a while.
//!
//! Each block of 512 bytes is filled with the number of the operation that wrote it, so that it shows
//! which one did. `VMSEAL_SEED=N` repeats a run.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use fastrand::Rng;
use vmseal_api::transfer::ImageFormat;

use super::storage::FileEvent;
use super::{Qcow2Image, open};
use crate::stack::memory::{Segment, Segments};
use crate::stack::request::{IoError, Operation};

const SIZE: u64 = 3 << 20;
const BLOCK: u64 = 512;
const BLOCKS: usize = (SIZE / BLOCK) as usize;

/// The number of a block that was in the image below from the start.
const BELOW: u32 = u32::MAX;

/// The numbers that a block may hold.
type Allowed = BTreeSet<u32>;

/// An event: a change of the file, or an answer to the guest.
enum Step {
    File(FileEvent),
    /// From here on each of these blocks may hold one of these numbers.
    Begun(Vec<(usize, Allowed)>),
    /// The operations that have begun are answered.
    Answered,
    /// They are durable, too.
    Flushed,
}

/// The numbers that blocks may hold at the moment, and those of earlier moments that may come back.
#[derive(Clone)]
struct Blocks {
    /// After any event since the last flush.
    after_power_cut: Vec<Allowed>,
    /// After any event since the last answer.
    after_kill: Vec<Allowed>,
    now: Vec<Allowed>,
}

impl Blocks {
    fn new(of: u32) -> Self {
        let all = vec![Allowed::from([of]); BLOCKS];
        Self { after_power_cut: all.clone(), after_kill: all.clone(), now: all }
    }

    fn follow(&mut self, step: &Step) {
        match step {
            Step::File(_) => {}
            Step::Begun(changes) => {
                for (block, allowed) in changes {
                    self.now[*block].clone_from(allowed);
                    self.after_kill[*block].extend(allowed);
                    self.after_power_cut[*block].extend(allowed);
                }
            }
            Step::Answered => self.after_kill.clone_from(&self.now),
            Step::Flushed => self.after_power_cut.clone_from(&self.now),
        }
    }
}

struct Place {
    directory: tempfile::TempDir,
    below: Vec<ImageFormat>,
}

fn qemu_img(at: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let ran = Command::new("qemu-img").args(arguments).current_dir(at).output().unwrap();
    let said = [ran.stdout, ran.stderr].concat();
    (ran.status.code(), String::from_utf8_lossy(&said).into_owned())
}

impl Place {
    fn new(options: &str, below: bool) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (at, size) = (directory.path(), SIZE.to_string());
        if below {
            std::fs::write(at.join("raw"), vec![0xff; SIZE as usize]).unwrap();
            let convert = ["convert", "-f", "raw", "-O", "qcow2", "raw", "below"];
            assert_eq!(qemu_img(at, &convert).0, Some(0));
        }
        let over = if below { &["-b", "below", "-F", "qcow2"][..] } else { &[] };
        let create = [&["create", "-f", "qcow2", "-o", options], over, &["image", &size]].concat();
        let (code, said) = qemu_img(at, &create);
        assert_eq!(code, Some(0), "{said}");
        let below = if below { vec![ImageFormat::Qcow2] } else { Vec::new() };
        Self { directory, below }
    }

    /// As [`Self::new`], with compressed clusters of [`BELOW`] instead of an image below.
    fn compressed(options: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = directory.path();
        std::fs::write(at.join("raw"), vec![0xff; SIZE as usize]).unwrap();
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "raw", "image"];
        assert_eq!(qemu_img(at, &convert).0, Some(0));
        Self { directory, below: Vec::new() }
    }

    fn file(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.directory.path().join(name)).unwrap()
    }

    fn open(&self) -> Qcow2Image {
        let below = |&format: &ImageFormat| (OwnedFd::from(self.file("below")), format);
        let below = self.below.iter().map(below).collect();
        open(self.file("image").into(), below, 0, SIZE, false).unwrap()
    }

    /// Sound, perhaps with leaks; and each block holds what it may.
    fn check(&self, allowed: &[Allowed], leaks: bool, context: &str) {
        let at = self.directory.path();
        let (code, said) = qemu_img(at, &["check", "-f", "qcow2", "image"]);
        assert!(code == Some(0) || leaks && code == Some(3), "{context}: {said}");
        let convert = ["convert", "-f", "qcow2", "-O", "raw", "image", "content"];
        let (code, said) = qemu_img(at, &convert);
        assert_eq!(code, Some(0), "{context}: {said}");
        let content = std::fs::read(at.join("content")).unwrap();
        for (block, bytes) in content.chunks(BLOCK as usize).enumerate() {
            let words: BTreeSet<u32> =
                bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
            let one = words.first().copied().filter(|_| words.len() == 1);
            let fine = one.is_some_and(|number| allowed[block].contains(&number));
            assert!(fine, "{context}: block {block} holds {words:?}, not {:?}", allowed[block]);
        }
    }
}

/// Does requests that a guest may make, in batches as the worker does; returns the events.
fn history(image: &mut Qcow2Image, rng: &mut Rng, number: &mut u32, now: &[Allowed]) -> Vec<Step> {
    let (mut steps, mut now) = (Vec::new(), now.to_vec());
    for _ in 0..rng.usize(1..30) {
        let mut flush = false;
        // Sometimes the datastore is full, at any of the writes.
        let full = rng.u8(..) < 32;
        let room = if full { rng.i64(0..12) } else { i64::MAX };
        image.file().0.room.store(room, Ordering::Relaxed);
        // As of requests of the batch, and more that are not in it.
        let any = |rng: &mut Rng| {
            let first = rng.u64(0..BLOCKS as u64);
            (first * BLOCK, rng.u64(1..=700).min(BLOCKS as u64 - first) * BLOCK)
        };
        let fetched: Vec<_> = (0..rng.usize(0..4)).map(|_| any(rng)).collect();
        image.fetch(fetched.into_iter());
        let mut memory = Vec::new();
        for _ in 0..rng.usize(1..6) {
            let first = rng.usize(0..BLOCKS);
            let most = if rng.u8(..) < 200 { 24 } else { 700 };
            let count = rng.usize(1..=most).min(BLOCKS - first);
            *number += 1;
            let operation = match rng.u8(0..20) {
                0..12 => Operation::Write,
                12..14 => Operation::Discard,
                14..16 => Operation::WriteZeroes { unmap: true },
                16..18 => Operation::WriteZeroes { unmap: false },
                _ => Operation::Flush,
            };
            let changes = |block: usize| match operation {
                Operation::Write => Some((block, Allowed::from([*number]))),
                Operation::WriteZeroes { .. } => Some((block, Allowed::from([0]))),
                Operation::Discard => Some((block, &now[block] | &Allowed::from([0]))),
                Operation::Read | Operation::Flush => None,
            };
            let mut changes: Vec<_> = (first..first + count).filter_map(changes).collect();
            if full {
                changes.iter_mut().for_each(|(block, allowed)| allowed.extend(&now[*block]));
            }
            for (block, allowed) in &changes {
                now[*block].clone_from(allowed);
            }
            steps.push(Step::Begun(changes));
            let mut bytes = number.to_le_bytes().repeat(count * BLOCK as usize / 4);
            let mut data = Segments::default();
            if operation == Operation::Write {
                // SAFETY: `bytes` lives until the batch is committed.
                data.push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
            }
            memory.push(bytes);
            let (at, length) = (first as u64 * BLOCK, count as u64 * BLOCK);
            let done = image.perform(operation, (at, length), &data, &mut Vec::new());
            assert!(done.is_ok() || full && done == Err(IoError::NoSpace), "{done:?}");
            steps.extend(image.file().events().into_iter().map(Step::File));
            flush |= operation == Operation::Flush && done.is_ok();
            if flush {
                break;
            }
        }
        let committed = image.commit();
        drop(memory);
        assert!(committed.is_ok() || full && committed == Err(IoError::NoSpace), "{committed:?}");
        flush &= committed.is_ok();
        steps.extend(image.file().events().into_iter().map(Step::File));
        steps.push(Step::Answered);
        if flush {
            steps.push(Step::Flushed);
        }
    }
    image.file().0.room.store(i64::MAX, Ordering::Relaxed);
    steps
}

/// Applies the events to a file; with `power_cut`, only some of those that were not made durable.
fn replay(file: &File, steps: &[Step], power_cut: Option<&mut Rng>) {
    let events: Vec<&FileEvent> = steps
        .iter()
        .filter_map(|step| if let Step::File(event) = step { Some(event) } else { None })
        .collect();
    let durable = events.iter().rposition(|event| matches!(event, FileEvent::Sync)).unwrap_or(0);
    let (sure, unsure) = events.split_at(durable);
    sure.iter().for_each(|event| apply(file, event, &mut |_| true));
    let mut rng = power_cut;
    for event in unsure {
        match &mut rng {
            None => apply(file, event, &mut |_| true),
            Some(rng) => {
                // All of it, nothing, or some of its sectors.
                let (whole, chance) = (rng.bool(), rng.bool());
                apply(file, event, &mut |_| if whole { chance } else { rng.bool() });
            }
        }
    }
}

fn apply(file: &File, event: &FileEvent, kept: &mut dyn FnMut(u64) -> bool) {
    let mut put = |at: u64, bytes: &[u8]| {
        for (index, sector) in bytes.chunks(512).enumerate() {
            let at = at + index as u64 * 512;
            if kept(at) {
                file.write_all_at(sector, at).unwrap();
            }
        }
    };
    match event {
        FileEvent::Write { at, bytes } => put(*at, bytes),
        FileEvent::Zero { at, length } => put(*at, &vec![0; *length as usize]),
        // A power cut may lose it as it may lose the writes that make the file longer.
        FileEvent::Length(length) if kept(0) => file.set_len(*length).unwrap(),
        FileEvent::Length(_) | FileEvent::Sync => {}
    }
}

/// Where the power fails: anywhere, or right after a write of the L1 table, before which its targets must be durable.
fn place_of_cut(image: &[u8], steps: &[Step], rng: &mut Rng) -> usize {
    // qcow2: l1_size and l1_table_offset of the header.
    let entries = u32::from_be_bytes(image[36..40].try_into().unwrap());
    let start = u64::from_be_bytes(image[40..48].try_into().unwrap());
    let l1 = start..start + 8 * u64::from(entries);
    let leads =
        |step: &Step| matches!(step, Step::File(FileEvent::Write { at, .. }) if l1.contains(at));
    let behind: Vec<usize> =
        (1..).zip(steps).filter(|(_, step)| leads(step)).map(|(cut, _)| cut).collect();
    match rng.choice(&behind) {
        Some(cut) if rng.bool() => *cut,
        _ => rng.usize(0..=steps.len()),
    }
}

/// Runs an image several times, each run interrupted somewhere, `power_cuts` of them by a power cut.
fn live(place: &Place, of: u32, power_cuts: usize, rng: &mut Rng, context: &str) {
    let (mut blocks, mut number) = (Blocks::new(of), 0);
    for life in 0..4 {
        let path = place.directory.path().join("image");
        let before = std::fs::read(&path).unwrap();
        let mut image = place.open();
        let mut steps = history(&mut image, rng, &mut number, &blocks.now);
        if rng.bool() {
            image.close().unwrap();
            steps.extend(image.file().events().into_iter().map(Step::File));
            drop(image);
            let mut closed = blocks.clone();
            steps.iter().for_each(|step| closed.follow(step));
            place.check(&closed.now, life > 0, &format!("{context}, life {life}, closed"));
        } else {
            drop(image);
        }
        // A kill comes last: the next run continues from there.
        for power_cut in (0..=power_cuts).map(|time| time < power_cuts) {
            let cut = if power_cut {
                place_of_cut(&before, &steps, rng)
            } else {
                rng.usize(0..=steps.len())
            };
            std::fs::write(&path, &before).unwrap();
            replay(&place.file("image"), &steps[..cut], power_cut.then_some(&mut *rng));
            let mut then = blocks.clone();
            steps[..cut].iter().for_each(|step| then.follow(step));
            let allowed = if power_cut { then.after_power_cut } else { then.after_kill };
            let how = if power_cut { "a power cut" } else { "a kill" };
            let context = format!("{context}, life {life}, {how} at {cut} of {}", steps.len());
            place.check(&allowed, true, &context);
            if !power_cut {
                let (after_power_cut, after_kill) = (allowed.clone(), allowed.clone());
                blocks = Blocks { after_power_cut, after_kill, now: allowed };
            }
        }
    }
}

#[test]
fn after_a_failed_flush_nothing_is_changed_any_more_and_reads_go_on() {
    let place = Place::new("cluster_size=64k", false);
    let mut image = place.open();
    let mut bytes = vec![7; 4096];
    let mut data = Segments::default();
    // SAFETY: `bytes` lives until the requests are done.
    data.push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    assert_eq!(image.perform(Operation::Write, (0, 4096), &data, &mut Vec::new()), Ok(()));
    assert_eq!(
        image.perform(Operation::Flush, (0, 0), &Segments::default(), &mut Vec::new()),
        Ok(())
    );
    let failed = image.file().0.target.flushed(Err(IoError::Device(libc::EIO)));
    assert_eq!(failed, Err(IoError::Device(libc::EIO)));
    assert_eq!(
        image.perform(Operation::Write, (8192, 4096), &data, &mut Vec::new()),
        Err(IoError::Lost)
    );
    assert_eq!(
        image.perform(Operation::Discard, (0, 4096), &Segments::default(), &mut Vec::new()),
        Err(IoError::Lost)
    );
    assert_eq!(
        image.perform(Operation::Flush, (0, 0), &Segments::default(), &mut Vec::new()),
        Err(IoError::Lost)
    );
    assert_eq!(image.perform(Operation::Read, (0, 4096), &data, &mut Vec::new()), Ok(()));
}

/// The stack of a disk is exchanged for another one with the same file.
#[test]
fn an_image_that_was_left_to_another_writer_is_not_cut_when_it_is_closed() {
    let place = Place::new("cluster_size=4k", false);
    let mut bytes = 7u32.to_le_bytes().repeat(SIZE as usize / 4);
    let mut data = Segments::default();
    // SAFETY: `bytes` lives until the requests are done.
    data.push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    let mut first = place.open();
    let part = data.as_slice()[0].part(0, 4096);
    let mut one = Segments::default();
    one.push(part);
    assert_eq!(first.perform(Operation::Write, (0, 4096), &one, &mut Vec::new()), Ok(()));
    first.commit().unwrap();
    first.settle_for_readers().unwrap();
    let mut second = place.open();
    assert_eq!(second.perform(Operation::Write, (0, SIZE), &data, &mut Vec::new()), Ok(()));
    second.perform(Operation::Flush, (0, 0), &Segments::default(), &mut Vec::new()).unwrap();
    first.close().unwrap();
    second.close().unwrap();
    place.check(&vec![Allowed::from([7]); BLOCKS], false, "after the first was closed");
}

fn seed() -> u64 {
    std::env::var("VMSEAL_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap())
}

#[test]
fn an_image_that_is_interrupted_anywhere_is_sound_and_has_lost_nothing() {
    let seed = seed();
    println!("VMSEAL_SEED={seed}");
    for turn in 0..2 {
        let mut rng = Rng::with_seed(seed.wrapping_add(turn));
        // Small clusters have many tables: the order between them matters more.
        let clusters = [
            ("cluster_size=64k", 1),
            ("cluster_size=4k,refcount_bits=1", 1),
            ("cluster_size=512", 4),
        ];
        for (options, power_cuts) in clusters {
            for (below, of) in [(false, 0), (true, BELOW)] {
                let context = format!("seed {seed}, turn {turn}, {options}, below: {below}");
                live(&Place::new(options, below), of, power_cuts, &mut rng, &context);
            }
            let context = format!("seed {seed}, turn {turn}, {options}, compressed");
            live(&Place::compressed(options), BELOW, power_cuts, &mut rng, &context);
        }
    }
}
