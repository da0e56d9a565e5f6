//! Guests with network cards: two on a bridge, which exchange packets with each other and with the host, one that
//! is reached at a forwarded port, and one that starts from the network. All of it in a network of the test's own.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::TcpListener;
use std::process::Command;

use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;
use vmseal_tests::network::{asked, bridge, connect, echoes, ip, own_namespace, page, taps};
use vmseal_tests::process::{Process, kill_hard};
use vmseal_tests::rest;
use vmseal_tests::shell_guest;

/// The guest takes its address from its card's (`scripts/build-network-guest`).
const FIRST_CARD: &str = "bridge=br0,mac=52:54:0a:4d:00:0a";
const FIRST: &str = "10.77.0.10";
const SECOND_CARD: &str = "bridge=br0,mac=52:54:0a:4d:00:0b,name=lan";
const SECOND: &str = "10.77.0.11";
/// A card of the other model, the address that it is given, and where its guest is told to read files.
const OTHER_MAC: &str = "52:54:0a:4d:00:0c";
const OTHER: &str = "10.77.0.12";
const FILES: &str = "10.77.0.1:8080";
const USER_CARD: &str = "user,mac=52:54:0a:00:02:0f,forward=tcp:80,forward=tcp:6379,name=out";

/// Runs a client of redis; gives what it says.
fn redis(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("60").arg(program).args(arguments).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let succeeded = output.status.success() && !said.to_lowercase().contains("error");
    assert!(succeeded, "{program} {arguments:?}: {}: {said}", output.status);
    said.trim().to_owned()
}

/// Waits for the guest's redis, which starts after its cards: a redis-benchmark whose connections are refused hangs.
fn wait_redis(address: &[&str]) {
    eventually("redis answers", || {
        let ping = Command::new("redis-cli").args(address).arg("ping").output().ok()?;
        (ping.stdout == b"PONG\n").then_some(())
    })
    .unwrap();
}

/// How many connections the kernel takes at a port of the host before the program that listens does.
fn queue_of(port: u64) -> u32 {
    let listening = Command::new("ss").args(["-Hltn", &format!("sport = :{port}")]).output();
    let listening = String::from_utf8(listening.unwrap().stdout).unwrap();
    // State, what waits, the most that may wait.
    listening.split_whitespace().nth(2).unwrap().parse().unwrap()
}

fn create(here: &Installation, vm: &str, nics: &[&str]) {
    let disk = format!(
        "datastore=local,format=raw,image={}",
        shell_guest::redis_image().unwrap().display()
    );
    let mut arguments = vec!["vm", "create", vm, "--policy", "encrypted", "--disk", &disk];
    arguments.extend(["--memory", "192MiB", "--vcpus", "2"]);
    arguments.extend(nics.iter().flat_map(|nic| ["--nic", nic]));
    here.vmseal(&arguments).unwrap();
}

/// How many bytes a guest has received and sent by its cards on the bridge, as the server says.
fn counted(here: &Installation, vm: &str) -> (u64, u64) {
    let path = format!("/api/v1/usage?vm={vm}");
    eventually("what goes over the network is counted", || {
        let usage = rest::call(here, &rest::Caller::Admin, &path, &[]).ok()?.json().ok()?;
        let network = &usage["vms"][0]["network"];
        let number = |which: &str| network[which].as_u64();
        number("received_packets").filter(|packets| *packets > 0)?;
        Some((number("received_bytes")?, number("sent_bytes")?))
    })
    .unwrap()
}

