//! Guests that panic: a real kernel does, and says so by pvpanic. Its host stops it, restarts it or leaves it as it is, and writes
//! encrypted core dumps by itself.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::two_hosts::{HERE, QEMU, THERE, only_host};

const VM: &str = "web";

/// Generous: the machine may be busy with other tests.
const BOOT_TIMEOUT: Duration = Duration::from_secs(240);

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const SECRET: (&str, &str) = ("MARKER-IN-", "A-PANIC-5127");

fn started(policy: &str, more: &[&str]) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, VM, policy, more).unwrap();
    let mut console = booted(&here, VM).unwrap();
    remember(&mut console);
    (here, console)
}

fn remember(console: &mut Console) {
    let (one, two) = SECRET;
    run(console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
}

/// The guest's kernel panics after this many seconds.
fn panics_in(console: &mut Console, seconds: u32) {
    let panic = format!("(sleep {seconds}; echo c > /proc/sysrq-trigger) & echo SOON-$((6 * 7))");
    run(console, &panic, "SOON-42").unwrap();
}

/// The guest has booted again: its shell knows nothing of the one before.
fn boots_again(here: &Installation) -> Console {
    static ASKED: AtomicU32 = AtomicU32::new(1000);
    let begun = Instant::now();
    loop {
        // A new number each time: what was said before is shown again.
        let number = ASKED.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut console) = here.console(VM)
            && console.type_text(&format!("echo SHELL-${{m:-NEW}}-$(({number} + 1))\n")).is_ok()
        {
            std::thread::sleep(Duration::from_secs(2));
            if console.has_said(&format!("SHELL-NEW-{}", number + 1)) {
                return console;
            }
        }
        assert!(begun.elapsed() < BOOT_TIMEOUT, "the guest does not boot again");
    }
}

fn has_secret(file: &Path) -> bool {
    let secret = format!("{}{}", SECRET.0, SECRET.1).into_bytes();
    let content = std::fs::read(file).unwrap();
    contains(&content, secret)
}

/// Where the core dumps of the VM are.
fn home(here: &Installation) -> PathBuf {
    here.images(VM).unwrap()[0].parent().unwrap().to_owned()
}

/// The files of core dumps, whole or not.
fn cores(here: &Installation) -> Vec<PathBuf> {
    cores_in(&home(here))
}

fn cores_in(home: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    let is_core =
        |file: &PathBuf| file.file_name().unwrap().to_string_lossy().starts_with("vm.core-");
    files.filter(is_core).collect()
}

fn is_half(core: &Path) -> bool {
    core.extension().is_some_and(|ending| ending == "creating")
}

fn dumps(here: &Installation) -> Vec<Value> {
    here.json(&["dump", "list", VM]).unwrap().as_array().unwrap().clone()
}

fn events(here: &Installation, kind: &str) -> Vec<String> {
    let events = here.json(&["events"]).unwrap();
    let of_kind = events.as_array().unwrap().iter().filter(|event| event["kind"] == kind);
    of_kind.map(|event| event["detail"].as_str().unwrap().to_owned()).collect()
}

/// Where the processes of the VM have their sockets, and their record is.
fn running(here: &Installation) -> PathBuf {
    here.path("run/vms").join(here.vm(VM).unwrap()["id"].as_str().unwrap())
}

/// The status of the guest, as QEMU says by the monitor at which no agent is.
fn status_by_qemu(monitor: &Path) -> Option<String> {
    let stream = UnixStream::connect(monitor).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    let mut qmp = BufReader::new(stream);
    for command in ["qmp_capabilities", "query-status"] {
        writeln!(qmp.get_mut(), "{{\"execute\": \"{command}\"}}").ok()?;
    }
    // A greeting and another answer come first.
    for line in qmp.lines() {
        let said: Value = serde_json::from_str(&line.ok()?).ok()?;
        if let Some(status) = said["return"]["status"].as_str() {
            return Some(status.to_owned());
        }
    }
    None
}

