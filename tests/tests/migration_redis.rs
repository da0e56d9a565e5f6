//! A guest that runs redis moves between two hosts of one network while a client outside of it writes all the time, by one
//! connection: nothing that redis has acknowledged is lost, and the guest keeps its address, which is announced where the guest is now.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::time::Duration;

use vmseal_tests::capture::Capture;
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::network::{bridge, own_namespace, taps};
use vmseal_tests::redis::{Connection, Writer, lost};
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::two_hosts::{HERE, THERE, only_host, other};

const VM: &str = "cache";

/// Both hosts have this bridge. The guest takes its address from its card's (`scripts/build-network-guest`).
const BRIDGE: &str = "br0";
const CARD: &str = "bridge=br0,mac=52:54:0a:4d:00:0a";
const MAC: &str = "52:54:0a:4d:00:0a";
const MAC_BYTES: [u8; 6] = [0x52, 0x54, 0x0a, 0x4d, 0x00, 0x0a];
const ADDRESS: &str = "10.77.0.10";
const REDIS: &str = "10.77.0.10:6379";

/// There and back; and with `VMSEAL_ALL`, as `scripts/soak` has it.
const MOVES: usize = 2;
const ALL_MOVES: usize = 20;

/// A guest with redis on the first of two hosts that share its datastore.
fn started() -> Installation {
    let mut here = Installation::new().unwrap();
    here.add_host(THERE).unwrap();
    let store = here.path("datastore");
    here.vmseal(&["datastore", "share", "local", "--host", THERE, "--path", text(&store).unwrap()])
        .unwrap();
    let disk = format!(
        "datastore=local,format=raw,image={}",
        shell_guest::redis_image().unwrap().display()
    );
    let create = ["vm", "create", VM, "--policy", "encrypted", "--host", HERE, "--disk", &disk];
    here.vmseal(&[&create[..], &["--nic", CARD, "--memory", "256MiB"]].concat()).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    booted(&here, VM).unwrap();
    here
}

/// The guest has its card and its address, and the host that it is on shows them.
fn keeps_its_address(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    let counted = format!(
        "echo CARD-$(cat /sys/class/net/eth0/address)-$(ip -4 addr show eth0 | grep -c ' {ADDRESS}/24 ')-"
    );
    run(&mut console, &counted, &format!("CARD-{MAC}-1-")).unwrap();
    eventually("its address is shown", || {
        let card = here.vm(VM).ok()?["nics"][0].take();
        (card["mac"] == MAC && card["addresses"][0] == ADDRESS).then_some(())
    })
    .unwrap();
}

#[test]
fn a_guest_with_redis_moves_there_and_back_and_loses_nothing_that_was_acknowledged() {
    if !own_namespace().unwrap() {
        return;
    }
    bridge(BRIDGE, "10.77.0.1/24").unwrap();
    let here = started();
    let moves = if std::env::var_os("VMSEAL_ALL").is_some() { ALL_MOVES } else { MOVES };
    let writer = Writer::begin(REDIS).unwrap();
    let mut longest = Duration::ZERO;
    for number in 1..=moves {
        writer.goes_on().unwrap();
        let _ = writer.longest();
        let to = other(&only_host(&here, VM).unwrap());
        let before = writer.acknowledged();
        let capture = Capture::begin(&[]).unwrap();
        here.vmseal(&["vm", "migrate", VM, to]).unwrap();
        let during = writer.acknowledged() - before;
        assert_eq!(only_host(&here, VM).unwrap(), to);
        // The card of the former host is gone.
        eventually("there is one tap", || (taps().ok()? == 1).then_some(())).unwrap();
        writer.goes_on().unwrap();
        let announced = capture.end().unwrap().announced;
        assert!(announced.contains(&MAC_BYTES), "no switch is told where it is: {announced:x?}");
        let gap = writer.longest();
        longest = longest.max(gap);
        eprintln!(
            "move {number}: {during} SETs meanwhile; the longest one took {} ms",
            gap.as_millis()
        );
        assert!(during > 0, "redis has answered nothing while its guest moved");
    }
    let acknowledged = writer.end().unwrap();
    eprintln!(
        "{moves} moves: {acknowledged} SETs; the longest one took {} ms",
        longest.as_millis()
    );
    assert_eq!(Connection::new(REDIS).unwrap().count().unwrap(), acknowledged);
    let lost = lost(REDIS, acknowledged).unwrap();
    assert!(lost.is_empty(), "{} of {acknowledged} are lost: {:?}", lost.len(), lost.first());
    keeps_its_address(&here);
}
