//! Network cards that come to a guest that runs, and go: on bridges and taps of a network of the test's own.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::TcpListener;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{has_its_turn, some_of};
use vmseal_tests::network::{bridge, connect, echoes, ip, own_namespace, page, taps};
use vmseal_tests::process::Process;
use vmseal_tests::shell_guest;
use vmseal_tests::two_hosts::QEMU;

const VM: &str = "web";

/// A bridge and a tap, the host's addresses there, and the guest's.
const ON_BRIDGE: &str = "10.77.0.10";
const ON_TAP: &str = "10.78.0.10";

/// What the bridge's frames hold at most; the guest is told.
const MTU: &str = "1400";

/// Waits until the guest says that a shell expression holds.
fn holds(console: &mut Console, what: &str) {
    shell_guest::holds(console, what).unwrap();
}

/// What the guest calls the card with this address.
fn card_with(mac: &str) -> String {
    format!("$(basename $(dirname $(grep -l {mac} /sys/class/net/*/address)))")
}

/// The guest sets up the card with this address, whatever it calls it.
fn set_up(console: &mut Console, mac: &str, address: &str) {
    let card = card_with(mac);
    holds(console, &format!("grep -q {mac} /sys/class/net/*/address"));
    holds(console, &format!("ip link set {card} up"));
    holds(console, &format!("ip addr add {address}/24 dev {card}"));
}

fn gone(console: &mut Console, mac: &str) {
    holds(console, &format!("! grep -q {mac} /sys/class/net/*/address"));
}

/// A guest with two processors and one card, which is not one of those that come and go; on a host with a bridge `br0` and
/// a tap `lan0`.
fn running() -> (Installation, Console) {
    bridge("br0", "10.77.0.1/24").unwrap();
    ip(&format!("link set br0 mtu {MTU}")).unwrap();
    ip("tuntap add lan0 mode tap").unwrap();
    ip("addr add 10.78.0.1/24 dev lan0").unwrap();
    ip("link set lan0 up").unwrap();
    let here = Installation::new().unwrap();
    let disk =
        format!("datastore=local,format=raw,image={}", shell_guest::image().unwrap().display());
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk];
    let card = "user,mac=52:54:0a:00:02:0f,forward=tcp:80,name=out";
    let hardware = ["--memory", "192MiB", "--vcpus", "2", "--nic", card];
    here.vmseal(&[&create[..], &hardware].concat()).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = here.console(VM).unwrap();
    console.expect("VMSEAL-NET eth0", 0).unwrap();
    (here, console)
}

fn nics(here: &Installation) -> Vec<Value> {
    here.vm(VM).unwrap()["nics"].as_array().unwrap().clone()
}

/// Whether somebody has the tap open.
fn is_connected(tap: &str) -> bool {
    ip(&format!("-o link show {tap}")).unwrap().contains("LOWER_UP")
}

/// A card is added with its cable out: the guest has it, and reaches nobody over it until the cable is plugged in.
fn comes_with_its_cable_out(here: &Installation, console: &mut Console) {
    let mac = "52:54:0a:4d:00:0d";
    let nic = format!("bridge=br0,mac={mac},name=cut,link=down");
    here.vmseal(&["nic", "add", VM, "--nic", &nic]).unwrap();
    set_up(console, mac, "10.77.0.13");
    let card = card_with(mac);
    // A driver may say so a moment after it has begun: first an exchange is tried, which would have succeeded.
    let reaches = format!("ping -c 1 -w 5 -I {card} 10.77.0.1");
    let carrier = |wanted: u8| format!("[ $(cat /sys/class/net/{card}/carrier) = {wanted} ]");
    holds(console, &format!("! {reaches}"));
    holds(console, &carrier(0));
    here.vmseal(&["nic", "set", VM, "cut", "--link", "up"]).unwrap();
    holds(console, &carrier(1));
    holds(console, &reaches);
    here.vmseal(&["nic", "remove", VM, "cut"]).unwrap();
    gone(console, mac);
    eventually("the tap of the card is gone", || (taps().unwrap() == 0).then_some(())).unwrap();
}

