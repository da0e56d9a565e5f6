//! The screen of a guest, and the port of its agent, over server and agent.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use vmseal_tests::installation::Installation;

/// How every screen begins.
const VNC: &[u8] = b"RFB 003.008\n";

/// `vm vnc`, and the address that it prints.
fn vnc(here: &Installation, vm: &str) -> (Child, String) {
    let mut command = here.command().unwrap();
    let mut shown = command.args(["vm", "vnc", vm]).stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    BufReader::new(shown.stdout.take().unwrap()).read_line(&mut address).unwrap();
    (shown, address.trim().to_owned())
}

fn speaks_vnc(address: &str) -> bool {
    let mut viewer = TcpStream::connect(address).unwrap();
    viewer.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut said = [0; VNC.len()];
    viewer.read_exact(&mut said).is_ok() && said == VNC
}

#[test]
fn a_screen_is_shown_on_loopback_and_survives_the_agent() {
    let mut here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    let off = here.refused(&["vm", "vnc", "web"]).unwrap();
    assert!(off.contains("it has no screen. Start it first"), "{off}");
    let off = here.refused(&["vm", "guest", "ping", "web"]).unwrap();
    assert!(off.contains("does not run"), "{off}");
    here.boot_counter("web").unwrap();
    let (mut shown, address) = vnc(&here, "web");
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    for _ in 0..3 {
        assert!(speaks_vnc(&address));
    }
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    assert!(speaks_vnc(&address), "another agent does not find the screen");
    shown.kill().unwrap();
    shown.wait().unwrap();

    let silent = here.refused(&["vm", "guest", "ping", "web"]).unwrap();
    assert!(silent.contains("install qemu-guest-agent"), "{silent}");
    let none = here.refused(&["vm", "guest", "exec", "web", "--seconds", "900", "--", "/bin/true"]);
    assert!(none.unwrap().contains("must be 1 to 45"));
    let events = here.json(&["events"]).unwrap().to_string();
    assert!(events.contains("vm.screen-opened"), "{events}");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}

/// The image of `scripts/build-debian-image --cloud`.
fn debian() -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/build-debian-image");
    let built = std::process::Command::new(script).arg("--cloud").output().unwrap();
    String::from_utf8(built.stdout).unwrap().lines().last().unwrap().to_owned()
}

#[test]
#[ignore = "it builds and boots a whole Debian: some ten minutes under emulation"]
fn a_debian_guest_runs_programs_and_freezes_its_file_systems() {
    let here = Installation::new().unwrap();
    let (image, user_data) = (debian(), here.path("user-data"));
    std::fs::write(&user_data, "#cloud-config\n{}\n").unwrap();
    let disk = format!("datastore=local,format=raw,size=2GiB,image={image}");
    let told = format!("user-data={}", user_data.display());
    let create = ["vm", "create", "web", "--policy", "encrypted", "--memory", "1GiB"];
    here.vmseal(&[&create[..], &["--disk", &disk, "--cloud-init", &told]].concat()).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let begun = std::time::Instant::now();
    while let Err(error) = here.vmseal(&["vm", "guest", "ping", "web"]) {
        assert!(begun.elapsed() < Duration::from_secs(900), "{error}");
    }
    let run = |command: &[&str]| {
        here.try_vmseal(&[&["vm", "guest", "exec", "web", "--"], command].concat()).unwrap()
    };
    let said = run(&["/bin/sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((&said.stdout[..], &said.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    let failed = run(&["/bin/false"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&failed.stderr).contains("ended with status 1"));
    let flood = run(&["/usr/bin/head", "-c", "1000000", "/dev/zero"]);
    assert_eq!(flood.stdout.len(), 256 * 1024);
    let none = run(&["/no/such/program"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("refuses guest-exec"));
    let frozen = here.vmseal(&["vm", "guest", "fsfreeze", "web"]).unwrap();
    assert!(frozen.contains("are frozen"), "{frozen}");
    let thawed = here.vmseal(&["vm", "guest", "fsthaw", "web"]).unwrap();
    assert!(thawed.contains("are thawed"), "{thawed}");
    // A snapshot does both.
    here.vmseal(&["snapshot", "create", "web", "quiet"]).unwrap();
    let quiet = here.json(&["snapshot", "show", "web", "quiet"]).unwrap();
    assert_eq!(quiet["quiesced"], true, "{quiet}");
    let wrote = run(&["/bin/sh", "-c", "echo goes on >/root/after && sync && cat /root/after"]);
    assert_eq!(&wrote.stdout[..], b"goes on\n");
    here.vmseal(&["snapshot", "delete", "web", "quiet"]).unwrap();
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}
