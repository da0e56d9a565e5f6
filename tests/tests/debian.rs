//! A real Debian, by the commands that the README has first: what only a guest shows that has cloud-init, an SSH server, QEMU's guest
//! agent, and drivers of a whole machine.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::UdpSocket;
use std::process::{Command, Output};
use std::time::Duration;

use vmseal_tests::eventually;
use vmseal_tests::guest::medium;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::viewer::Viewer;

const VM: &str = "web1";

/// Its card: its SSH server and its echo of datagrams are reached from the host.
const CARD: &str = "user,forward=tcp:22,forward=udp:7";

/// What its owner types when it is launched.
const PASSWORD: &str = "correct horse";

/// Sends every datagram back.
const ECHO: &str = "import socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(('', 7))
while True: echo.sendto(*echo.recvfrom(99))";

/// The image of `scripts/build-debian-image`, which is the one that `vmseal image build debian` makes.
fn debian() -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/build-debian-image");
    let built = Command::new(script).output().unwrap();
    String::from_utf8(built.stdout).unwrap().lines().last().unwrap().to_owned()
}

/// A guest that was launched with `more` options, and lets its owner in by a key; a password was typed, too.
fn launched(here: &Installation, more: &[&str]) {
    let (image, key) = (debian(), here.path("key"));
    let key = text(&key).unwrap();
    let made =
        Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", key]).status();
    assert!(made.unwrap().success());
    let public = format!("{key}.pub");
    let launch = ["vm", "launch", VM, "--image", &image, "--format", "raw", "--ssh-key", &public];
    let usual = ["--password", "--nic", CARD, "--timeout", "15m"];
    let typed = format!("{PASSWORD}\n{PASSWORD}\n");
    let launched = here.answered(&[&launch[..], &usual, more].concat(), &typed).unwrap();
    assert!(launched.status.success(), "{}", String::from_utf8_lossy(&launched.stderr));
    // Its SSH server starts again when cloud-init has set the password, which ends what was connected; its console asks who logs in
    // when its boot has ended, which takes minutes where other guests are at work.
    let let_in = || {
        let command = "cloud-init status --wait >/dev/null; \
                       systemctl is-system-running --wait >/dev/null; hostname; sudo id -u";
        here.vmseal(&["vm", "ssh", VM, "--", command]).ok()
    };
    let said = eventually("its owner is let in", let_in);
    // A connection that ended may have waited for longer than anything is tried again.
    let said = said.or_else(|_| eventually("its owner is let in", let_in));
    assert_eq!(said.unwrap(), format!("{VM}\n0\n"));
}

fn in_guest(here: &Installation, command: &[&str]) -> Output {
    let exec = ["vm", "guest", "exec", VM, "--seconds", "45", "--"];
    here.try_vmseal(&[&exec[..], command].concat()).unwrap()
}

/// The password is known to the guest as a hash, and lets its owner in at the console.
fn lets_its_owner_in_by_the_password(here: &Installation) {
    let shadow = in_guest(here, &["/usr/bin/getent", "shadow", "debian"]);
    assert!(shadow.stdout.starts_with(b"debian:$6$"), "{shadow:?}");
    let mut console = here.console(VM).unwrap();
    console.expect(" login: ", 0).unwrap();
    console.type_text("debian\r").unwrap();
    console.expect("Password: ", 0).unwrap();
    console.type_text(&format!("{PASSWORD}\r")).unwrap();
    console.expect(&format!("debian@{VM}:"), 0).unwrap();
}

/// The screen shows the login that its owner types at.
fn shows_a_login_on_its_screen(here: &Installation) {
    let (mut shown, address) = here.screen(VM).unwrap();
    let mut viewer = Viewer::connect(&address).unwrap();
    let before =
        eventually("a login is shown", || viewer.lit().ok().filter(|lit| *lit > 0)).unwrap();
    viewer.type_line("debian").unwrap();
    // The name, and the question for the password below it.
    eventually("the guest echoes what is typed", || {
        viewer.lit().ok().filter(|lit| *lit > before + before / 4)
    })
    .unwrap();
    shown.kill().unwrap();
    shown.wait().unwrap();
}

/// The guest reads the medium that it was launched with, and the one that is put in its place.
fn reads_its_drive(here: &Installation, first: &str, second: &str) {
    let has = |text: &str| {
        let read = in_guest(here, &["/bin/grep", "-c", "-a", text, "/dev/sr0"]);
        read.status.success().then_some(())
    };
    assert_eq!(has(&format!("VMSEAL-READ {first}")), Some(()));
    here.vmseal(&["vm", "cdrom", "insert", VM, second]).unwrap();
    eventually("the guest reads the second medium", || has("VMSEAL-READ second")).unwrap();
    // A card of the other model would be driven, too.
    assert!(in_guest(here, &["/sbin/modprobe", "--dry-run", "e1000e"]).status.success());
}

/// The guest's kernel draws random numbers from the host's.
fn draws_random_numbers(here: &Installation) {
    let source = in_guest(here, &["/bin/cat", "/sys/class/misc/hw_random/rng_current"]);
    assert!(source.stdout.starts_with(b"virtio_rng"), "{source:?}");
}

