//! `vmseal vm launch` and `vmseal vm ssh`, up to where a guest would need an SSH server of its own, and the images that are
//! launched by name.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmseal_tests::as_user::as_user;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::{eventually, skipped};

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDu0bKR0wAYc5z1f3Yv0J1mZ2c9bS7mUqkq3v1Qh9w1c me\n";

/// Programs in place of those of the same names, by which an image is built in seconds: of a system without files, and without
/// further user ids.
const PROGRAMS: [(&str, &str); 5] = [
    ("mmdebstrap", r#"cat >/dev/null; tar -cf "${@: -2:1}" -T /dev/null"#),
    ("mcopy", ""),
    ("newuidmap", ""),
    ("unshare", r#"shift 2; exec "$@""#),
    // The last one before the image gets its name.
    ("sync", r#"[[ ! -e $HOLD ]] || { touch "$HOLD.held"; sleep 600; }"#),
];

const BUILD: [&str; 3] = ["image", "build", "debian"];

/// A program of the test's own.
fn make_program(path: &Path, script: &str) {
    std::fs::write(path, script).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}

/// A command of a user who is not root, whose images are built by [`PROGRAMS`].
fn of_user(here: &Installation, arguments: &[&str]) -> Option<Command> {
    let mut command = here.command().unwrap();
    let mut command = as_user(command.args(arguments))?;
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", here.path("builders").display()));
    command.env("HOLD", here.path("hold"));
    Some(command)
}

/// The images that a user has, by name, without those of root on this machine.
fn images_of_user(here: &Installation) -> Value {
    let output = of_user(here, &["image", "list", "-o", "json"]).unwrap().output().unwrap();
    let mut listed: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let own = here.path(".cache");
    listed.retain(|image| Path::new(image["path"].as_str().unwrap()).starts_with(&own));
    listed.into()
}

/// A build for which there is no place says so.
fn needs_a_place(here: &Installation) {
    let cache = here.path("closed");
    let images = cache.join("vmseal/images");
    std::fs::create_dir_all(&images).unwrap();
    for (closed, why) in [(&images, "the image was not built"), (&cache, "cannot make")] {
        std::fs::set_permissions(closed, PermissionsExt::from_mode(0o555)).unwrap();
        let mut build = of_user(here, &BUILD).unwrap();
        let output = build.env("XDG_CACHE_HOME", &cache).env("LC_ALL", "C").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(why), "{said}");
        assert!(said.contains("Permission denied"), "{said}");
        if closed == &images {
            std::fs::remove_dir_all(cache.join("vmseal")).unwrap();
        }
    }
}

/// Debian's image is built for a user, and is one only when all of it is there. Gives whether this machine has users; in
/// place of what was built the counting guest is there then.
fn a_user_builds_debian(here: &Installation) -> bool {
    std::fs::create_dir(here.path("builders")).unwrap();
    for (name, script) in PROGRAMS {
        let script = format!("#!/bin/bash\n{script}\n");
        make_program(&here.path("builders").join(name), &script);
    }
    let Some(mut build) = of_user(here, &BUILD) else { return false };
    needs_a_place(here);

    std::fs::write(here.path("hold"), "").unwrap();
    let build = build.process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
    let mut building = build.spawn().unwrap();
    eventually("the image is all but built", || here.path("hold.held").exists().then_some(()))
        .unwrap();
    killpg(Pid::from_raw(building.id().cast_signed()), Signal::SIGKILL).unwrap();
    building.wait().unwrap();
    std::fs::remove_file(here.path("hold")).unwrap();
    assert_eq!(images_of_user(here), json!([]));

    let image = here.path(".cache/vmseal/images/debian.raw");
    for (said, what_to_do) in [
        ("installing GRUB", "sudo vmseal image build debian"),
        ("it is built already", "--force builds it again"),
    ] {
        let built = of_user(here, &BUILD).unwrap().output().unwrap();
        let told = String::from_utf8_lossy(&built.stderr).into_owned();
        assert!(built.status.success() && told.contains(said), "{told}");
        assert!(told.contains(what_to_do), "{told}");
        assert_eq!(String::from_utf8(built.stdout).unwrap().trim(), text(&image).unwrap());
    }
    let images = images_of_user(here);
    let [debian] = &images.as_array().unwrap()[..] else { panic!("{images}") };
    assert_eq!((&debian["name"], &debian["size"]), (&json!("debian"), &json!(2_u64 << 30)));
    std::fs::copy(here.counter_image().unwrap(), image).unwrap();
    true
}

/// The command that launches `web1`, with `more` options.
fn command<'a>(image: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let usual = ["vm", "launch", "web1", "--image", image, "--memory=256M", "--disk-size=16M"];
    [&usual[..], more].concat()
}

/// The image of Debian is built only for a VM that would be made, and where the programs are that build it. A dry run refuses what a build
/// refuses, for the reason that it gives.
fn debian_is_built_where_it_can_be(here: &Installation, public: &str) {
    let debian = ["vm", "launch", "web1", "--image=debian", "--ssh-key", public];
    let said = here.refused(&[&debian[..], &["--policy=none"]].concat()).unwrap();
    assert!(said.contains("none") && !said.contains("building"), "{said}");
    if Path::new("/var/lib/vmseal/images/debian.raw").exists() {
        skipped("this machine has an image 'debian': no launch would build one");
        return;
    }
    let dry_run = [&debian[..], &["--dry-run"]].concat();
    let plan = here.vmseal(&dry_run).unwrap();
    assert!(plan.contains("1. build the image 'debian'"), "{plan}");
    let said = here.refused(&[&debian[..], &["--disk-size=1G"]].concat()).unwrap();
    assert!(said.contains("--disk-size") && said.contains("2 GiB"), "{said}");

    // By `id` the script that builds it sees whether it is root's; there is no other program.
    let programs = here.path("few");
    std::fs::create_dir(&programs).unwrap();
    symlink("/usr/bin/id", programs.join("id")).unwrap();
    let ended = |arguments: &[&str]| {
        let mut command = here.command().unwrap();
        let output = command.args(arguments).env("PATH", &programs).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let image = here.path("never.raw");
    let built = ended(&["image", "build", "debian", "--to", text(&image).unwrap()]);
    assert!(built.1.contains("install these packages first: mmdebstrap"), "{built:?}");
    assert_eq!((built.0, image.exists()), (Some(1), false));
    let planned = ended(&dry_run);
    let reason = |ended: &(Option<i32>, String)| ended.1.lines().next().map(str::to_owned);
    assert_eq!((planned.0, reason(&planned)), (built.0, reason(&built)));
    assert!(planned.1.contains("the image could not be built"), "{planned:?}");
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
    debian_is_built_where_it_can_be(&here, public);
    // An image that the host cannot take is refused before anything is made.
    let (other, large) = (here.path("other.raw"), here.path("large.raw"));
    std::fs::write(&other, [&b"QFI\xfb"[..], &[0; 1 << 20]].concat()).unwrap();
    std::fs::File::create(&large).unwrap().set_len(32 << 20).unwrap();
    let (other, large) = (text(&other).unwrap(), text(&large).unwrap());
    for (image, why) in
        [(other, "--force"), (large, "make the disk larger"), ("/none/a.raw", "--image: ")]
    {
        for dry_run in [&["--dry-run"][..], &[]] {
            let launch = [&command(image, &["--ssh-key", public])[..], dry_run].concat();
            let said = here.refused(&launch).unwrap();
            assert!(said.contains(why) && said.contains(&format!("{image}: ")), "{said}");
        }
    }
    let tasks = here.json(&["task", "list"]).unwrap();
    assert!(!tasks.to_string().contains("vm.create"), "{tasks}");
    here.vmseal(&command(other, &["--ssh-key", public, "--force", "--dry-run"])).unwrap();
    let plan = here.vmseal(&command(image, &["--ssh-key", public, "--dry-run"])).unwrap();
    assert!(plan.contains("wait until its SSH server answers"), "{plan}");
    assert_eq!(here.json(&["vm", "list"]).unwrap(), serde_json::json!([]));

    // This guest has no SSH server: it runs, and the wait for it ends.
    let more = ["--ssh-key", public, "--user=me", "--timeout=1s"];
    let image = if a_user_builds_debian(&here) { "debian" } else { image };
    // What lies there now was not partitioned by this program's script: UEFI finds nothing to start in it.
    let uefi = command(image, &["--ssh-key", public, "--firmware=uefi"]);
    if image == "debian"
        && let Some(mut launch) = of_user(&here, &uefi)
    {
        let refused = launch.output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            said.contains("--firmware") && said.contains("image build debian --force"),
            "{said}"
        );
    }
    let launch = command(image, &more);
    let output = match of_user(&here, &launch) {
        Some(mut launch) => launch.output().unwrap(),
        None => here.try_vmseal(&launch).unwrap(),
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(!said.contains("building"), "{said}");
    assert!(said.contains("nothing answers as an SSH server at 127.0.0.1:"), "{said}");
    let vm = here.vm("web1").unwrap();
    assert_eq!((&vm["power"], &vm["policy"]), (&"running".into(), &"encrypted".into()));
    let port = vm["nics"][0]["forwards"][0]["host_port"].to_string();

    // ssh itself is another's: one that says what it is told.
    let programs = here.path("bin");
    std::fs::create_dir(&programs).unwrap();
    let ssh = programs.join("ssh");
    make_program(&ssh, "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n");
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

    // A guest whose cable is out runs, and is not waited for.
    here.vmseal(&["vm", "delete", "web1"]).unwrap();
    let counter = here.counter_image().unwrap();
    let card = "--nic=user,forward=tcp:22,link=down";
    let more = ["--ssh-key", public, card, "--migration-encryption=required", "--timeout=20s"];
    let launch = command(text(&counter).unwrap(), &more);
    let plan = here.vmseal(&[&launch[..], &["--dry-run"]].concat()).unwrap();
    assert!(plan.contains("wait for nothing more"), "{plan}");
    let said = here.vmseal(&launch).unwrap();
    assert!(said.contains("vmseal nic set web1 nic0 --link up"), "{said}");
    let vm = here.vm("web1").unwrap();
    assert_eq!(vm["power"], "running");
    assert_eq!(vm["migration_encryption"], "required");
    here.vmseal(&["vm", "stop", "web1", "--force"]).unwrap();
}