/// What a guest receives and sends is counted, each for itself, and shown; that of a card `user` is not.
fn traffic_is_counted(here: &Installation, vm: &str, address: &str) {
    const LENGTH: u64 = 100_000;
    let value = "x".repeat(usize::try_from(LENGTH).unwrap());
    let before = counted(here, vm);
    redis("redis-cli", &["-h", address, "set", "long", &value]);
    let between = counted(here, vm);
    // The other direction has acknowledgements.
    let grown = |before: (u64, u64), now: (u64, u64)| (now.0 - before.0, now.1 - before.1);
    let (received, sent) = grown(before, between);
    assert!(received > LENGTH && (1..LENGTH).contains(&sent), "{received} {sent}");
    assert_eq!(redis("redis-cli", &["-h", address, "get", "long"]), value);
    let after = counted(here, vm);
    let (received, sent) = grown(between, after);
    assert!(sent > LENGTH && (1..LENGTH).contains(&received), "{received} {sent}");

    let shown = here.vmseal(&["vm", "show", vm]).unwrap();
    for line in ["RECEIVED SINCE START", "SENT SINCE START"] {
        let line =
            shown.lines().find(|it| it.starts_with(line)).unwrap_or_else(|| panic!("{shown}"));
        assert!(line.contains("packets") && !line.contains(" 0 packets"), "{line}");
    }
    let look = here.json(&["vm", "top", vm, "-n", "1", "--delay", "0.2s"]).unwrap();
    assert!(look["vms"][0]["received_bytes_per_second"].is_number(), "{look}");
    let table = here.vmseal(&["vm", "top", "-n", "1", "--delay", "0.2s"]).unwrap();
    assert!(table.lines().any(|line| line.contains("RX/S") && line.contains("TX/S")), "{table}");

    let scraped = rest::scrape(here, "/metrics/hosts/here").unwrap();
    let samples = |of: &str| {
        let lines = scraped.lines().filter(|line| line.starts_with("vmseal_nic_bytes_total{"));
        let values = lines.filter(|line| line.contains(of));
        values.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect::<Vec<u64>>()
    };
    assert_eq!(
        samples("direction=\"received\"").len(),
        2,
        "one for each card on the bridge: {scraped}"
    );
    let known = here.vm(vm).unwrap();
    let nic = known["nics"][0]["id"].as_str().unwrap();
    let received = samples(&format!("nic=\"{nic}\",direction=\"received\""));
    let sent = samples(&format!("nic=\"{nic}\",direction=\"sent\""));
    assert!(received[0] >= after.0 && sent[0] >= after.1, "{received:?} {sent:?}: {after:?}");
}

/// What gives addresses on the bridge, and says where the guest starts from.
fn addresses_are_given(here: &Installation) -> Process {
    let file = |name: &str| here.path(name).display().to_string();
    let (settings, leases, pid) = (file("udhcpd.conf"), file("leases"), file("udhcpd.pid"));
    let text = format!(
        "interface br0\nstart 10.77.0.100\nend 10.77.0.110\noption subnet 255.255.255.0\n\
         static_lease {OTHER_MAC} {OTHER}\nsiaddr 10.77.0.1\nboot_file http://{FILES}/first\n\
         lease_file {leases}\npidfile {pid}\n"
    );
    std::fs::write(&settings, text).unwrap();
    let mut serve = Command::new("busybox");
    Process::start(serve.args(["udhcpd", "-f", &settings]), &here.path("udhcpd.log")).unwrap()
}

/// A VM that is off gets a card of the model e1000e in place of its own. Debian's kernel for clouds has no driver for it, but the
/// firmware has: the guest starts from the network, is given an address, reads a file, and asks for the one that is named there.
fn starts_from_the_network_by_e1000e(here: &Installation, vm: &str) {
    let _gives_addresses = addresses_are_given(here);
    let files = TcpListener::bind(FILES).unwrap();
    here.vmseal(&["nic", "remove", vm, "nic0"]).unwrap();
    let card = format!("bridge=br0,mac={OTHER_MAC},model=e1000e");
    here.vmseal(&["nic", "add", vm, "--nic", &card]).unwrap();
    here.vmseal(&["vm", "start", vm, "--boot-once", "network"]).unwrap();
    let next = format!("#!ipxe\nchain http://{FILES}/heard-by-${{net0/ip}}\n");
    assert_eq!(asked(&files, &next).unwrap(), "/first");
    assert_eq!(asked(&files, "#!ipxe\nexit\n").unwrap(), format!("/heard-by-{OTHER}"));
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
}

