//! A guest with a disk of `vmseal-filter` is moved by QEMU while it reads and writes: a move that is given up leaves it as
//! it was, a filter that dies meanwhile is followed by another, and in the end it goes on elsewhere with the data it had.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::Holes;
use vmseal_secret::{DEK_LEN, SecretBytes};
use vmseal_tests::filter::{Disk, Filter};
use vmseal_tests::process::Process;
use vmseal_tests::{eventually, test_guest};

/// The disk, which the guest reads as a whole in each round: one second or two, emulated.
const SIZE: u64 = 4 << 20;

/// How long a move, or some rounds of the guest, may take: emulated, on a machine that runs other tests.
const PATIENCE: Duration = Duration::from_secs(300);

/// How soon to look again.
const STEP: Duration = Duration::from_millis(100);

/// So slow that a move does not end before it is given up, in bytes a second.
const SLOW: u64 = 1 << 20;

/// The guest compares its disk with a copy in its memory, again and again: read from the disk, which fills the memory that
/// files are cached in, and from that memory before it is read again. Others read meanwhile.
const SCRIPT: &str = r"
dd if=/dev/urandom of=/tmp/copy bs=1M count=4 2>/dev/null
dd if=/tmp/copy of=/dev/vda bs=1M oflag=direct 2>/dev/null
for reader in 1 2; do
    while :; do dd if=/dev/vda of=/dev/null bs=64k iflag=direct 2>/dev/null || echo BAD-READER; done &
done
round=0
while :; do
    at=$((round * 37 % 1000))
    dd if=/dev/urandom of=/tmp/new bs=4k count=16 2>/dev/null
    dd if=/tmp/new of=/tmp/copy bs=4k seek=$at conv=notrunc 2>/dev/null
    dd if=/tmp/new of=/dev/vda bs=4k seek=$at conv=notrunc oflag=direct 2>/dev/null || echo BAD-WRITE
    echo 3 >/proc/sys/vm/drop_caches
    cmp /tmp/copy /dev/vda || echo BAD-DISK
    cmp /tmp/copy /dev/vda || echo BAD-MEMORY
    round=$((round + 1))
    echo ROUND-$round-
done
";

/// A QEMU with the guest, or one that waits for it.
struct Machine {
    qmp: BufReader<UnixStream>,
    serial: PathBuf,
    _process: Process,
}

impl Machine {
    fn start(directory: &Path, disk: &Path, waits: bool) -> Self {
        let images = test_guest::images().unwrap();
        let path = |name: &str| directory.join(name);
        std::fs::write(path("script"), SCRIPT).unwrap();
        let show = |name: &str| path(name).display().to_string();
        let memory =
            format!("memory-backend-file,id=m0,size=512M,mem-path={},share=on", show("memory"));
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-accel", "tcg", "-machine", "q35,memory-backend=m0", "-cpu", "max"]);
        qemu.args(["-m", "512", "-smp", "2", "-nodefaults", "-display", "none", "-no-reboot"]);
        qemu.arg("-object").arg(memory);
        qemu.arg("-kernel").arg(images.join("vmlinuz")).arg("-initrd").arg(images.join("initrd"));
        qemu.args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check"]);
        qemu.arg("-fw_cfg").arg(format!("name=opt/vmseal/run,file={}", show("script")));
        qemu.arg("-serial").arg(format!("file:{}", show("serial")));
        qemu.arg("-qmp").arg(format!("unix:{},server=on,wait=off", show("qmp")));
        qemu.arg("-chardev").arg(format!("socket,id=c0,path={},reconnect=1", disk.display()));
        qemu.args(["-device", "vhost-user-blk-pci,chardev=c0,num-queues=2"]);
        if waits {
            qemu.args(["-incoming", "defer"]);
        }
        let process = Process::start(&mut qemu, &path("qemu.log")).unwrap();
        let stream = eventually("QEMU answers", || UnixStream::connect(path("qmp")).ok());
        let stream = stream.unwrap_or_else(|error| {
            panic!("{error}: {}", std::fs::read_to_string(path("qemu.log")).unwrap())
        });
        let mut machine =
            Self { qmp: BufReader::new(stream), serial: path("serial"), _process: process };
        machine.line();
        machine.command("qmp_capabilities", json!({}));
        machine
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.qmp.read_line(&mut line).unwrap() > 0, "QEMU has ended");
        serde_json::from_str(&line).unwrap()
    }

    fn command(&mut self, name: &str, arguments: Value) -> Value {
        let command = json!({ "execute": name, "arguments": arguments });
        self.qmp.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{name}: {answer}");
            if let Some(result) = answer.get("return") {
                return result.clone();
            }
        }
    }

    fn migration(&mut self) -> String {
        let about = self.command("query-migrate", json!({}));
        about["status"].as_str().unwrap_or("none").to_owned()
    }

    fn comes_to(&mut self, status: &str) {
        let begun = Instant::now();
        while self.migration() != status {
            let about = self.command("query-migrate", json!({}));
            assert!(begun.elapsed() < PATIENCE, "not {status}: {about}");
            std::thread::sleep(STEP);
        }
    }

    fn slow_down(&mut self, bytes: u64) {
        self.command("migrate-set-parameters", json!({ "max-bandwidth": bytes }));
    }

    fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.serial).unwrap_or_default()).into_owned()
    }

    /// Waits until the guest has gone through this many more rounds, all of them good.
    fn goes_on(&self, rounds: usize) {
        let count = || self.said().matches("ROUND-").count();
        let (begun, until) = (Instant::now(), count() + rounds);
        while count() < until {
            let said = self.said();
            assert!(!said.contains("BAD") && !said.contains("differ"), "{said}");
            assert!(begun.elapsed() < PATIENCE, "the guest stands still: {said}");
            std::thread::sleep(STEP);
        }
    }
}

