//! Checks whether a disk could have behaved as a guest saw it.
//!
//! Each unit is a register. A read that found the write W is wrong if it is:
//! ```text
//!  torn        neither zeroes nor one whole unit          misplaced   a whole unit of another place or disk
//!  invented    W was never made, or only after the read
//!  lost        W' followed W and was done before the read, and no read ever finds W' or a later one
//!  stale       the same, but W' is found later            doubled     the same, but W' was found before
//!  doubled     also: reads found W, then another, then W again
//! ```
//! W' follows W when it was submitted after W was over. A write that failed may have been done in part,
//! and one that was in flight at the end may be done or not; neither hides another. After a power cut
//! only a flushed write hides others: it was done before the flush was submitted, and the flush was
//! answered. After the cut a unit counts as if it had always held its content: the next history begins with it.

use std::ops::Range;

use crate::stamp::Found;

/// Counts events, one after the other.
pub type Time = u64;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was done, and answered then.
    Done(Time),
    /// Perhaps in part, but not after that time.
    Failed(Time),
    /// It was not answered.
    Open,
}

/// A write of stamped units, or of zeroes.
#[derive(Clone, Debug)]
pub struct Write {
    /// Its number: no other write has it.
    pub sequence: u64,
    /// Where it is.
    pub units: Range<u64>,
    /// Whether it is of zeroes.
    pub zeroes: bool,
    /// When it was submitted.
    pub asked: Time,
    /// How it ended.
    pub end: End,
}

/// A read that succeeded.
#[derive(Clone, Debug)]
pub struct Read {
    /// The first unit of it.
    pub first: u64,
    /// What each unit held.
    pub found: Vec<Found>,
    /// When it was submitted.
    pub asked: Time,
    /// When it was answered.
    pub done: Time,
}

/// Everything that a guest did and saw, from the disk's content at its start.
#[derive(Clone, Debug)]
pub struct History {
    /// What each unit held before.
    pub start: Vec<Found>,
    /// In the order in which they were submitted.
    pub writes: Vec<Write>,
    /// Those that succeeded.
    pub reads: Vec<Read>,
    /// When each flush that succeeded was submitted.
    pub flushes: Vec<Time>,
    /// Whether a read may find a unit torn while it is being written: so it is with the page cache of ext4, which
    /// copies without a lock (docs/decisions/051).
    pub tears_beside_writes: bool,
    now: Time,
}

/// The faults of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wrong {
    /// Neither zeroes nor one whole unit.
    Torn,
    /// A whole unit of another place or disk.
    Misplaced,
    /// A write that was never made, or only later.
    Invented,
    /// A write that was done is never found.
    Lost,
    /// What was there before, and then the write that was done.
    Stale,
    /// What was there before, after the write was found; or a write that is back after another one.
    Doubled,
    /// After a power cut: a flush covered the write that hides it.
    Unflushed,
}

/// Where the fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong.
    pub wrong: Wrong,
    /// The unit.
    pub unit: u64,
    /// What it held.
    pub found: Found,
    /// When that was read.
    pub at: Time,
}

/// A write as one of its units sees it; the content at the start is the first.
#[derive(Clone, Copy, Debug)]
struct Version {
    value: Found,
    asked: Time,
    over: Option<Time>,
    hides: Option<Time>,
}

impl Version {
    fn is_followed_by(&self, other: &Version) -> bool {
        self.over.is_some_and(|over| over < other.asked)
    }
}

/// The content of one unit in one read.
#[derive(Clone, Copy, Debug)]
struct Sight {
    value: Found,
    asked: Time,
    done: Time,
}

impl History {
    /// One in which nothing was done yet.
    #[must_use]
    pub fn new(start: Vec<Found>) -> Self {
        let (writes, reads, flushes) = (Vec::new(), Vec::new(), Vec::new());
        Self { start, writes, reads, flushes, tears_beside_writes: false, now: 0 }
    }

    /// The next instant.
    pub fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    fn versions(&self, unit: u64) -> Vec<Version> {
        let first =
            Version { value: self.start[unit as usize], asked: 0, over: Some(0), hides: Some(0) };
        let covering = self.writes.iter().filter(|write| write.units.contains(&unit));
        let version = |write: &Write| {
            let (over, hides) = match write.end {
                End::Done(time) => (Some(time), Some(time)),
                End::Failed(time) => (Some(time), None),
                End::Open => (None, None),
            };
            let value = if write.zeroes { Found::Zeroes } else { Found::Write(write.sequence) };
            Version { value, asked: write.asked, over, hides }
        };
        std::iter::once(first).chain(covering.map(version)).collect()
    }

    fn sights(&self, unit: u64) -> Vec<Sight> {
        let of = |read: &Read| {
            let value = *read.found.get(unit.checked_sub(read.first)? as usize)?;
            Some(Sight { value, asked: read.asked, done: read.done })
        };
        let mut sights: Vec<_> = self.reads.iter().filter_map(of).collect();
        sights.sort_by_key(|sight| sight.done);
        sights
    }

    /// All findings that no disk could have caused.
    #[must_use]
    pub fn check(&self) -> Vec<Finding> {
        let units = 0..self.start.len() as u64;
        units.flat_map(|unit| self.check_unit(unit)).collect()
    }