/// The guest panics while no agent is there that could hear of it: the next one finds it so.
fn panics_unheard(here: &mut Installation, mut console: Console) {
    panics_in(&mut console, 4);
    here.kill_agent();
    drop(console);
    let running = running(here);
    let record = std::fs::read(running.join("run.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    assert!(record["panic"].is_null(), "the agent has heard of it: {record}");
    eventually("the guest panics", || {
        (status_by_qemu(&running.join("qmp.sock"))? == "guest-panicked").then_some(())
    })
    .unwrap();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    here.wait_power(VM, "paused").unwrap();
    let told = here.wait_alarm(VM, "guest-panicked").unwrap();
    assert!(told.contains("stands still"), "{told}");
}

fn decrypted(here: &Installation, name: &str) -> PathBuf {
    let to = here.path(&format!("clear-{name}"));
    here.vmseal(&["dump", "decrypt", VM, name, "--to", text(&to).unwrap()]).unwrap();
    to
}

#[test]
fn a_host_dumps_a_guest_that_panics_while_the_server_is_away_and_restarts_it() {
    let more = ["--on-crash", "coredump-restart", "--crash-dump-format", "elf"];
    let (mut here, mut console) = started("encrypted", &more);
    assert_eq!(here.vm(VM).unwrap()["hardware"]["on_crash"], "coredump-restart");
    let qemu = here.processes_of(VM, "qemu-system-x86_64").unwrap();
    panics_in(&mut console, 4);
    here.kill_server();
    drop(console);
    // The core dump of the inventory is asked of the file system alone.
    let home = here.path("datastore");
    eventually("the core dump", || {
        let found = Command::new("find").arg(&home).args(["-name", "*.panic-elf"]).output().ok()?;
        (!found.stdout.is_empty()).then_some(())
    })
    .unwrap();
    std::thread::sleep(Duration::from_secs(1));
    here.start_server().unwrap();
    here.wait_host().unwrap();
    eventually("the server to learn of it", || (dumps(&here).len() == 1).then_some(())).unwrap();
    let known = &dumps(&here)[0];
    assert_eq!(
        (known["name"].as_str(), known["reason"].as_str()),
        (Some("panic-1"), Some("panic"))
    );
    assert_eq!((known["format"].as_str(), known["encrypted"].as_bool()), (Some("elf"), Some(true)));
    boots_again(&here);
    assert_eq!(here.processes_of(VM, "qemu-system-x86_64").unwrap(), qemu, "QEMU is another one");
    let [core] = &cores(&here)[..] else { panic!("{:?}", cores(&here)) };
    assert!(!has_secret(core), "the core dump is in the clear");
    let clear = decrypted(&here, "panic-1");
    assert!(has_secret(&clear), "what was decrypted lacks the guest's memory");
    let readelf = Command::new("readelf").args(["-h", "-n", "-l"]).arg(&clear).output().unwrap();
    let said = String::from_utf8_lossy(&readelf.stdout);
    assert!(said.contains("CORE (Core file)") && said.contains("NT_PRSTATUS"), "{said}");
    let told = events(&here, "vm.panicked");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("encrypted") && told[0].contains("1 of 5 restarts"), "{told:?}");
    assert!(events(&here, "vm.dumped")[0].contains("'panic-1'"));
    assert!(here.wait_alarm(VM, "guest-panicked").unwrap().contains("restarted"));
    // What is known stays known, once.
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    assert_eq!((dumps(&here).len(), events(&here, "vm.panicked").len()), (1, 1));
    here.vmseal(&["dump", "delete", VM, "panic-1"]).unwrap();
    assert!(cores(&here).is_empty() && dumps(&here).is_empty());
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
}

#[test]
fn a_guest_that_panics_is_stopped_with_or_without_a_core_dump() {
    let (here, mut console) = started("encrypted", &[]);
    panics_in(&mut console, 0);
    let stopped = here.wait_power(VM, "off").unwrap();
    assert_eq!(stopped["stopped"]["reason"], "guest_panicked", "{stopped}");
    assert!(dumps(&here).is_empty(), "nobody asked for a core dump");
    here.wait_alarm(VM, "guest-panicked").unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    here.wait_no_alarm(VM, "guest-panicked").unwrap();
    let mut console = boots_again(&here);
    remember(&mut console);
    // At once, while it runs.
    here.vmseal(&["vm", "set", VM, "--on-crash", "coredump-destroy"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["at_next_start"].as_array().map_or(0, Vec::len), 0);
    panics_in(&mut console, 0);
    let stopped = here.wait_power(VM, "off").unwrap();
    let why = stopped["stopped"]["detail"].as_str().unwrap();
    assert!(why.contains("a core dump of") && why.contains("vmseal vm start"), "{why}");
    eventually("the core dump", || (dumps(&here).len() == 1).then_some(())).unwrap();
    assert_eq!(dumps(&here)[0]["format"], "kdump");
    let clear = decrypted(&here, "panic-1");
    assert!(std::fs::read(&clear).unwrap().starts_with(b"makedumpfile"));
    // Another key opens it, and deleting the VM takes it away.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    std::fs::remove_file(&clear).unwrap();
    decrypted(&here, "panic-1");
    // It follows its VM, which has no key any more.
    here.vmseal(&["vm", "decrypt", VM, "--yes", "--policy", "plain"]).unwrap();
    assert_eq!(dumps(&here)[0]["encrypted"], false);
    std::fs::remove_file(&clear).unwrap();
    decrypted(&here, "panic-1");
    let home = cores(&here)[0].parent().unwrap().to_owned();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert!(!home.exists(), "core dumps outlive their VM");
}

#[test]
fn a_guest_that_panics_is_left_as_it_is_until_somebody_resets_it() {
    let (mut here, mut console) = started("encrypted", &["--on-crash", "preserve"]);
    panics_in(&mut console, 0);
    // It would take the console back.
    drop(console);
    here.wait_power(VM, "paused").unwrap();
    assert!(here.wait_alarm(VM, "guest-panicked").unwrap().contains("vmseal vm dump"));
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    here.wait_power(VM, "paused").unwrap();
    here.wait_alarm(VM, "guest-panicked").unwrap();
    here.vmseal(&["vm", "dump", VM]).unwrap();
    assert_eq!(dumps(&here)[0]["reason"], "request");
    assert!(has_secret(&decrypted(&here, "dump-1")));
    here.wait_power(VM, "paused").unwrap();
    here.vmseal(&["vm", "reset", VM]).unwrap();
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    here.wait_no_alarm(VM, "guest-panicked").unwrap();
    let console = boots_again(&here);
    assert_eq!(events(&here, "vm.panicked").len(), 1);
    panics_unheard(&mut here, console);
    eventually("the server tells of it", || {
        (events(&here, "vm.panicked").len() == 2).then_some(())
    })
    .unwrap();
}

/// QEMU writes no core dump while it sends memory: the sending ends first.
#[test]
fn a_guest_that_panics_while_its_memory_is_sent_stays_and_has_its_core_dump() {
    let (mut here, mut console) = started("encrypted", &["--on-crash", "coredump-restart"]);
    here.add_host(THERE).unwrap();
    let store = here.path("datastore");
    let share = ["datastore", "share", "local", "--host", THERE, "--path", text(&store).unwrap()];
    here.vmseal(&share).unwrap();
    // Slowly enough that not all is there before it panics.
    let slowly = ["vm", "migrate", VM, THERE, "--rate", "1MiB", "--no-wait"];
    let task = here.json(&slowly).unwrap()["id"].as_str().unwrap().to_owned();
    eventually("memory to be sent", || {
        let shown = here.json(&["task", "show", &task]).ok()?;
        (shown["migration"]["progress"]["sent"].as_u64()? > 0).then_some(())
    })
    .unwrap();
    panics_in(&mut console, 0);
    drop(console);
    let ended = here.try_vmseal(&["task", "wait", &task]).unwrap();
    assert!(!ended.status.success(), "{ended:?}");
    let why = here.json(&["task", "show", &task]).unwrap().to_string();
    assert!(why.contains("panicked while it was sent"), "{why}");
    eventually("its core dump", || (dumps(&here).len() == 1).then_some(())).unwrap();
    let clear = decrypted(&here, "panic-1");
    assert!(std::fs::read(&clear).unwrap().starts_with(b"makedumpfile"));
    assert_eq!(only_host(&here, VM).unwrap(), HERE);
    // Before QEMU 9.0 a guest is not sent that has no driver of its disk.
    let mut console = boots_again(&here);
    run(&mut console, "insmod /virtio_blk.ko; echo DRIVER-$((6 * 7))", "DRIVER-42").unwrap();
    drop(console);
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    assert_eq!(only_host(&here, VM).unwrap(), THERE);
}

#[test]
fn a_process_that_dies_leaves_a_whole_core_dump_or_none_and_no_guest_that_stands_still() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("encrypted", &["--on-crash", "coredump-restart"]);
    let whole = |here: &Installation, what: &str| {
        eventually("no half core dump", || {
            cores(here).iter().all(|core| !is_half(core)).then_some(())
        })
        .unwrap();
        eventually("as many core dumps as files", || {
            (dumps(here).len() == cores(here).len()).then_some(())
        })
        .unwrap();
        let names: Vec<_> =
            dumps(here).iter().map(|it| it["name"].as_str().unwrap().to_owned()).collect();
        println!("{what}: {names:?}");
        for name in names {
            let clear = decrypted(here, &name);
            std::fs::remove_file(clear).unwrap();
            here.vmseal(&["dump", "delete", VM, &name]).unwrap();
        }
    };
    let begun = |here: &Installation| {
        eventually("a core dump to begin", || (!cores(here).is_empty()).then_some(())).unwrap();
    };
    for delay in [0, 100, 400] {
        panics_in(&mut console, 0);
        begun(&here);
        std::thread::sleep(Duration::from_millis(delay));
        here.kill_agent();
        here.start_agent().unwrap();
        here.wait_host().unwrap();
        drop(console);
        console = boots_again(&here);
        whole(&here, &format!("the agent dies after {delay} ms"));
        remember(&mut console);
    }
    panics_in(&mut console, 0);
    begun(&here);
    kill_hard(here.processes_of(VM, "qemu-system-x86_64").unwrap()[0]);
    here.wait_power(VM, "off").unwrap();
    whole(&here, "QEMU dies");
    here.vmseal(&["vm", "start", VM]).unwrap();
    console = boots_again(&here);
    remember(&mut console);
    // Together with the agent.
    panics_in(&mut console, 0);
    begun(&here);
    kill_hard(here.processes_of(VM, "qemu-system-x86_64").unwrap()[0]);
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    here.wait_power(VM, "off").unwrap();
    whole(&here, "QEMU and the agent die");
    here.vmseal(&["vm", "start", VM]).unwrap();
    console = boots_again(&here);
    remember(&mut console);
    // QEMU stands still in the middle of the core dump until the agent knows that the filter has died.
    let home = home(&here);
    let qemu = Pid::from_raw(here.processes_of(VM, QEMU).unwrap()[0]);
    let filter = here.processes_of(VM, "vmseal-filter").unwrap()[0];
    panics_in(&mut console, 0);
    let begins = Instant::now();
    while cores_in(&home).is_empty() {
        assert!(begins.elapsed() < BOOT_TIMEOUT, "no core dump begins");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill(qemu, Signal::SIGSTOP).unwrap();
    let half = cores_in(&home).iter().all(|core| is_half(core));
    kill_hard(filter);
    let down = here.wait_alarm(VM, "disks-down");
    kill(qemu, Signal::SIGCONT).unwrap();
    assert!(half, "the core dump was whole before its QEMU was stopped");
    assert!(down.unwrap().contains("which stands still"));
    // Its core dump needs no filter. A QEMU before 9.0 takes no other one for a guest that has stood still: then the VM is stopped.
    eventually("an end, or another boot", || {
        let vm = here.vm(VM).ok()?;
        let restarted = here.alarms(VM).ok()?.iter().any(|alarm| {
            alarm["detail"].as_str().is_some_and(|detail| detail.contains("it was restarted"))
        });
        (vm["power"] == "off" || restarted).then_some(())
    })
    .unwrap();
    let vm = here.vm(VM).unwrap();
    println!("the filter dies: {}", vm["power"]);
    eventually("the core dump", || (dumps(&here).len() == 1).then_some(())).unwrap();
    whole(&here, "the filter dies");
    if vm["power"] == "off" {
        let stopped = &vm["stopped"];
        let why = stopped["detail"].as_str().unwrap();
        assert_eq!(stopped["reason"], "guest_panicked", "{stopped}");
        assert!(why.contains("a core dump of") && why.contains("older than 9.0"), "{why}");
    } else {
        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    }
    here.vmseal(&["vm", "start", VM]).unwrap();
    boots_again(&here);
}
