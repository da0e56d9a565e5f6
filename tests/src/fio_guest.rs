//! fio in the guest of [`shell_guest`](crate::shell_guest), which brings it on a disk of its own: it writes to a disk all the
//! time, and verifies what it has written. Beside it `vmseal-guest-history` writes and reads the end of the same disk, and judges what it
//! sees (docs/decisions/236).

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;
use std::process::Command;

use vmseal_history::load::Flushed;

use crate::eventually;
use crate::guest::{Console, built};
use crate::installation::{Installation, text};
use crate::program;
use crate::shell_guest::{self, booted, run};

/// What the program whose history is judged says before what it has flushed.
const FLUSHED: &str = "VMSEAL-DURABLE ";

/// Where its part of the disk `data` begins, in MiB, and fio's ends.
pub(crate) const HISTORY_AT: u32 = 30;

/// Both programs and all that they need, as a tar that the guest reads from a disk.
fn tools(here: &Installation) -> PathBuf {
    let (root, tar) = (here.path("tools"), here.path("tools.tar"));
    std::fs::create_dir(&root).unwrap();
    let initrd = built("build-test-initramfs", &[]).unwrap().join("initrd");
    let history = program("vmseal-guest-history").unwrap();
    // The libraries of fio are those of this machine, where the other one was built.
    let pack = "cpio --quiet -id lib lib64 'usr/bin/fio' 'usr/lib64/*' 'usr/lib/x86_64-linux-gnu/*' <\"$1\" && strip -o usr/bin/history \"$3\" && tar -cf \"$2\" .";
    let mut command = Command::new("sh");
    command.args(["-c", pack, "sh"]).arg(initrd).arg(&tar).arg(history).current_dir(&root);
    assert!(command.status().unwrap().success());
    std::fs::remove_dir_all(root).unwrap();
    tar
}

/// A VM with this guest that runs: fio has yet to begin. All of its disks but that of fio itself are on this datastore.
pub fn started(here: &Installation, vm: &str, policy: &str, datastore: &str) -> Console {
    let image = shell_guest::image().unwrap();
    let tools = tools(here);
    let [system, tools] = [&image, &tools].map(|it| text(it).unwrap());
    let disks = [
        format!("datastore={datastore},format=raw,image={system},size=64MiB"),
        format!("name=tools,datastore=local,format=raw,image={tools}"),
        format!("name=data,datastore={datastore},size=32MiB"),
    ];
    let card = "user,mac=52:54:0a:00:02:0f";
    let mut create = vec!["vm", "create", vm, "--policy", policy, "--memory", "384MiB"];
    create.extend(["--nic", card]);
    create.extend(disks.iter().flat_map(|disk| ["--disk", disk]));
    here.vmseal(&create).unwrap();
    here.vmseal(&["vm", "start", vm]).unwrap();
    ready(here, vm)
}

/// The guest has booted, and has fio.
pub fn ready(here: &Installation, vm: &str) -> Console {
    let mut console = booted(here, vm).unwrap();
    run(&mut console, "tar -xf /dev/vdb -C / && echo TOOLS-$((6 * 7))", "TOOLS-42").unwrap();
    console
}

/// fio begins: blocks of 4 KiB at random places of most of the disk `data`, eight at a time, past all caches; each is read again and
/// compared soon after it was written, and all of them at the end of a round of a thousand.
pub fn write_and_verify(console: &mut Console, writes_a_second: u32) {
    let job = format!(
        "--name=verify --filename=/dev/vdc --ioengine=libaio --iodepth=8 --direct=1 --rw=randwrite --bs=4k --size={HISTORY_AT}M \
               --io_size=4M --rate_iops={writes_a_second} --verify=crc32c --verify_fatal=1 --verify_backlog=32 --randseed=$i"
    );
    let round = format!(
        "i=$((i + 1)); /usr/bin/fio {job} >/fio.log 2>&1 || {{ cp /fio.log /failed; touch /stop; }}"
    );
    let begin =
        format!("rm -f /stop; (i=0; while [ ! -e /stop ]; do {round}; done; echo $i >/rounds) &");
    run(console, &format!("{begin} echo BEGUN-$((6 * 7))"), "BEGUN-42").unwrap();
}

/// The program whose history is judged has begun, in the guest's life of this number, counted from 0; `former` is what it had flushed in
/// the one before ([`flushed`]). It ends with fio, which has begun before it.
pub fn keep_history(console: &mut Console, life: u32, former: Option<&str>) {
    let former = former.unwrap_or_default();
    let history = format!("/usr/bin/history /dev/vdc {HISTORY_AT} /stop {life} {former}");
    let failed = "cat /history.log; cp /history.log /failed; touch /stop";
    let begin = format!("{{ {history} 2>/history.log || {{ {failed}; }}; }} &");
    // It has written all of its part then, so that nothing of a former life is there.
    run(console, &begin, &format!("{FLUSHED}{life} ")).unwrap();
}

/// What the program had flushed last in this life of the guest, as far as this console has heard of it.
#[must_use]
pub fn flushed(console: &Console, life: u32) -> Option<String> {
    let of_life = |steps: &str| format!("{life} {steps}");
    let is_whole = |steps: &str| of_life(steps).parse::<Flushed>().is_ok();
    let steps = console.last_line(&format!("{FLUSHED}{life} "), is_whole)?;
    Some(of_life(&steps))
}

/// What the program had flushed in this life of the guest by a flush that it began after this was called.
pub fn next_flushed(console: &mut Console, life: u32) -> Flushed {
    // What the guest says from here on it says after this.
    run(console, "echo HEARD-$((6 * 7))", "HEARD-42").unwrap();
    // The flush that the first line is about may have begun before.
    console.expect(&format!("{FLUSHED}{life} "), 0).unwrap();
    let next = eventually("the guest flushes", || flushed(console, life)).unwrap();
    next.parse().unwrap()
}

/// fio ends, and found everything that it wrote; so does the program whose history is judged, if it has begun.
pub fn stop_and_check(console: &mut Console) {
    // A console that is opened again repeats what was said at an earlier check.
    let mark = fastrand::u32(..);
    run(console, &format!("touch /stop; wait; echo ENDED-{mark}"), &format!("ENDED-{mark}"))
        .unwrap();
    let verdict = format!("VERIFIED-{mark}-$([ -e /failed ] && echo badly || echo well)");
    let wanted = format!("VERIFIED-{mark}-well");
    run(console, &format!("[ ! -e /failed ] || cat /failed; echo {verdict}"), &wanted).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_flushed_is_that_of_the_last_line_that_is_whole() {
        let lines = [
            "VMSEAL-DURABLE 0 90 90 90",
            "VMSEAL-DURABLE 1 4VMSEAL-DURABLE 1 5 6 7",
            "VMSEAL-DURABLE 1 8 [   9.1] a line of the kernel",
            "VMSEAL-DURABLE 1 9 9 9",
        ];
        let said = lines.join("\r\n");
        let console = Console::open(Command::new("printf").args(["%s", said.as_str()])).unwrap();
        eventually("all is said", || console.has_said("9 9 9").then_some(())).unwrap();
        assert_eq!(flushed(&console, 1).as_deref(), Some("1 5 6 7"));
        assert_eq!(flushed(&console, 2), None);
    }
}