/// The link of a card in the record from which the next agent adopts the VM.
fn link_on_record(here: &Installation, card: &str) -> Option<Value> {
    let vm = here.vm(VM).ok()?["id"].as_str()?.to_owned();
    let record = std::fs::read(here.path("run/vms").join(vm).join("run.json")).ok()?;
    let record: Value = serde_json::from_slice(&record).ok()?;
    let mut devices = record["vm"]["devices"].as_array()?.iter();
    Some(devices.find(|it| it["device"] == "nic" && it["name"] == card)?["link"].clone())
}

/// The link of a card is changed, and the agent dies when that is on record; QEMU stands still, so that it cannot have done it. The next
/// agent goes on, and nobody asks again.
fn agent_dies_while_link_changes(here: &mut Installation, card: &str, link: &str) {
    let qemu = Pid::from_raw(here.processes_of(VM, QEMU).unwrap()[0]);
    assert!(link_on_record(here, card).unwrap() != link);
    kill(qemu, Signal::SIGSTOP).unwrap();
    let mut set = here.command().unwrap();
    set.args(["nic", "set", VM, card, "--link", link]);
    let mut setting = Process::start(&mut set, &here.path("link.log")).unwrap();
    eventually("the link is on record", || (link_on_record(here, card)? == link).then_some(()))
        .unwrap();
    assert!(!setting.ended(), "QEMU did it while it stood still");
    here.kill_agent();
    kill(qemu, Signal::SIGCONT).unwrap();
    setting.wait().unwrap();
    here.start_agent().unwrap();
    here.wait_power(VM, "running").unwrap();
}

