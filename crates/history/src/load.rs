//! What `vmseal-guest-history` writes. Each write follows from its number alone, so that what was flushed is known when the guest has
//! lost its memory: by four numbers that somebody else has kept.
//!
//! Each writer has units of its own and writes one after the other: no two writes in flight meet, as with real guests.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::checker::{Finding, Wrong};
use crate::stamp::Found;

/// The number of the disk in its stamps.
pub const DISK: u64 = 0x6775_6573_7473;

/// The length of a unit in bytes: the smallest part of a disk that can be written.
pub const UNIT: usize = 512;

/// How many write at once.
pub const WRITERS: usize = 3;

/// How many units a writer has: 256 KiB.
const UNITS_EACH: u64 = 512;

/// How many units there are.
pub const UNITS: u64 = UNITS_EACH * WRITERS as u64;

/// Where half of a writer's requests begin: six sectors, so that many meet in one.
const CROWDED: u64 = 48;

/// The most units of a request: some sectors, with parts of others.
pub const LONGEST: u64 = 20;

/// Where a write's number has the step and the generation. A generation has fewer steps than there are numbers between the two.
const STEP_AT: u32 = 8;
const GENERATION_AT: u32 = 40;

/// A write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stroke {
    /// How often the guest had been started before.
    pub generation: u64,
    /// Who writes.
    pub writer: usize,
    /// How many writes of this writer are before it in its generation. The first one is of all of the writer's units.
    pub step: u64,
}

impl Stroke {
    /// Its number.
    #[must_use]
    pub fn sequence(self) -> u64 {
        self.generation << GENERATION_AT | self.step << STEP_AT | self.writer as u64
    }

    /// The write of a number.
    #[must_use]
    pub fn of(sequence: u64) -> Self {
        Self {
            generation: sequence >> GENERATION_AT,
            writer: (sequence & ((1 << STEP_AT) - 1)) as usize,
            step: (sequence & ((1 << GENERATION_AT) - 1)) >> STEP_AT,
        }
    }

    /// The units that it is of.
    #[must_use]
    pub fn units(self) -> Range<u64> {
        let begin = self.writer as u64 * UNITS_EACH;
        if self.step == 0 {
            return begin..begin + UNITS_EACH;
        }
        let mut random = fastrand::Rng::with_seed(self.sequence());
        let most = if random.bool() { CROWDED } else { UNITS_EACH };
        let first = random.u64(..most);
        let end = (first + random.u64(1..=LONGEST)).min(UNITS_EACH);
        begin + first..begin + end
    }
}

/// What is on the disk for good: the last step of each writer that was answered before a flush that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flushed {
    /// The generation.
    pub generation: u64,
    /// The last step of each writer.
    pub steps: [u64; WRITERS],
}

impl fmt::Display for Flushed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.generation)?;
        self.steps.iter().try_for_each(|step| write!(f, " {step}"))
    }
}

/// That a text is not what [`Flushed`] is shown as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFlushed;

impl fmt::Display for NotFlushed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a generation and a step of each of {WRITERS} writers")
    }
}

impl std::error::Error for NotFlushed {}

impl FromStr for Flushed {
    type Err = NotFlushed;

    fn from_str(text: &str) -> Result<Self, NotFlushed> {
        let numbers: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
        let numbers = numbers.map_err(|_| NotFlushed)?;
        let (generation, steps) = numbers.split_first().ok_or(NotFlushed)?;
        let steps: [u64; WRITERS] = steps.try_into().map_err(|_| NotFlushed)?;
        Ok(Self { generation: *generation, steps })
    }
}

/// What is wrong with the content of a disk whose guest has lost its power, and had this flushed. What followed may be there or not.
#[must_use]
pub fn after_a_cut(flushed: &Flushed, found: &[Found]) -> Vec<Finding> {
    let generation = flushed.generation;
    let mut last = vec![0_u64; found.len()];
    for (writer, steps) in flushed.steps.iter().enumerate() {
        for step in 1..=*steps {
            for unit in (Stroke { generation, writer, step }).units() {
                last[unit as usize] = step;
            }
        }
    }
    let judged = (0..).zip(found).zip(last).filter_map(|((unit, found), last)| {
        let wrong = judge(flushed, unit, *found, last)?;
        Some(Finding { wrong, unit, found: *found, at: 0 })
    });
    judged.collect()
}

/// What is wrong with one unit, whose last flushed write is of the step `last`.
fn judge(flushed: &Flushed, unit: u64, found: Found, last: u64) -> Option<Wrong> {
    let sequence = match found {
        Found::Torn => return Some(Wrong::Torn),
        Found::Misplaced(_) => return Some(Wrong::Misplaced),
        // A unit's first write is flushed with all others.
        Found::Zeroes => return Some(Wrong::Unflushed),
        Found::Write(sequence) => sequence,
    };
    let stroke = Stroke::of(sequence);
    if (stroke.generation, stroke.step) < (flushed.generation, last) {
        return Some(Wrong::Unflushed);
    }
    let is_made = stroke.generation == flushed.generation
        && stroke.writer < WRITERS
        && stroke.units().contains(&unit);
    (!is_made).then_some(Wrong::Invented)
}

/// What is wrong with a copy of the disk as it was at one instant, after the program had said `before` and before it said `after`. A writer
/// begins a write when the one before is answered: where the copy holds one, all that its writer made before are there, as after a flush.
#[must_use]
pub fn in_a_copy(before: &Flushed, after: &Flushed, found: &[Found]) -> Vec<Finding> {
    let mut answered = before.clone();
    let mut wrong = Vec::new();
    for (unit, found) in (0..).zip(found) {
        let Found::Write(sequence) = *found else { continue };
        let Stroke { generation, writer, step } = Stroke::of(sequence);
        if generation != before.generation || writer >= WRITERS {
            continue;
        }
        if step > after.steps[writer] + 1 {
            wrong.push(Finding { wrong: Wrong::Invented, unit, found: *found, at: 0 });
        } else {
            answered.steps[writer] = answered.steps[writer].max(step.saturating_sub(1));
        }
    }
    wrong.extend(after_a_cut(&answered, found));
    wrong
}

