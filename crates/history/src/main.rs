//! `vmseal-guest-history DEVICE MIB STOP GENERATION [FLUSHED…]`: writes and reads a part of a disk, from that many MiB on, all the time and
//! past all caches, until there is a file STOP, and ends with an error where no disk could have behaved like that.
//!
//! ```text
//!  read all ─► judge it by what was flushed ─► write all ─► flush ─┬─► round ─► read all ─► judge the round ─┐
//!                                                                  └─────────────────────────────────────────┘
//! ```
//! A round is some writes and reads at once, and is judged by its history; the next one begins with what this one left. After each flush
//! it prints `VMSEAL-DURABLE` and numbers. When the guest has lost its power, a test starts the program again with the next GENERATION
//! and the last of these numbers.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, sleep};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use vmseal_history::checker::{End, Finding, History, Read, Write};
use vmseal_history::load::{
    DISK, Flushed, LONGEST, Stroke, UNIT, UNITS, WRITERS, after_a_cut, garbled,
};
use vmseal_history::stamp::{self, Found, Stamp};

/// How many read at once.
const READERS: usize = 2;

/// How many requests each of them has in a round: few enough to be judged in a moment, also where the guest is emulated.
const REQUESTS: u64 = 48;

/// How often a round flushes.
const FLUSHES: usize = 3;

/// The longest pause after a request, in milliseconds: other programs of the guest have their turn.
const PAUSE_MAX: u64 = 40;

/// The pause before a flush.
const BETWEEN_FLUSHES: Duration = Duration::from_millis(300);

/// Where the kernel wants memory to begin that it reads and writes past its cache.
const ALIGNED: usize = 4096;

/// How many units are read at once where all are.
const PART: u64 = 64;