    fn check_unit(&self, unit: u64) -> Vec<Finding> {
        let (versions, mut sights) = (self.versions(unit), self.sights(unit));
        if self.tears_beside_writes {
            sights.retain(|sight| sight.value != Found::Torn || !beside_a_write(&versions, sight));
        }
        let judged = sights.iter().enumerate().filter_map(|(index, sight)| {
            let wrong = garbled(sight.value)
                .or_else(|| judge(&versions, &sights, sight))
                .or_else(|| back_again(&versions, &sights[..index], sight))?;
            Some(Finding { wrong, unit, found: sight.value, at: sight.done })
        });
        judged.collect()
    }

    /// What was done to a unit and seen of it, a line each, for the message of a test that fails.
    #[must_use]
    pub fn of_unit(&self, unit: u64) -> String {
        let versions = self.versions(unit);
        let writes = versions.iter().map(|version| {
            let Version { value, asked, over, .. } = version;
            (*asked, format!("{asked}..{over:?} {value:?} is written"))
        });
        let sights = self.sights(unit);
        let reads = sights.iter().map(|Sight { value, asked, done }| {
            (*asked, format!("{asked}..{done} {value:?} is read"))
        });
        let mut lines: Vec<_> = writes.chain(reads).collect();
        lines.sort();
        lines.into_iter().map(|(_, line)| format!("  {line}\n")).collect()
    }

    /// All findings that a power cut cannot have caused: `after` is the content of each unit then.
    #[must_use]
    pub fn check_cut(&self, after: &[Found]) -> Vec<Finding> {
        let units = (0..).zip(after);
        let judged = units.filter_map(|(unit, &found)| {
            let wrong = garbled(found).or_else(|| self.judge_cut(unit, found))?;
            Some(Finding { wrong, unit, found, at: self.now })
        });
        judged.collect()
    }

    fn judge_cut(&self, unit: u64, found: Found) -> Option<Wrong> {
        let versions = self.versions(unit);
        let flushed = |version: &Version| {
            let done = version.hides?;
            (done == 0 || self.flushes.iter().any(|asked| done < *asked)).then_some(done)
        };
        let durable: Vec<_> =
            versions.iter().filter(|version| flushed(version).is_some()).collect();
        let mut same = versions.iter().filter(|version| version.value == found).peekable();
        if same.peek().is_none() {
            return Some(Wrong::Invented);
        }
        let hidden = |version: &Version| durable.iter().any(|other| version.is_followed_by(other));
        same.all(hidden).then_some(Wrong::Unflushed)
    }
}

/// Whether some write was in flight during the read.
fn beside_a_write(versions: &[Version], sight: &Sight) -> bool {
    let met = |version: &Version| {
        version.asked < sight.done && version.over.is_none_or(|over| over > sight.asked)
    };
    versions.iter().any(met)
}

fn garbled(found: Found) -> Option<Wrong> {
    match found {
        Found::Torn => Some(Wrong::Torn),
        Found::Misplaced(_) => Some(Wrong::Misplaced),
        Found::Zeroes | Found::Write(_) => None,
    }
}

/// Whether the content could have been found.
fn judge(versions: &[Version], sights: &[Sight], sight: &Sight) -> Option<Wrong> {
    let made = |version: &&Version| version.value == sight.value && version.asked < sight.done;
    let made: Vec<_> = versions.iter().filter(made).collect();
    if made.is_empty() {
        return Some(Wrong::Invented);
    }
    let done = |other: &&Version| other.hides.is_some_and(|hides| hides < sight.asked);
    let hiding = |version: &Version| {
        versions.iter().filter(done).filter(|other| version.is_followed_by(other)).collect()
    };
    let hiding: Vec<Vec<&Version>> = made.into_iter().map(hiding).collect();
    if hiding.iter().any(Vec::is_empty) {
        return None;
    }
    let newer = |seen: &Sight| hiding.iter().flatten().any(|other| other.value == seen.value);
    let (before, after) = (
        sights.iter().any(|seen| seen.done < sight.asked && newer(seen)),
        sights.iter().any(|seen| seen.asked > sight.done && newer(seen)),
    );
    Some(match (before, after) {
        (_, true) => Wrong::Stale,
        (true, false) => Wrong::Doubled,
        (false, false) => Wrong::Lost,
    })
}

/// Whether the content had been replaced by one that was found before. Zeroes may be written twice.
fn back_again(versions: &[Version], earlier: &[Sight], sight: &Sight) -> Option<Wrong> {
    if versions.iter().filter(|version| version.value == sight.value).count() != 1 {
        return None;
    }
    let version = versions.iter().find(|version| version.value == sight.value)?;
    let before = || earlier.iter().filter(|seen| seen.done < sight.asked);
    let mut others = before().filter(|seen| seen.value != sight.value);
    let replaced = others.any(|other| {
        let by = |by: &Version| by.value == other.value;
        let follows = versions.iter().filter(|one| by(one)).all(|one| version.is_followed_by(one));
        let seen_first = before().any(|seen| seen.value == sight.value && seen.done < other.asked);
        follows || seen_first
    });
    replaced.then_some(Wrong::Doubled)
}
