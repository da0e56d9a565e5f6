//! The screen of a guest, and the port of its agent, over server and agent.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use vmseal_tests::installation::Installation;

/// How every screen begins.
const VNC: &[u8] = b"RFB 003.008\n";

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
    let (mut shown, address) = here.screen("web").unwrap();
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