/// An agent that is not root makes no taps, and a card `user` needs none. The VM is off, and has a card `lan` on a bridge before a card
/// `user`.
fn is_reached_without_root(here: &mut Installation, vm: &str) {
    here.kill_agent();
    if !here.start_agent_as_user().unwrap() {
        return;
    }
    eventually("the host says that its agent is not root", || {
        here.weakness("the agent does not run as root").ok()?.then_some(())
    })
    .unwrap();
    let refused = here.refused(&["vm", "start", vm]).unwrap();
    assert!(refused.contains("'lan'") && refused.contains("CAP_NET_ADMIN"), "{refused}");
    here.vmseal(&["nic", "remove", vm, "lan"]).unwrap();
    here.vmseal(&["vm", "start", vm]).unwrap();
    let shown = here.vm(vm).unwrap();
    let port = shown["nics"][0]["forwards"][0]["host_port"].as_u64().unwrap();
    assert!(page(&format!("127.0.0.1:{port}")).unwrap().contains("10.0.2.15"));
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    assert_eq!((taps().unwrap(), here.all_guest_processes()), (0, vec![]));
}

#[test]
fn guests_are_on_the_network() {
    if !own_namespace().unwrap() {
        return;
    }
    bridge("br0", "10.77.0.1/24").unwrap();
    let mut here = Installation::new().unwrap();
    create(&here, "first", &[FIRST_CARD]);
    create(&here, "second", &[SECOND_CARD, USER_CARD]);
    assert!(here.vm("first").unwrap()["nics"][0]["forwards"].as_array().unwrap().is_empty());

    here.vmseal(&["vm", "start", "first"]).unwrap();
    here.vmseal(&["vm", "start", "second"]).unwrap();
    assert_eq!(taps().unwrap(), 2);
    let mut first = here.console("first").unwrap();
    first.expect(&format!("VMSEAL-NET eth0 {FIRST} 1"), 0).unwrap();
    here.console("second").unwrap().expect("VMSEAL-NET eth1 10.0.2.15 1", 0).unwrap();

    // Host to guests, over the bridge and at the forwarded port.
    let mut held = connect(&format!("{FIRST}:7")).unwrap();
    echoes(&mut held, b"from the host").unwrap();
    let shown = here.vm("second").unwrap();
    let port = shown["nics"][1]["forwards"][0]["host_port"].as_u64().unwrap();
    let forwarded = format!("127.0.0.1:{port}");
    assert!(page(&forwarded).unwrap().contains("10.0.2.15"));
    assert!(page(&format!("{SECOND}:80")).unwrap().contains(SECOND));
    // Redis in the guest, its load from outside.
    wait_redis(&["-h", FIRST]);
    redis(
        "redis-benchmark",
        &["-h", FIRST, "-q", "-t", "set,get", "-n", "1000", "-c", "20", "-r", "500"],
    );
    assert!(redis("redis-cli", &["-h", FIRST, "dbsize"]).parse::<u32>().unwrap() > 100);
    traffic_is_counted(&here, "first", FIRST);
    // And at the forwarded port, where QEMU by itself would have one connection wait.
    let redis_port = shown["nics"][1]["forwards"][1]["host_port"].as_u64().unwrap();
    assert!(queue_of(port) > 20 && queue_of(redis_port) > 20);
    let at = ["-p", &redis_port.to_string()];
    wait_redis(&at);
    let load = ["-q", "-t", "set,get", "-n", "1000", "-c", "20"];
    redis("redis-benchmark", &[&at[..], &load].concat());
    // Guest to guest.
    first.type_text(&format!("wget -q -O - http://{SECOND}/\n")).unwrap();
    first.expect("\n10.0.2.15", 0).unwrap();
    first.type_text(&format!("ping -c 1 -w 20 {SECOND} && echo PING-$((6 * 7))\n")).unwrap();
    first.expect("PING-42", 0).unwrap();
    // What is shown.
    eventually("the first guest's address is shown", || {
        let vm = here.vm("first").ok()?;
        (vm["nics"][0]["addresses"][0] == FIRST).then_some(())
    })
    .unwrap();
    let shown = here.vmseal(&["vm", "show", "second"]).unwrap();
    let line = shown.lines().find(|line| line.contains("out 52:54:0a:00:02:0f")).unwrap();
    assert!(line.contains(&format!("127.0.0.1:{port} to 80")), "{line}");

    // A pulled cable, and one that is plugged in again.
    here.vmseal(&["nic", "set", "second", "lan", "--link", "down"]).unwrap();
    first.type_text(&format!("ping -c 1 -w 1 {SECOND} || echo CUT-$((6 * 7))\n")).unwrap();
    first.expect("CUT-42", 0).unwrap();
    assert_eq!(here.vm("second").unwrap()["nics"][0]["link"], "down");
    here.vmseal(&["nic", "set", "second", "lan", "--link", "up"]).unwrap();
    assert!(page(&format!("{SECOND}:80")).unwrap().contains(SECOND));
    assert!(
        here.refused(&["nic", "set", "second", "wan", "--link", "up"]).unwrap().contains("'wan'")
    );

    // Cards are QEMU's: they go on without the agent, and the next one knows them.
    let before = counted(&here, "second");
    here.kill_agent();
    echoes(&mut held, b"without an agent").unwrap();
    here.start_agent().unwrap();
    here.wait_power("second", "running").unwrap();
    echoes(&mut held, b"with another agent").unwrap();
    let after = counted(&here, "second");
    assert!(after.0 >= before.0 && after.1 >= before.1, "{before:?} {after:?}");
    assert!(page(&forwarded).unwrap().contains("10.0.2.15"));
    assert_eq!(here.vm("second").unwrap()["nics"][1]["forwards"][0]["host_port"], port);
    // And they go with QEMU.
    let qemu = here.processes_of("first", "qemu-system-x86_64").unwrap();
    qemu.into_iter().for_each(kill_hard);
    here.wait_power("first", "off").unwrap();
    assert_eq!(taps().unwrap(), 1);
    starts_from_the_network_by_e1000e(&here, "first");
    assert_eq!(taps().unwrap(), 1);

    // The port is kept for the VM.
    here.vmseal(&["vm", "stop", "second", "--force"]).unwrap();
    assert_eq!(taps().unwrap(), 0);
    here.vmseal(&["vm", "start", "second"]).unwrap();
    assert_eq!(here.vm("second").unwrap()["nics"][1]["forwards"][0]["host_port"], port);
    // A card that comes later is as one that was there.
    here.vmseal(&["nic", "add", "second", "--nic", "user,forward=tcp:80,name=late"]).unwrap();
    let late = here.vm("second").unwrap()["nics"][2]["forwards"][0]["host_port"].as_u64();
    assert!(queue_of(late.unwrap()) > 20);
    // What has been renamed is told of by its name of now. This guest has no agent.
    here.vmseal(&["vm", "set", "second", "--name", "third"]).unwrap();
    let told = here.refused(&["vm", "guest", "ping", "third"]).unwrap();
    assert!(told.contains("guest of VM 'third'"), "{told}");
    here.vmseal(&["vm", "stop", "third", "--force"]).unwrap();
    is_reached_without_root(&mut here, "third");
}

