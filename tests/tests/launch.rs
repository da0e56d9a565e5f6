//! `vmseal vm launch` and `vmseal vm ssh`, up to where a guest would need an SSH server of its own.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use vmseal_tests::installation::{Installation, text};

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDu0bKR0wAYc5z1f3Yv0J1mZ2c9bS7mUqkq3v1Qh9w1c me\n";

/// The command that launches `web1`, with `more` options.
fn command<'a>(image: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let usual = ["vm", "launch", "web1", "--image", image, "--memory=256M", "--disk-size=16M"];
    [&usual[..], more].concat()
}

#[test]
fn a_vm_is_launched_from_an_image_and_ssh_is_told_where_it_is() {
    let here = Installation::new().unwrap();
    let (public, image) = (here.path("key.pub"), here.counter_image().unwrap());
    std::fs::write(&public, KEY).unwrap();
    std::fs::write(here.path("key"), "").unwrap();
    let (public, image) = (text(&public).unwrap(), text(&image).unwrap());

    // What is not right is refused, and nothing is left of it.
    for (more, why) in [
        (&[][..], "nobody could log in"),
        (&["--ssh-key", public, "--datastore=none"], "none"),
        (&["--ssh-key", public, "--policy=none"], "none"),
        (&["--ssh-key", public, "--nic=wire=1"], "--nic"),
    ] {
        let said = here.refused(&command(image, more)).unwrap();
        assert!(said.contains(why), "{more:?}: {said}");
    }
    let said =
        here.refused(&["vm", "launch", "web1", "--image=none", "--ssh-key", public]).unwrap();
    assert!(said.contains("no image 'none'"), "{said}");
    // The image of Debian is built only for a VM that would be made.
    let debian = ["vm", "launch", "web1", "--image=debian", "--ssh-key", public];
    let said = here.refused(&[&debian[..], &["--policy=none"]].concat()).unwrap();
    assert!(said.contains("none") && !said.contains("building"), "{said}");
    if !Path::new("/var/lib/vmseal/images/debian.raw").exists() {
        let plan = here.vmseal(&[&debian[..], &["--dry-run"]].concat()).unwrap();
        assert!(plan.contains("1. build the image 'debian'"), "{plan}");
        let said = here.refused(&[&debian[..], &["--disk-size=1G"]].concat()).unwrap();
        assert!(said.contains("--disk-size") && said.contains("2 GiB"), "{said}");
    }
    let other = here.path("other.raw");
    std::fs::write(&other, [&b"QFI\xfb"[..], &[0; 1 << 20]].concat()).unwrap();
    let other = command(text(&other).unwrap(), &["--ssh-key", public, "--dry-run"]);
    assert!(here.refused(&other).unwrap().contains("--force"));
    here.vmseal(&[&other[..], &["--force"]].concat()).unwrap();
    let more = ["--ssh-key", public, "--dry-run"];
    let said = here.refused(&command("/none/a.raw", &more)).unwrap();
    assert!(said.contains("--image: /none/a.raw: "), "{said}");
    let plan = here.vmseal(&command(image, &["--ssh-key", public, "--dry-run"])).unwrap();
    assert!(plan.contains("wait until its SSH server answers"), "{plan}");
    assert_eq!(here.json(&["vm", "list"]).unwrap(), serde_json::json!([]));

    // This guest has no SSH server: it runs, and the wait for it ends.
    let more = ["--ssh-key", public, "--user=me", "--timeout=1s"];
    let output = here.try_vmseal(&command(image, &more)).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("nothing answers as an SSH server at 127.0.0.1:"), "{said}");
    let vm = here.vm("web1").unwrap();
    assert_eq!((&vm["power"], &vm["policy"]), (&"running".into(), &"encrypted".into()));
    let port = vm["nics"][0]["forwards"][0]["host_port"].to_string();

    // ssh itself is another's: one that says what it is told.
    let programs = here.path("bin");
    std::fs::create_dir(&programs).unwrap();
    let ssh = programs.join("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).unwrap();
    let told = |more: &[&str]| {
        let mut command = here.command().unwrap();
        command.args(["vm", "ssh", "web1"]).args(more).env_remove("XDG_CONFIG_HOME");
        let output = command.env("PATH", &programs).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "the exit code is ssh's");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let id = vm["id"].as_str().unwrap();
    let words = told(&["--", "uname", "-a"]);
    let private = text(&here.path("key")).unwrap().to_owned();
    let follows = |option: &str, value: &str| words.windows(2).any(|two| two == [option, value]);
    assert!(follows("-p", &port) && follows("-l", "me") && follows("-i", &private), "{words:?}");
    assert!(follows("-o", &format!("HostKeyAlias={id}")), "{words:?}");
    assert!(follows("-o", "StrictHostKeyChecking=accept-new"), "{words:?}");
    assert_eq!(words[words.len() - 4..], ["--", "127.0.0.1", "uname", "-a"]);
    let words = told(&["--address=192.0.2.1", "--user=root"]);
    assert_eq!(words[words.len() - 6..], ["-p", "22", "-l", "root", "--", "192.0.2.1"]);

    here.vmseal(&["vm", "stop", "web1", "--force"]).unwrap();
    let said = here.refused(&["vm", "ssh", "web1"]).unwrap();
    assert!(said.contains("vmseal vm start web1"), "{said}");
}