/// Programs run in the guest, and their outputs come back, up to a limit.
fn runs_programs(here: &Installation) {
    let run = |command: &[&str]| in_guest(here, command);
    let said = run(&["/bin/sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((&said.stdout[..], &said.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    let failed = run(&["/bin/false"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&failed.stderr).contains("ended with status 1"));
    let flood = run(&["/usr/bin/head", "-c", "1000000", "/dev/zero"]);
    assert_eq!(flood.stdout.len(), 256 * 1024);
    let none = run(&["/no/such/program"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("refuses guest-exec"));
}

/// Datagrams to a forwarded port reach the guest, and its answers come back.
fn answers_datagrams(here: &Installation) {
    let serve = format!("setsid /usr/bin/python3 -c \"{ECHO}\" </dev/null >/dev/null 2>&1 &");
    assert!(in_guest(here, &["/bin/sh", "-c", &serve]).status.success());
    let shown = here.vm(VM).unwrap();
    let forward = &shown["nics"][0]["forwards"][1];
    assert_eq!(forward["protocol"], "udp", "{shown}");
    let host = UdpSocket::bind("127.0.0.1:0").unwrap();
    host.connect(format!("127.0.0.1:{}", forward["host_port"])).unwrap();
    host.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut back = [0; 99];
    eventually("a datagram comes back", || {
        host.send(b"to the guest").ok()?;
        let length = host.recv(&mut back).ok()?;
        (&back[..length] == b"to the guest").then_some(())
    })
    .unwrap();
}

/// File systems are frozen and thawed, by command, for a snapshot and for a backup.
fn freezes_its_file_systems(here: &Installation) {
    let frozen = here.vmseal(&["vm", "guest", "fsfreeze", VM]).unwrap();
    assert!(frozen.contains("are frozen"), "{frozen}");
    let thawed = here.vmseal(&["vm", "guest", "fsthaw", VM]).unwrap();
    assert!(thawed.contains("that were thawed: "), "{thawed}");
    here.vmseal(&["snapshot", "create", VM, "quiet"]).unwrap();
    let quiet = here.json(&["snapshot", "show", VM, "quiet"]).unwrap();
    assert_eq!(quiet["quiesced"], true, "{quiet}");
    let wrote = in_guest(here, &["/bin/sh", "-c", "echo goes on >/root/a && sync && cat /root/a"]);
    assert_eq!(&wrote.stdout[..], b"goes on\n");
    here.vmseal(&["snapshot", "delete", VM, "quiet"]).unwrap();
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    here.vmseal(&["backup", "create", VM, "first", "--to", text(&to).unwrap()]).unwrap();
    let backup = here.json(&["backup", "show", VM, "first"]).unwrap();
    assert_eq!(backup["quiesced"], true, "{backup}");
}

#[test]
fn a_debian_is_launched_reached_by_ssh_and_served_by_its_guest_agent() {
    let here = Installation::new().unwrap();
    let media = ["first", "second"].map(|text| {
        let path = here.path(&format!("{text}.iso"));
        medium(&path, text).unwrap();
        path
    });
    let [first, second] = [text(&media[0]).unwrap(), text(&media[1]).unwrap()];
    launched(&here, &["--cdrom", first]);
    here.vmseal(&["vm", "guest", "ping", VM]).unwrap();
    lets_its_owner_in_by_the_password(&here);
    shows_a_login_on_its_screen(&here);
    draws_random_numbers(&here);
    runs_programs(&here);
    answers_datagrams(&here);
    reads_its_drive(&here, "first", second);
    freezes_its_file_systems(&here);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// A vault that only this VM's TPM opens, and only under the same secure boot: LUKS by `systemd-cryptenroll`.
const VAULT: &str = "cd /root
truncate -s 32M vault
printf first >key
cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 vault key
device=$(losetup --find --show vault)
PASSWORD=first systemd-cryptenroll --tpm2-device=auto --tpm2-pcrs=7 --wipe-slot=password $device
rm key
/lib/systemd/systemd-cryptsetup attach vault $device - tpm2-device=auto,headless=1
echo of the vault >/dev/mapper/vault
sync
/lib/systemd/systemd-cryptsetup detach vault";

/// The vault opens again, and does not when the register that it is sealed to has another value.
const OPEN: &str = "device=$(losetup --noheadings --output NAME --associated /root/vault)
open() { /lib/systemd/systemd-cryptsetup attach vault $device - tpm2-device=auto,headless=1; }
open
head -n 1 /dev/mapper/vault
/lib/systemd/systemd-cryptsetup detach vault
tpm2_pcrextend 7:sha256=0000000000000000000000000000000000000000000000000000000000000001
if open; then echo opened in spite of it; fi";

#[test]
fn a_debian_starts_by_secure_boot_and_its_tpm_opens_a_luks_volume() {
    if !has_its_turn() {
        return;
    }
    let here = Installation::new().unwrap();
    launched(&here, &["--firmware", "uefi-secure-boot", "--tpm"]);
    // By SSH, which has no limit of time: a volume that a TPM opens takes a busy host's guest longer than `vm guest exec` waits.
    let run = |script: &str| {
        assert!(!script.contains('\''), "it is quoted");
        here.vmseal(&["vm", "ssh", VM, "--", &format!("sudo /bin/sh -euc '{script}'")]).unwrap()
    };
    let variable = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
    assert_eq!(run(&format!("od -An -tu1 -j4 -N1 {variable}")).trim(), "1");
    // The firmware has measured itself, and what it lets start.
    let registers = run("tpm2_pcrread sha256:0,7");
    let measured = registers.matches("0x").count();
    assert!(measured == 2 && !registers.contains(&"0".repeat(64)), "{registers}");
    run(VAULT);
    assert_eq!(run(OPEN), "of the vault\n");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}