#[test]
fn cards_on_bridges_and_taps_come_to_a_guest_that_runs_and_go() {
    if !own_namespace().unwrap() {
        return;
    }
    let (mut here, mut console) = running();

    // The dry run and the command refuse a card whose bridge or tap is missing, or whose port is in use. Nothing is left of it.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let forward = format!("user,forward=tcp:{port}:7");
    for (nic, why) in [
        ("bridge=br7", "no bridge 'br7'"),
        ("tap=lan7", "no tap 'lan7'"),
        (forward.as_str(), "is in use on the host"),
    ] {
        for dry_run in [&["--dry-run"][..], &[]] {
            let add = ["nic", "add", VM, "--nic", nic];
            let said = here.refused(&[&add[..], dry_run].concat()).unwrap();
            assert!(said.contains(why), "{said}");
        }
    }
    assert_eq!((nics(&here).len(), taps().unwrap()), (1, 0));

    // On a bridge.
    let lan = "bridge=br0,mac=52:54:0a:4d:00:0a,name=lan";
    let planned = here.vmseal(&["nic", "add", VM, "--nic", lan, "--dry-run"]).unwrap();
    assert!(planned.contains("give it to the VM") && !planned.contains("not asked"), "{planned}");
    assert_eq!((nics(&here).len(), taps().unwrap()), (1, 0));
    here.vmseal(&["nic", "add", VM, "--nic", lan]).unwrap();
    assert_eq!(taps().unwrap(), 1);
    set_up(&mut console, "52:54:0a:4d:00:0a", ON_BRIDGE);
    holds(&mut console, &format!("[ $(cat /sys/class/net/eth1/mtu) = {MTU} ]"));
    // A queue for each processor.
    holds(&mut console, "[ -e /sys/class/net/eth1/queues/rx-1 ]");
    let mut on_bridge = connect(&format!("{ON_BRIDGE}:7")).unwrap();
    echoes(&mut on_bridge, b"over the bridge").unwrap();

    let remove = vec!["nic", "remove", VM, "lan", "--dry-run"];
    let set = vec!["nic", "set", VM, "lan", "--link", "down", "--dry-run"];
    for (change, step) in [(remove, "take it from the VM"), (set, "'lan' down")] {
        let planned = here.vmseal(&change).unwrap();
        assert!(planned.contains(step) && !planned.contains("not asked"), "{planned}");
    }
    echoes(&mut on_bridge, b"after dry runs").unwrap();

    // On a tap, which has one queue.
    here.vmseal(&["nic", "add", VM, "--nic", "tap=lan0,mac=52:54:0a:4e:00:0a,name=wire"]).unwrap();
    set_up(&mut console, "52:54:0a:4e:00:0a", ON_TAP);
    let mut on_tap = connect(&format!("{ON_TAP}:7")).unwrap();
    echoes(&mut on_tap, b"over the tap").unwrap();
    eventually("the guest's addresses are shown", || {
        let shown = nics(&here);
        let addresses = [&shown[1]["addresses"][0], &shown[2]["addresses"][0]];
        (addresses == [ON_BRIDGE, ON_TAP]).then_some(())
    })
    .unwrap();
    let taken = here.refused(&["nic", "add", VM, "--nic", "tap=lan0"]).unwrap();
    assert!(taken.contains("another card's of this VM"), "{taken}");
    assert_eq!(nics(&here).len(), 3);

    // The cards are QEMU's: they go on without the agent, and the next one knows them.
    here.kill_agent();
    echoes(&mut on_bridge, b"without an agent").unwrap();
    echoes(&mut on_tap, b"without an agent").unwrap();
    here.start_agent().unwrap();
    here.wait_power(VM, "running").unwrap();
    // A console ends with the agent that has passed it on.
    drop(console);
    let mut console = here.console(VM).unwrap();
    echoes(&mut on_bridge, b"with another agent").unwrap();
    assert_eq!(nics(&here).len(), 3);
    for (link, carrier) in [("down", 0), ("up", 1)] {
        agent_dies_while_link_changes(&mut here, "lan", link);
        assert_eq!(nics(&here)[1]["link"], link);
        drop(console);
        console = here.console(VM).unwrap();
        holds(&mut console, &format!("[ $(cat /sys/class/net/eth1/carrier) = {carrier} ]"));
    }
    echoes(&mut on_bridge, b"plugged in again").unwrap();
    // What is set while no agent is there, the next one is told.
    here.kill_agent();
    here.vmseal(&["nic", "set", VM, "lan", "--link", "down"]).unwrap();
    here.start_agent().unwrap();
    here.wait_power(VM, "running").unwrap();
    drop(console);
    console = here.console(VM).unwrap();
    holds(&mut console, "[ $(cat /sys/class/net/eth1/carrier) = 0 ]");
    here.vmseal(&["nic", "set", VM, "lan", "--link", "up"]).unwrap();
    holds(&mut console, "[ $(cat /sys/class/net/eth1/carrier) = 1 ]");
    echoes(&mut on_bridge, b"after an agent that was away").unwrap();

    // A guest that stands still does not let a card go; it does when it goes on. Until then nobody else gets the card's address.
    here.vmseal(&["vm", "pause", VM]).unwrap();
    let removing = here.json(&["nic", "remove", VM, "lan", "--no-wait"]).unwrap();
    let task = removing["id"].as_str().unwrap();
    eventually("the guest is to let the card go", || {
        let shown = here.json(&["task", "show", task]).ok()?;
        (shown["step"] == "take it from the VM").then_some(())
    })
    .unwrap();
    let other =
        ["vm", "create", "other", "--policy", "plain", "--disk", "datastore=local,size=1MiB"];
    let same = ["--nic", "user,mac=52:54:0a:4d:00:0a"];
    let refused = here.refused(&[&other[..], &same].concat()).unwrap();
    assert!(refused.contains("VM 'web' has the address 52:54:0a:4d:00:0a"), "{refused}");
    assert_eq!(nics(&here).len(), 3);
    let refused = here.refused(&["nic", "set", VM, "lan", "--link", "down"]).unwrap();
    assert!(refused.contains("is being taken from VM 'web'"), "{refused}");
    let kept = here.refused(&["task", "wait", task]).unwrap();
    assert!(kept.contains("'lan'"), "{kept}");
    assert_eq!(nics(&here).len(), 3);
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    gone(&mut console, "52:54:0a:4d:00:0a");
    here.vmseal(&["nic", "remove", VM, "lan"]).unwrap();
    eventually("the tap on the bridge is gone", || (taps().unwrap() == 0).then_some(())).unwrap();
    comes_with_its_cable_out(&here, &mut console);
    // The tap of somebody else stays, free for the next.
    here.vmseal(&["nic", "remove", VM, "wire"]).unwrap();
    gone(&mut console, "52:54:0a:4e:00:0a");
    assert!(!is_connected("lan0"));
    here.vmseal(&["nic", "add", VM, "--nic", "tap=lan0,mac=52:54:0a:4e:00:0b,name=wire"]).unwrap();
    set_up(&mut console, "52:54:0a:4e:00:0b", ON_TAP);
    echoes(&mut connect(&format!("{ON_TAP}:7")).unwrap(), b"again").unwrap();

    // At the next start it is a card as any other: the guest gives the first two addresses itself. A cable that is out then is out for
    // the guest that boots, until it is plugged in.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["nic", "set", VM, "wire", "--link", "down"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    drop(console);
    let mut console = here.console(VM).unwrap();
    console.expect("VMSEAL-NET eth1 10.78.0.11 0", 0).unwrap();
    here.vmseal(&["nic", "set", VM, "wire", "--link", "up"]).unwrap();
    holds(&mut console, "[ $(cat /sys/class/net/eth1/carrier) = 1 ]");
    assert!(page("10.78.0.11:80").unwrap().contains("10.78.0.11"));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    assert!(!is_connected("lan0"));
}