/// Whether a filter has a log of QEMU's.
fn logs(filter: &Filter) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", filter.id())).unwrap();
    maps.contains("/memfd:vhost-log")
}

#[test]
fn a_guest_is_moved_while_it_uses_its_disk() {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let [here, there] = ["here", "there"].map(|name| place.path().join(name));
    for directory in [&here, &there] {
        std::fs::create_dir(directory).unwrap();
    }
    let image = place.path().join("image");
    File::create(&image).unwrap().set_len(SIZE).unwrap();
    let dek = SecretBytes::random(DEK_LEN).unwrap();
    let (holes, stall, channel) = (Holes::Zero, None, None);
    let disk =
        Disk { image: &image, offset: 0, size: SIZE, dek: Some(&dek), holes, stall, channel };
    let mut filter = Filter::start_unlocked(&here, &disk).unwrap();
    let mut source = Machine::start(&here, filter.socket(), false);
    source.goes_on(2);
    assert!(!logs(&filter), "it logs before it is asked to");

    // Given up, after the filter has died in the middle of it.
    source.slow_down(SLOW);
    source.command("migrate", json!({ "uri": "exec:cat >/dev/null" }));
    source.comes_to("active");
    source.goes_on(2);
    assert!(logs(&filter), "it does not log");
    filter.kill();
    filter = Filter::start_unlocked(&here, &disk).unwrap();
    source.goes_on(2);
    assert_eq!(source.migration(), "active");
    assert!(logs(&filter), "the next filter does not log");
    source.command("migrate_cancel", json!({}));
    source.comes_to("cancelled");
    eventually("the log is given back", || (!logs(&filter)).then_some(())).unwrap();
    source.goes_on(2);

    // To another QEMU, with a filter of its own.
    let other = Filter::start_unlocked(&there, &disk).unwrap();
    let mut destination = Machine::start(&there, other.socket(), true);
    let uri = json!({ "uri": format!("unix:{}", there.join("migration").display()) });
    destination.command("migrate-incoming", uri.clone());
    source.slow_down(1 << 33);
    source.command("migrate", uri);
    source.comes_to("completed");
    filter.stop().unwrap();
    eventually("the guest runs", || {
        (destination.command("query-status", json!({}))["status"] == "running").then_some(())
    })
    .unwrap();
    destination.goes_on(4);
    let said = source.said() + &destination.said();
    assert!(!said.contains("BAD"), "{said}");
}
