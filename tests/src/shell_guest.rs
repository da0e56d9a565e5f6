//! A small Linux guest with a shell on its console and a network card (`scripts/build-network-guest`), in a VM of an
//! installation.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::firmware_shell;
use crate::first_boot::shell;
use crate::guest::{Console, built};
use crate::installation::Installation;

/// The image of its disk; built at the first use.
pub fn image() -> anyhow::Result<PathBuf> {
    built("build-network-guest", &[])
}

/// Makes a copy of it at this path, which the shell of UEFI firmware starts ([`firmware_shell::start_guest`]).
///
/// # Errors
/// Those of the programs that make it (package `mtools`).
pub fn uefi_image(path: &Path) -> anyhow::Result<()> {
    std::fs::copy(image()?, path)?;
    let rename = format!("mren -i \"$1\" ::vmlinuz ::{}", firmware_shell::PROGRAM);
    shell(Path::new("/"), &rename, &[path])
}

/// The same with redis.
pub fn redis_image() -> anyhow::Result<PathBuf> {
    built("build-network-guest", &["--redis"])
}

/// Starts an agent in the guest, to be typed there. It says what is in `/answer` of the guest's addresses, and nothing at all before
/// that is there.
pub const AGENT: &str = r#"insmod /virtio_console.ko
until [ -e /dev/vport* ]; do sleep 0.2; done
cat >/agent <<'END'
exec 3<>$(echo /dev/vport*)
while true; do
    while read -r line <&3; do
        [ -e /answer ] || { echo "ASKED-$((6 * 7))"; continue; }
        case $line in
            *guest-sync*) id=${line#*\"id\":}; printf '\377{"return": %s}\n' "${id%%\}*}" >&3 ;;
            *guest-network*) cat /answer >&3 ;;
            *) echo '{"return": {}}' >&3 ;;
        esac
    done
    sleep 0.1
done
END
sh /agent &
"#;

/// Makes and starts a VM with this guest on a disk of 64 MiB; `more` are options of `vm create`.
pub fn start(here: &Installation, vm: &str, policy: &str, more: &[&str]) -> anyhow::Result<()> {
    let disk = format!("datastore=local,format=raw,image={},size=64MiB", image()?.display());
    let card = "user,mac=52:54:0a:00:02:0f";
    let create = ["vm", "create", vm, "--policy", policy, "--disk", &disk, "--nic", card];
    here.vmseal(&[&create[..], &["--memory", "192MiB"], more].concat())?;
    here.vmseal(&["vm", "start", vm])?;
    Ok(())
}

/// Runs a command in the guest; `done` is its output's end. The shell does not echo what is typed. A console that was opened anew
/// repeats what the guest said before: that is no answer to this command, so the shell says something new first.
pub fn run(console: &mut Console, command: &str, done: &str) -> anyhow::Result<()> {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let asked = ASKED.fetch_add(1, Ordering::Relaxed);
    console.type_text(&format!("echo ASKED-$((1 + {asked}))-\n"))?;
    console.expect(&format!("ASKED-{}-", asked + 1), 0)?;
    console.type_text(&format!("{command}\n"))?;
    console.expect(done, 0)?;
    Ok(())
}

/// Waits until the guest says that a shell expression holds.
pub fn holds(console: &mut Console, what: &str) -> anyhow::Result<()> {
    run(console, &format!("until {what}; do sleep 0.2; done; echo HOLDS-$((6 * 7))"), "HOLDS-42")
}

/// The guest has a shell, and the driver of its disks.
pub fn booted(here: &Installation, vm: &str) -> anyhow::Result<Console> {
    let mut console = here.console(vm)?;
    boots(&mut console)?;
    Ok(console)
}

/// The guest boots, and gets the driver of its disks.
pub fn boots(console: &mut Console) -> anyhow::Result<()> {
    console.expect("VMSEAL-NET eth0", 0)?;
    run(console, "insmod /virtio_blk.ko; echo DRIVER-$((6 * 7))", "DRIVER-42")
}