/// What is neither zeroes nor a whole unit of this place, where it is not known what was flushed.
#[must_use]
pub fn garbled(found: &[Found]) -> Vec<Finding> {
    let judged = (0..).zip(found).filter_map(|(unit, found)| {
        let wrong = match found {
            Found::Torn => Wrong::Torn,
            Found::Misplaced(_) => Wrong::Misplaced,
            Found::Zeroes | Found::Write(_) => return None,
        };
        Some(Finding { wrong, unit, found: *found, at: 0 })
    });
    judged.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a disk holds after these steps of each writer of a generation.
    fn content(generation: u64, steps: [u64; WRITERS]) -> Vec<Found> {
        let mut found = vec![Found::Zeroes; UNITS as usize];
        for (writer, steps) in steps.into_iter().enumerate() {
            for step in 0..=steps {
                let stroke = Stroke { generation, writer, step };
                for unit in stroke.units() {
                    found[unit as usize] = Found::Write(stroke.sequence());
                }
            }
        }
        found
    }

    fn wrong(flushed: &Flushed, found: &[Found]) -> Vec<Wrong> {
        let mut wrong: Vec<_> =
            after_a_cut(flushed, found).into_iter().map(|finding| finding.wrong).collect();
        wrong.dedup();
        wrong
    }

    #[test]
    fn a_write_is_known_by_its_number_and_stays_in_the_units_of_its_writer() {
        for (generation, writer, step) in [(0, 0, 0), (3, 2, 77), (1, 1, (1 << 32) - 1)] {
            let stroke = Stroke { generation, writer, step };
            assert_eq!(Stroke::of(stroke.sequence()), stroke);
        }
        let mut written = [false; UNITS as usize];
        for step in 1..4000 {
            let units = (Stroke { generation: 2, writer: 1, step }).units();
            assert!(!units.is_empty() && units.end - units.start <= LONGEST, "{units:?}");
            assert!(UNITS_EACH <= units.start && units.end <= 2 * UNITS_EACH, "{units:?}");
            units.for_each(|unit| written[unit as usize] = true);
        }
        assert_eq!(written.iter().filter(|unit| **unit).count(), UNITS_EACH as usize);
    }

    #[test]
    fn what_was_flushed_is_missed_after_a_cut_and_what_followed_is_not() {
        let flushed = Flushed { generation: 1, steps: [40, 0, 700] };
        assert_eq!(flushed.to_string().parse(), Ok(flushed.clone()));
        for text in ["", "1 2 3", "1 2 3 4 5", "1 2 3 x"] {
            assert_eq!(text.parse::<Flushed>(), Err(NotFlushed), "{text}");
        }
        for steps in [[40, 0, 700], [41, 9, 900]] {
            assert_eq!(wrong(&flushed, &content(1, steps)), [], "{steps:?}");
        }
        // An older content of the disk, and one of the guest's former life.
        assert_eq!(wrong(&flushed, &content(1, [40, 0, 650])), [Wrong::Unflushed]);
        assert_eq!(wrong(&flushed, &content(0, [90, 90, 900])), [Wrong::Unflushed]);
        let mut found = content(1, [40, 0, 700]);
        found[3] = Found::Torn;
        found[600] = Found::Zeroes;
        // Writes that were never made there.
        found[700] = Found::Write(Stroke { generation: 1, writer: 0, step: 50 }.sequence());
        found[1500] = Found::Write(Stroke { generation: 2, writer: 2, step: 0 }.sequence());
        let expected = [Wrong::Torn, Wrong::Unflushed, Wrong::Invented];
        assert_eq!(wrong(&flushed, &found), expected);
        assert_eq!(garbled(&found).len(), 1);
    }

    #[test]
    fn a_copy_holds_what_was_there_at_one_instant_between_two_that_are_known() {
        let [before, after] =
            [[40, 0, 700], [400, 9, 720]].map(|steps| Flushed { generation: 1, steps });
        let wrong = |found: &[Found]| {
            let findings = in_a_copy(&before, &after, found).into_iter();
            let mut wrong: Vec<_> = findings.map(|finding| finding.wrong).collect();
            wrong.dedup();
            wrong
        };
        for steps in [[40, 0, 700], [100, 3, 710], [401, 10, 721]] {
            assert_eq!(wrong(&content(1, steps)), [], "{steps:?}");
        }
        // A write that was in flight is done in part.
        let mut found = content(1, [100, 3, 710]);
        let begun = Stroke { generation: 1, writer: 0, step: 101 };
        found[begun.units().start as usize] = Found::Write(begun.sequence());
        assert_eq!(wrong(&found), []);
        assert_eq!(wrong(&content(1, [39, 0, 700])), [Wrong::Unflushed]);
        assert_eq!(wrong(&content(1, [402, 0, 700])), [Wrong::Invented]);
        // Each half is right, and they are of two instants.
        let [early, late] = [[100, 3, 710], [390, 3, 710]].map(|steps| content(1, steps));
        assert!(wrong(&early).is_empty() && wrong(&late).is_empty());
        let middle = UNITS_EACH as usize / 2;
        for [first, rest] in [[&early, &late], [&late, &early]] {
            let found = [&first[..middle], &rest[middle..]].concat();
            assert_eq!(wrong(&found), [Wrong::Unflushed]);
        }
    }
}