fn main() -> ExitCode {
    match run() {
        Ok(rounds) => {
            eprintln!("{rounds} rounds, and nothing is wrong");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("vmseal-guest-history: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What is asked for.
struct Asked {
    disk: Disk,
    stop: PathBuf,
    generation: u64,
    flushed: Option<Flushed>,
}

impl Asked {
    fn of(arguments: &[String]) -> anyhow::Result<Self> {
        let [device, mib, stop, generation, flushed @ ..] = arguments else {
            bail!("usage: vmseal-guest-history DEVICE MIB STOP GENERATION [FLUSHED…]");
        };
        let mib: u64 = mib.parse().context("MIB is no number")?;
        let disk = Disk::open(Path::new(device), mib << 20)
            .with_context(|| format!("{device} cannot be opened"))?;
        let flushed: Option<Flushed> =
            (!flushed.is_empty()).then(|| flushed.join(" ").parse()).transpose()?;
        let generation: u64 = generation.parse().context("GENERATION is no number")?;
        Ok(Self { disk, stop: stop.into(), generation, flushed })
    }
}

fn run() -> anyhow::Result<u64> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Asked { disk, stop, generation, flushed } = Asked::of(&arguments)?;
    let found = read_all(&disk)?;
    let findings = match &flushed {
        Some(flushed) => after_a_cut(flushed, &found),
        None => garbled(&found),
    };
    ensure!(findings.is_empty(), "after the start: {}", shown(&findings));
    let writers = Writers::begin(&disk, generation)?;
    let mut found = read_all(&disk)?;
    let findings = after_a_cut(&writers.answered(), &found);
    ensure!(findings.is_empty(), "after all was written: {}", shown(&findings));
    let mut rounds = 0;
    loop {
        found = round(&disk, &writers, found).with_context(|| format!("in round {rounds}"))?;
        rounds += 1;
        if stop.exists() {
            return Ok(rounds);
        }
    }
}

/// The first of what is wrong, for a message.
fn shown(findings: &[Finding]) -> String {
    let first: Vec<_> = findings.iter().take(5).collect();
    format!("{} units are wrong: {first:?}", findings.len())
}

/// How far each writer is.
struct Writers {
    generation: u64,
    /// The last step of each that was answered.
    steps: [AtomicU64; WRITERS],
}

impl Writers {
    /// Each has written all of its units.
    fn begin(disk: &Disk, generation: u64) -> io::Result<Self> {
        for writer in 0..WRITERS {
            disk.write(Stroke { generation, writer, step: 0 })?;
        }
        let this = Self { generation, steps: Default::default() };
        this.flush(disk)?;
        Ok(this)
    }

    fn answered(&self) -> Flushed {
        let steps = self.steps.each_ref().map(|step| step.load(Ordering::SeqCst));
        Flushed { generation: self.generation, steps }
    }

    /// Has all that was answered be durable, and says so.
    fn flush(&self, disk: &Disk) -> io::Result<()> {
        let answered = self.answered();
        disk.file.sync_data()?;
        // At once: others write to the console as well.
        let line = format!("VMSEAL-DURABLE {answered}\n");
        io::stdout().write_all(line.as_bytes())
    }
}

/// A round from what all units held at its begin to what they hold at its end.
fn round(disk: &Disk, writers: &Writers, start: Vec<Found>) -> anyhow::Result<Vec<Found>> {
    let mut history = History::new(start);
    // Where the image is in the page cache of the host, a read may find a unit half written.
    history.tears_beside_writes = true;
    let history = Mutex::new(history);
    thread::scope(|scope| {
        let history = &history;
        let write = |writer| scope.spawn(move || write_some(disk, writers, writer, history));
        let mut threads: Vec<_> = (0..WRITERS).map(write).collect();
        threads.extend((0..READERS).map(|_| scope.spawn(move || read_some(disk, history))));
        threads.push(scope.spawn(move || flush_some(disk, writers)));
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(ended) => ended,
            Err(_) => Err(io::Error::other("a thread panicked")),
        })
    })?;
    let found = read_noted(disk, &history)?;
    let history = history.into_inner().unwrap_or_else(PoisonError::into_inner);
    let findings = history.check();
    if let Some(first) = findings.first() {
        bail!("{}\nunit {}:\n{}", shown(&findings), first.unit, history.of_unit(first.unit));
    }
    Ok(found)
}

fn locked(history: &Mutex<History>) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pause() {
    sleep(Duration::from_millis(fastrand::u64(..PAUSE_MAX)));
}

fn write_some(
    disk: &Disk,
    writers: &Writers,
    writer: usize,
    history: &Mutex<History>,
) -> io::Result<()> {
    let answered = &writers.steps[writer];
    for _ in 0..REQUESTS {
        let step = answered.load(Ordering::SeqCst) + 1;
        let stroke = Stroke { generation: writers.generation, writer, step };
        let index = {
            let mut history = locked(history);
            let (asked, end) = (history.tick(), End::Open);
            let (sequence, units) = (stroke.sequence(), stroke.units());
            history.writes.push(Write { sequence, units, zeroes: false, asked, end });
            history.writes.len() - 1
        };
        disk.write(stroke)?;
        {
            let mut history = locked(history);
            let done = history.tick();
            history.writes[index].end = End::Done(done);
        }
        answered.store(step, Ordering::SeqCst);
        pause();
    }
    Ok(())
}

fn read_some(disk: &Disk, history: &Mutex<History>) -> io::Result<()> {
    for _ in 0..REQUESTS {
        let first = fastrand::u64(..UNITS);
        let end = (first + fastrand::u64(1..=LONGEST)).min(UNITS);
        noted(disk, history, first..end)?;
        pause();
    }
    Ok(())
}

fn flush_some(disk: &Disk, writers: &Writers) -> io::Result<()> {
    for _ in 0..FLUSHES {
        sleep(BETWEEN_FLUSHES);
        writers.flush(disk)?;
    }
    Ok(())
}

/// Reads, and has that in the history.
fn noted(disk: &Disk, history: &Mutex<History>, units: Range<u64>) -> io::Result<Vec<Found>> {
    let (first, asked) = (units.start, locked(history).tick());
    let found = disk.read(units)?;
    let mut history = locked(history);
    let done = history.tick();
    history.reads.push(Read { first, found: found.clone(), asked, done });
    Ok(found)
}

/// All units, in parts.
fn parts() -> impl Iterator<Item = Range<u64>> {
    (0..UNITS).step_by(PART as usize).map(|first| first..(first + PART).min(UNITS))
}

fn read_noted(disk: &Disk, history: &Mutex<History>) -> io::Result<Vec<Found>> {
    let found: io::Result<Vec<_>> = parts().map(|units| noted(disk, history, units)).collect();
    Ok(found?.concat())
}

fn read_all(disk: &Disk) -> io::Result<Vec<Found>> {
    let found: io::Result<Vec<_>> = parts().map(|units| disk.read(units)).collect();
    Ok(found?.concat())
}

/// A part of a disk.
struct Disk {
    file: File,
    offset: u64,
}

impl Disk {
    fn open(device: &Path, offset: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        Ok(Self { file: options.open(device)?, offset })
    }

    fn place(&self, unit: u64) -> u64 {
        self.offset + unit * UNIT as u64
    }

    fn read(&self, units: Range<u64>) -> io::Result<Vec<Found>> {
        let mut buffer = Buffer::of(&units);
        self.file.read_exact_at(buffer.bytes(), self.place(units.start))?;
        let found = units.zip(buffer.bytes().chunks(UNIT));
        Ok(found.map(|(unit, bytes)| stamp::find(bytes, DISK, unit)).collect())
    }

    fn write(&self, stroke: Stroke) -> io::Result<()> {
        let (units, sequence) = (stroke.units(), stroke.sequence());
        let mut buffer = Buffer::of(&units);
        let place = self.place(units.start);
        for (unit, bytes) in units.zip(buffer.bytes().chunks_mut(UNIT)) {
            Stamp { disk: DISK, unit, sequence }.fill(bytes);
        }
        self.file.write_all_at(buffer.bytes(), place)
    }
}

/// Memory for units that begins where the kernel wants it.
struct Buffer {
    memory: Vec<u8>,
    used: Range<usize>,
}

impl Buffer {
    fn of(units: &Range<u64>) -> Self {
        let length = (units.end - units.start) as usize * UNIT;
        let memory = vec![0_u8; length + ALIGNED];
        let from = memory.as_ptr().align_offset(ALIGNED);
        Self { memory, used: from..from + length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.used.clone()]
    }
}