#[test]
fn what_a_card_cannot_be_connected_to_is_refused_and_nothing_is_left() {
    if !own_namespace().unwrap() {
        return;
    }
    let here = Installation::new().unwrap();
    let disk = "datastore=local,size=1MiB";
    let create = |vm: &str, nics: &[&str]| {
        let mut arguments = vec!["vm", "create", vm, "--policy", "plain", "--disk", disk];
        arguments.extend(nics.iter().flat_map(|nic| ["--nic", nic]));
        here.try_vmseal(&arguments).unwrap()
    };
    let refused = |nics: &[&str], why: &str| {
        let output = create("wrong", nics);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(why), "{nics:?}: {said}");
    };
    refused(&["bridge=sixteen-letters-"], "1 to 15 characters");
    refused(&["user,mac=01:00:5e:00:00:01"], "multicast");
    refused(&["user,mac=52:54:00:00:00:01", "user,mac=52:54:00:00:00:01"], "another card's");
    refused(&["user,forward=tcp:80:80", "user,forward=tcp:80:8080"], "forwarded twice");
    refused(&["user,forward=tcp:0"], "1 to 65535");
    refused(&["user"; 9], "at most 8");

    // What the host lacks refuses the VM before there is one.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let forward = format!("user,forward=tcp:{port}:7");
    for (nic, why) in [
        ("bridge=br7", "no bridge 'br7'"),
        ("tap=tap7", "no tap 'tap7'"),
        ("bridge=lo", "'lo' is no bridge"),
        ("user,forward=tcp:80:80", "port 80"),
        (forward.as_str(), "is in use on the host"),
    ] {
        for dry_run in [&["--dry-run"][..], &[]] {
            let asked = ["vm", "create", "wrong", "--policy", "plain", "--disk", disk, "--nic"];
            let said = here.refused(&[&asked[..], &[nic], dry_run].concat()).unwrap();
            assert!(said.contains(why) && said.contains("--nic"), "{nic}: {said}");
            assert!(said.contains("nic0"), "{nic}: {said}");
        }
    }
    assert!(here.vm("wrong").is_err());
    // A VM that is off gets such a card, and it is said that it could not start with it.
    assert!(create("off", &[]).status.success());
    let added = here.try_vmseal(&["nic", "add", "off", "--nic", "bridge=br7"]).unwrap();
    let said = String::from_utf8(added.stderr).unwrap();
    assert!(added.status.success(), "{said}");
    assert!(said.contains("warning: VM 'off' could not start with it now: "), "{said}");
    assert!(said.contains("no bridge 'br7'"), "{said}");
    assert_eq!(here.vm("off").unwrap()["nics"].as_array().unwrap().len(), 1);

    // What it has lost since refuses the start.
    drop(taken);
    bridge("br7", "10.79.0.1/24").unwrap();
    ip("tuntap add tap7 mode tap").unwrap();
    for (vm, nic) in
        [("no-bridge", "bridge=br7"), ("no-tap", "tap=tap7"), ("no-port", forward.as_str())]
    {
        assert!(create(vm, &[nic]).status.success(), "{vm}");
    }
    ip("link del br7").unwrap();
    ip("tuntap del tap7 mode tap").unwrap();
    let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    for (vm, why) in [
        ("no-bridge", "no bridge 'br7'"),
        ("no-tap", "no tap 'tap7'"),
        ("no-port", "is in use on the host"),
    ] {
        for dry_run in [&["--dry-run"][..], &[]] {
            let said = here.refused(&[&["vm", "start", vm], dry_run].concat()).unwrap();
            assert!(said.contains(why) && said.contains("nic0"), "{vm}: {said}");
        }
        assert_eq!(here.vm(vm).unwrap()["power"], "off");
    }
    assert_eq!((taps().unwrap(), here.all_guest_processes()), (0, vec![]));
    // Addresses that are made up differ; one that is asked for twice is refused.
    let mac = |vm: &str| here.vm(vm).unwrap()["nics"][0]["mac"].as_str().unwrap().to_owned();
    let (one, other) = (mac("no-bridge"), mac("no-tap"));
    assert!(one != other && one[..8] == other[..8], "{one} {other}");
    refused(&[&format!("user,mac={one}")], "VM 'no-bridge'");
}
