//! The addresses that guests say they have, by their agents, and what the host sees of them: a VM on a bridge is launched and
//! logged in to by them.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use serde_json::{Value, json};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::network::{bridge, own_namespace};
use vmseal_tests::shell_guest;

const VM: &str = "web1";

/// The guest takes its address from its card's (`scripts/build-network-guest`).
const MAC: &str = "52:54:0a:4d:00:0a";
const ADDRESS: &str = "10.77.0.10";

/// Another one that it says it has.
const OF_IPV6: &str = "fd00:77::10";

/// Starts what a client takes for an SSH server.
const SSH: &str = "nc -ll -p 22 -e echo SSH-2.0-guest &\necho LISTENS-$((6 * 7))\n";

/// What the agent says, with much that is no address of the VM's card.
fn answer() -> Value {
    let interface = |mac: &str, addresses: &[&str]| {
        let addresses = addresses.iter().map(|it| json!({"ip-address": it, "prefix": 24}));
        let addresses: Vec<_> = addresses.collect();
        json!({"name": "eth0", "hardware-address": mac, "ip-addresses": addresses})
    };
    json!({"return": [
        interface("00:00:00:00:00:00", &["127.0.0.1", "::1"]),
        interface(MAC, &["fe80::1", OF_IPV6, "127.0.0.2", "none", ADDRESS]),
        interface("02:42:00:00:00:01", &["172.17.0.1"]),
        {"hardware-address": [MAC]},
    ]})
}

/// Waits until the VM is shown with both addresses, and no other.
fn wait_shown(here: &Installation) {
    eventually("the guest's addresses are shown", || {
        let vm = here.vm(VM).ok()?;
        (vm["nics"][0]["addresses"] == json!([ADDRESS, OF_IPV6])).then_some(())
    })
    .unwrap();
}

#[test]
fn a_guest_on_a_bridge_is_reached_at_the_address_that_its_agent_says() {
    if !own_namespace().unwrap() {
        return;
    }
    bridge("br0", "10.77.0.1/24").unwrap();
    let mut here = Installation::new().unwrap();
    let (key, image) = (here.path("key.pub"), shell_guest::image().unwrap());
    std::fs::write(
        &key,
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDu0bKR0wAYc5z1f3Yv0J1mZ2c9bS7mUqkq3v1Qh9w1c me\n",
    )
    .unwrap();
    let mut launch = here.command().unwrap();
    launch.args(["vm", "launch", VM, "--image", text(&image).unwrap()]);
    launch.args(["--ssh-key", text(&key).unwrap(), "--nic", &format!("bridge=br0,mac={MAC}")]);
    launch.args(["--memory=192M", "--disk-size=64M", "--timeout=4m"]);
    let mut launch = launch.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    here.wait_power(VM, "running").unwrap();
    let mut console = here.console(VM).unwrap();
    console.expect("VMSEAL-NET eth0", 0).unwrap();
    console.type_text(shell_guest::AGENT).unwrap();
    console.type_text(SSH).unwrap();
    console.expect("LISTENS-42", 0).unwrap();

    // It is asked, and answers nothing: the VM is changed meanwhile.
    console.expect("ASKED-42", 0).unwrap();
    for link in ["down", "up"] {
        here.vmseal(&["nic", "set", VM, "nic0", "--link", link]).unwrap();
    }
    assert_eq!(here.vm(VM).unwrap()["nics"][0]["addresses"], json!([]));
    assert!(launch.try_wait().unwrap().is_none(), "it does not wait for an address");

    let says = format!("cat >/new <<'END'\n{}\nEND\nmv /new /answer\n", answer());
    console.type_text(&says).unwrap();
    assert!(launch.wait().unwrap().success());
    wait_shown(&here);
    let shown = here.vmseal(&["vm", "show", VM]).unwrap();
    assert!(shown.contains(&format!("address {ADDRESS} {OF_IPV6}")), "{shown}");
    // Commands are answered between such questions.
    here.vmseal(&["vm", "guest", "ping", VM]).unwrap();

    // ssh itself is another's: one that says what it is told, the address that answers.
    let programs = here.path("bin");
    std::fs::create_dir(&programs).unwrap();
    let ssh = programs.join("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nprintf '%s ' \"$@\"\n").unwrap();
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = here.command().unwrap();
    command.args(["vm", "ssh", VM]).env_remove("XDG_CONFIG_HOME").env("PATH", &programs);
    let told = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(told.ends_with(&format!("-p 22 -l debian -- {ADDRESS} ")), "{told}");

    // Another agent of the host asks again.
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    wait_shown(&here);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let addresses = here.vm(VM).unwrap()["nics"][0]["addresses"].clone();
    assert_eq!(addresses, json!([]));
}
