//! The guest of [`shell_guest`] in a VM, which has a marker on its disk and writes numbers there that it reads again: what a
//! copied disk must not lose.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use crate::guest::Console;
use crate::installation::Installation;
use crate::shell_guest::{self, booted, run};

/// What the guest writes into a place of its disk that its system does not use.
pub const MARKER: &str = "VMSEAL-MARKER-7";
/// What cloud-init is told.
pub const SECRET: &str = "VMSEAL-SECRET-9";
/// Where the marker is, in MiB.
pub const MARKER_AT: u32 = 60;
/// Where the numbers are, in MiB.
pub const COUNTER_AT: u32 = 61;

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const IN_MEMORY: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2099");

/// An installation with this guest in a running VM.
#[must_use]
pub fn started(vm: &str, policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    // A disk for cloud-init, which the guest can only read.
    std::fs::write(here.path("user-data"), format!("#cloud-config\n# {SECRET}\n")).unwrap();
    let documents = format!("user-data={}", here.path("user-data").display());
    shell_guest::start(&here, vm, policy, &["--cloud-init", &documents]).unwrap();
    let mut console = booted(&here, vm).unwrap();
    write_marker(&mut console);
    (here, console)
}

/// The same without a disk for cloud-init: only the disk that the guest writes.
#[must_use]
pub fn started_with_one_disk(vm: &str, policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, vm, policy, &[]).unwrap();
    let mut console = booted(&here, vm).unwrap();
    write_marker(&mut console);
    (here, console)
}

/// The guest writes the marker.
pub fn write_marker(console: &mut Console) {
    let write = format!(
        "echo {MARKER} | dd of=/dev/vda bs=1M seek={MARKER_AT} conv=notrunc 2>/dev/null; sync"
    );
    run(console, &format!("{write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

/// The guest reads what is on its disks.
pub fn read_marker(console: &mut Console) {
    run(console, &format!("grep -ao '{SECRET}' /dev/vdb | head -n 1"), SECRET).unwrap();
    read_marker_of_disk(console);
}

/// The guest reads what it has written.
pub fn read_marker_of_disk(console: &mut Console) {
    let read = format!(
        "echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M skip={MARKER_AT} count=1 2>/dev/null | head -n 1"
    );
    run(console, &read, MARKER).unwrap();
}

/// The guest writes numbers, reads each again from the disk, and says which one was lost. It rests between them, as one that
/// never did would take an emulated processor from all other tests; in soak runs it does not.
pub fn count(console: &mut Console) {
    let block = COUNTER_AT * 2048;
    let rest = if std::env::var_os("VMSEAL_ALL").is_some() { ":" } else { "usleep 100000" };
    let body = format!(
        "i=$((i + 1)); printf '%-511s\\n' N-$i | dd of=/dev/vda bs=512 seek={block} conv=notrunc,fsync 2>/dev/null; \
         echo 1 >/proc/sys/vm/drop_caches; r=$(dd if=/dev/vda bs=512 skip={block} count=1 2>/dev/null); \
         case $r in N-$i\\ *) ;; *) echo LOST-$i; : >/lost;; esac; {rest}"
    );
    let begin = format!("(i=0; while [ ! -e /stop ]; do {body}; done; echo COUNTED-$i) &");
    run(console, &format!("rm -f /stop; {begin} echo BEGUN-$((6 * 7))"), "BEGUN-42").unwrap();
}

/// The guest stops, and has lost nothing.
pub fn stop_counting(console: &mut Console) {
    // A console that is opened again repeats what was said at an earlier stop; and what the guest says before this is not looked at
    // any more, so it keeps in mind itself whether it has lost anything.
    let mark = fastrand::u32(..);
    let verdict = format!("ENDED-{mark}-$([ -e /lost ] && echo lost || echo well)");
    console.type_text(&format!("touch /stop; wait; echo {verdict}\n")).unwrap();
    let ended = console.expect(&format!("ENDED-{mark}-"), "well".len()).unwrap();
    assert_eq!(ended, "well", "the guest has lost what it wrote");
}

/// The guest gets a text into its memory, and counts.
pub fn remember(console: &mut Console) {
    let (one, two) = IN_MEMORY;
    run(console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(console);
}

/// The guest of a VM has what it was given by [`remember`] and [`write_marker`], has lost no number, and goes on counting.
pub fn has_lost_nothing(here: &Installation, vm: &str) {
    let mut console = here.console(vm).unwrap();
    stop_counting(&mut console);
    let (one, two) = IN_MEMORY;
    run(&mut console, "echo HAS-$m-", &format!("HAS-{one}{two}-")).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
}

/// The guest of a VM boots again, has on its disk what it wrote in its former life, and counts.
pub fn starts_again(here: &Installation, vm: &str) {
    here.vmseal(&["vm", "start", vm]).unwrap();
    let mut console = booted(here, vm).unwrap();
    read_marker_of_disk(&mut console);
    remember(&mut console);
}