/// The agent dies at any instant while a card is added and removed: the task goes on with the next one, and the guest is
/// reached over the card. A tap with one queue is the harder case: nobody else may have it.
#[test]
fn an_agent_that_dies_while_cards_come_and_go_leaves_nothing_half_done() {
    if !has_its_turn() {
        return;
    }
    if !own_namespace().unwrap() {
        return;
    }
    let (mut here, mut console) = running();
    let mut interrupted = 0;
    let mut wait_for = |here: &mut Installation, task: &Value, milliseconds| {
        sleep(Duration::from_millis(milliseconds));
        here.kill_agent();
        let shown = here.json(&["task", "show", task["id"].as_str().unwrap()]).unwrap();
        interrupted += usize::from(shown["state"] != "done");
        here.start_agent().unwrap();
        here.vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
    };
    for (round, milliseconds) in
        some_of(&[0, 20, 40, 60, 80, 110, 150, 200]).into_iter().enumerate()
    {
        let (mac, network, address) = match round % 2 {
            0 => (format!("52:54:0a:4d:00:1{round}"), "bridge=br0", ON_BRIDGE),
            _ => (format!("52:54:0a:4e:00:1{round}"), "tap=lan0", ON_TAP),
        };
        let nic = format!("{network},mac={mac},name=hot");
        let adding = here.json(&["nic", "add", VM, "--nic", &nic, "--no-wait"]).unwrap();
        wait_for(&mut here, &adding, milliseconds);
        drop(console);
        console = here.console(VM).unwrap();
        set_up(&mut console, &mac, address);
        echoes(&mut connect(&format!("{address}:7")).unwrap(), b"is there").unwrap();
        let removing = here.json(&["nic", "remove", VM, "hot", "--no-wait"]).unwrap();
        wait_for(&mut here, &removing, milliseconds);
        drop(console);
        console = here.console(VM).unwrap();
        gone(&mut console, &mac);
        assert_eq!((nics(&here).len(), taps().unwrap()), (1, 0), "round {round}");
        assert!(!is_connected("lan0"), "round {round}");
    }
    assert!(interrupted > 0, "no agent was killed during a task");
    // The card that was there all the time still is.
    let port = nics(&here)[0]["forwards"][0]["host_port"].as_u64().unwrap();
    assert!(page(&format!("127.0.0.1:{port}")).unwrap().contains("10.0.2.15"));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}
