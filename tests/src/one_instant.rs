//! Copies of the two disks that the guest of [`fio_guest`](crate::fio_guest) writes: whether they are of one instant, by the history of
//! the program that writes one of them, and by numbers that the guest writes to one disk and then to the other.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_history::load::{DISK, Flushed, UNIT, UNITS, in_a_copy};
use vmseal_history::stamp::{self, Found};

use crate::fio_guest::HISTORY_AT;
use crate::guest::Console;
use crate::installation::{Installation, text};
use crate::shell_guest::run;

/// Where the numbers are, in MiB: at places that neither the system nor the other programs use.
const ON_SYSTEM: u32 = 61;
const ON_DATA: u32 = 31;

/// The guest writes a number to its first disk, then the same one to the disk `data`, and goes on with the next one until fio is stopped.
/// Each is answered before the next is written, so that at any instant the first disk has the number of the other one, or the next.
pub fn number_disks(console: &mut Console) {
    let write = |disk: &str, at: u32| {
        let block = at * 2048;
        format!(
            "printf '%-511s\\n' N-$i | dd of=/dev/{disk} bs=512 seek={block} conv=notrunc,fsync 2>/dev/null"
        )
    };
    let (first, second) = (write("vda", ON_SYSTEM), write("vdc", ON_DATA));
    // It rests, as one that never did would take an emulated processor from fio.
    let both = format!("i=$((i + 1)); {first}; {second}; usleep 20000");
    let begin = format!("i=0; {both}; (while [ ! -e /stop ]; do {both}; done) &");
    run(console, &format!("{begin} echo NUMBERED-$((6 * 7))"), "NUMBERED-42").unwrap();
}

/// What the two disks hold.
pub struct Disks {
    system: Vec<u8>,
    data: Vec<u8>,
}

impl Disks {
    /// As they are exported: those of a VM that is off, or what a snapshot keeps of them.
    #[must_use]
    pub fn of(here: &Installation, vm: &str, snapshot: Option<&str>) -> Self {
        let exported = |disk: &str| {
            let to = here.path("exported");
            let mut export = vec!["disk", "export", vm, disk, "--format", "raw", "--plaintext"];
            export.extend(["--to", text(&to).unwrap()]);
            export.extend(snapshot.into_iter().flat_map(|name| ["--snapshot", name]));
            here.vmseal(&export).unwrap();
            let content = std::fs::read(&to).unwrap();
            std::fs::remove_file(&to).unwrap();
            content
        };
        Self { system: exported("disk0"), data: exported("data") }
    }

    /// They are of one instant, after the guest had said the first of these and before it said the second.
    pub fn are_of_one_instant(&self, [before, after]: [&Flushed; 2]) {
        let wrong = in_a_copy(before, after, &found_on(&self.data));
        let first: Vec<_> = wrong.iter().take(5).collect();
        let count = wrong.len();
        assert!(wrong.is_empty(), "{count} units, not of {before} to {after}: {first:?}");
        let (system, data) = (number_at(&self.system, ON_SYSTEM), number_at(&self.data, ON_DATA));
        assert!(system == data || system == data + 1, "numbers of two instants: {system}, {data}");
    }

    /// They hold the same as others.
    pub fn are(&self, others: &Self, what: &str) {
        let disks = [("disk0", &self.system, &others.system), ("data", &self.data, &others.data)];
        for (disk, one, other) in disks {
            assert!(
                one == other,
                "{what}: {disk} holds something else, first at byte {:?}",
                one.iter().zip(other).position(|(one, other)| one != other)
            );
        }
    }
}

/// What the units hold of the program whose history is judged.
fn found_on(data: &[u8]) -> Vec<Found> {
    let part = &data[(HISTORY_AT as usize) << 20..][..UNITS as usize * UNIT];
    let units = (0..).zip(part.chunks(UNIT));
    units.map(|(unit, bytes)| stamp::find(bytes, DISK, unit)).collect()
}

/// The number at a place of a disk.
fn number_at(disk: &[u8], mib: u32) -> u64 {
    let said = String::from_utf8_lossy(&disk[(mib as usize) << 20..][..512]);
    let number = said.strip_prefix("N-").and_then(|rest| rest.split(' ').next()?.parse().ok());
    number.unwrap_or_else(|| panic!("no number is there: {said}"))
}
