//! A guest with a card on a bridge, a disk for cloud-init, a screen, an agent in it and, where this machine has some, huge pages: all of
//! it works after the host's agent has died and after the filter has, and again when the VM is started after QEMU has.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::counting_guest::MARKER_AT;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{Victim, console_again};
use vmseal_tests::network::{bridge, connect, echoes, own_namespace, page, taps};
use vmseal_tests::shell_guest::{self, booted, holds, run};
use vmseal_tests::two_hosts::{FILTER, QEMU};
use vmseal_tests::viewer::Viewer;
use vmseal_tests::{eventually, huge_pages, skipped};

const VM: &str = "web";

/// The guest takes its address from its card's (`scripts/build-network-guest`).
const CARD: &str = "bridge=br0,mac=52:54:0a:4d:00:0a";
const ADDRESS: &str = "10.77.0.10";

/// What cloud-init is told.
const TOLD: &str = "VMSEAL-TOLD-3C5A";

/// The guest's memory, and its huge pages of 2 MiB.
const MEMORY_MIB: u64 = 192;
const HUGE_PAGES: u64 = MEMORY_MIB / 2;

/// Whether this machine has huge pages for the guest. One that has none is not made to set any aside: a test that is ended by force would
/// leave them so, and others need a machine without.
fn has_huge_pages() -> bool {
    let free = huge_pages::count("free_hugepages");
    if free < HUGE_PAGES {
        skipped(format_args!(
            "the guest's memory is not in huge pages: it needs {HUGE_PAGES}, and this machine has {free}"
        ));
    }
    free >= HUGE_PAGES
}

fn create(here: &Installation, on_huge_pages: bool) {
    std::fs::write(here.path("user-data"), format!("#cloud-config\n# {TOLD}\n")).unwrap();
    let told = format!("user-data={}", here.path("user-data").display());
    let image = shell_guest::image().unwrap();
    let disk = format!("datastore=local,format=raw,image={},size=64MiB", image.display());
    let memory = format!("{MEMORY_MIB}MiB");
    let create = ["vm", "create", VM, "--policy", "encrypted", "--memory", &memory];
    let devices = ["--disk", &disk, "--cloud-init", &told, "--nic", CARD];
    let backing: &[&str] = if on_huge_pages { &["--memory-backing", "hugepages"] } else { &[] };
    here.vmseal(&[&create[..], &devices, backing].concat()).unwrap();
}

/// Starts the VM. Its guest has the drivers of its devices then, and an agent.
fn started(here: &Installation) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    holds(&mut console, "[ -b /dev/vdb ]").unwrap();
    console.type_text("echo '{\"return\": []}' >/answer\n").unwrap();
    console.type_text(shell_guest::AGENT).unwrap();
    run(&mut console, "echo AGENT-$((6 * 7))", "AGENT-42").unwrap();
    console
}

/// The output of a command in the guest is this. A console that is opened again repeats what was said: each check has a number.
fn says(console: &mut Console, check: u32, command: &str, expected: &str) {
    let said = format!("SAID-{check}-{expected}-");
    run(console, &format!("echo SAID-{check}-$({command})-"), &said).unwrap();
}

/// The guest reads what the check before this has written to its disk, writes and reads something else, and reads the disk for cloud-init.
/// Nothing of that is in its memory before.
fn disks_work(console: &mut Console, check: u32) {
    let forget = format!("echo 3 >/proc/sys/vm/drop_caches; echo FORGOTTEN-{check}-$((6 * 7))");
    let forgotten = format!("FORGOTTEN-{check}-42");
    let kept = format!("dd if=/dev/vda bs=1M skip={MARKER_AT} count=1 2>/dev/null | head -n 1");
    run(console, &forget, &forgotten).unwrap();
    if check > 1 {
        says(console, check, &kept, &format!("KEPT-{}", check - 1));
    }
    let to = format!("dd of=/dev/vda bs=1M seek={MARKER_AT} conv=notrunc 2>/dev/null");
    run(console, &format!("echo KEPT-{check} | {to}; sync; {forget}"), &forgotten).unwrap();
    says(console, check, &kept, &format!("KEPT-{check}"));
    says(console, check, &format!("grep -ao '{TOLD}' /dev/vdb | head -n 1"), TOLD);
}

/// A viewer connects to the guest's screen through server and agent, and gets a picture.
fn screen_is_shown(here: &Installation) {
    let (mut shown, address) = here.screen(VM).unwrap();
    let picture = Viewer::connect(&address).and_then(|mut viewer| viewer.lit());
    shown.kill().unwrap();
    shown.wait().unwrap();
    picture.unwrap();
}

/// All devices of the guest work. Checks are numbered from 1.
fn all_work(here: &Installation, console: &mut Console, check: u32, on_huge_pages: bool) {
    disks_work(console, check);
    assert!(page(&format!("{ADDRESS}:80")).unwrap().contains(ADDRESS));
    assert_eq!(taps().unwrap(), 1);
    screen_is_shown(here);
    eventually("the agent in the guest answers", || {
        let ping = here.try_vmseal(&["vm", "guest", "ping", VM]).ok()?;
        ping.status.success().then_some(())
    })
    .unwrap();
    if on_huge_pages {
        let qemu = here.processes_of(VM, QEMU).unwrap()[0];
        assert_eq!(huge_pages::mapped(qemu).unwrap(), format!("{} kB", MEMORY_MIB << 10));
    }
}

#[test]
fn every_device_works_after_the_agent_the_filter_or_qemu_has_died() {
    if !own_namespace().unwrap() {
        return;
    }
    bridge("br0", "10.77.0.1/24").unwrap();
    let turn = huge_pages::turn();
    let on_huge_pages = has_huge_pages();
    // Kept while the guest has some.
    let _turn = on_huge_pages.then_some(turn);
    let mut here = Installation::new().unwrap();
    create(&here, on_huge_pages);
    let mut console = started(&here);
    let mut held = connect(&format!("{ADDRESS}:7")).unwrap();
    all_work(&here, &mut console, 1, on_huge_pages);
    let processes = |here: &Installation, name| here.processes_of(VM, name).unwrap();
    let (qemu, filter) = (processes(&here, QEMU), processes(&here, FILTER));
    assert_eq!((qemu.len(), filter.len()), (1, 1));

    Victim::Agent.kill(&mut here, VM);
    here.wait_power(VM, "running").unwrap();
    let mut console = console_again(&here, VM, console);
    echoes(&mut held, b"with another agent").unwrap();
    all_work(&here, &mut console, 2, on_huge_pages);
    assert_eq!((&processes(&here, QEMU), &processes(&here, FILTER)), (&qemu, &filter));

    Victim::Filter.kill(&mut here, VM);
    here.wait_alarm(VM, "filter-restarted").unwrap();
    let mut console = console_again(&here, VM, console);
    echoes(&mut held, b"with another filter").unwrap();
    all_work(&here, &mut console, 3, on_huge_pages);
    assert_eq!(processes(&here, QEMU), qemu);
    assert_ne!(processes(&here, FILTER), filter);

    Victim::Qemu.kill(&mut here, VM);
    here.wait_power(VM, "off").unwrap();
    assert_eq!(taps().unwrap(), 0);
    drop((console, held));
    if on_huge_pages {
        eventually("the huge pages are free", || {
            (huge_pages::count("free_hugepages") >= HUGE_PAGES).then_some(())
        })
        .unwrap();
    }
    let mut console = started(&here);
    all_work(&here, &mut console, 4, on_huge_pages);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    assert_eq!(taps().unwrap(), 0);
}
