//! The shell of UEFI firmware, which a guest without anything to boot is: variables are set and shown there.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::guest::Console;
use crate::installation::Installation;

/// The owner of the tests' variables.
pub const OWNER: &str = "7673656c-0000-4000-8000-000000000001";

const PROMPT: &str = "Shell>";

/// How long firmware may take to its prompt. At its first start it writes its variables one after another and says nothing meanwhile, and a
/// cluster of Ceph that shares the processors with others takes its time for each.
const TIMEOUT: Duration = Duration::from_secs(300);

/// What the kernel of a guest is called that the shell starts: with the ending of UEFI's programs.
pub(crate) const PROGRAM: &str = "linux.efi";

/// What that kernel is told, of what `scripts/build-network-guest` tells it. No more: a line that is typed is not to be longer than what the
/// firmware's terminal has room for until it is read.
const OPTIONS: &str = "console=ttyS0 quiet mitigations=off net.ifnames=0 no_timer_check panic=-1";

/// The console of a guest that has come, or comes, to its prompt.
pub fn open(here: &Installation, vm: &str) -> Console {
    let mut shell = here.console(vm).unwrap();
    shell.expect_within(TIMEOUT, PROMPT, 0).unwrap();
    shell
}

/// Waits for a prompt later than all that a console shows of the time before it was opened.
fn at_prompt(shell: &mut Console) {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let ready = format!("ready-{}", ASKED.fetch_add(1, Ordering::Relaxed));
    shell.type_text(&format!("echo {ready}\r")).unwrap();
    shell.expect(&ready, 0).unwrap();
    shell.expect(PROMPT, 0).unwrap();
}

/// Sets a variable that the firmware keeps to the bytes of the hexadecimal `value`, and waits until it is set.
pub fn set_variable(shell: &mut Console, name: &str, value: &str) {
    at_prompt(shell);
    shell.type_text(&format!("setvar {name} -guid {OWNER} -bs -rt -nv ={value}\r")).unwrap();
    shell.expect(PROMPT, 0).unwrap();
}

/// Waits until the firmware shows `shown` when asked for a variable.
pub fn has_variable(shell: &mut Console, name: &str, shown: &str) {
    at_prompt(shell);
    shell.type_text(&format!("setvar {name} -guid {OWNER}\r")).unwrap();
    shell.expect(shown, 0).unwrap();
    shell.expect(PROMPT, 0).unwrap();
}

/// Has the shell start the guest of [`crate::shell_guest::uefi_image`], on the first disk with a file system. It is at its prompt.
pub fn start_guest(shell: &mut Console) {
    shell.type_text(&format!("fs0:\\{PROGRAM} initrd=\\initrd {OPTIONS}\r")).unwrap();
}
