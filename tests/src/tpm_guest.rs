//! A guest that asks its TPM: it has it keep a marker, and reads that.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::guest::Console;
use crate::installation::Installation;
use crate::shell_guest;

/// What the guest has its TPM keep.
pub const MARKER: &[u8; 16] = b"vmseal-tpm-state";

/// The place in the TPM where the guest keeps it: an index that owners of TPMs may define.
const INDEX: u32 = 0x0150_0001;

/// `TPMA_NV_OWNERWRITE`, `OWNERREAD`, `AUTHREAD`, `AUTHWRITE` and `NO_DA` of that index.
const ATTRIBUTES: u32 = 0x0206_0002;

const OWNER: u32 = 0x4000_0001;
const SHA256: u16 = 0x000b;

/// The codes of `TPM2_NV_DefineSpace`, `TPM2_NV_Write`, `TPM2_NV_Read` and `TPM2_NV_UndefineSpace`.
const DEFINE: u32 = 0x12a;
const WRITE: u32 = 0x137;
const READ: u32 = 0x14e;
const UNDEFINE: u32 = 0x122;

/// The code of `TPM2_PCR_Extend`.
const EXTEND: u32 = 0x182;

/// A register that guests may use as they like.
const REGISTER: u32 = 16;

/// How many commands the guests' TPMs were sent.
static ASKED: AtomicU32 = AtomicU32::new(0);

/// An answer without an error: tag, length and code.
pub const DONE: &str = "80020000001300000000";

/// A command with an empty password of the owner's, which new TPMs have.
fn command(code: u32, handles: &[u32], parameters: &[u8]) -> Vec<u8> {
    let mut body: Vec<u8> = handles.iter().flat_map(|it| it.to_be_bytes()).collect();
    body.extend([0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0]);
    body.extend(parameters);
    let length = u32::try_from(10 + body.len()).unwrap();
    [&0x8002u16.to_be_bytes()[..], &length.to_be_bytes(), &code.to_be_bytes(), &body].concat()
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
}

/// The command that makes a place for the marker.
#[must_use]
pub fn define() -> Vec<u8> {
    let public = [
        &INDEX.to_be_bytes()[..],
        &SHA256.to_be_bytes(),
        &ATTRIBUTES.to_be_bytes(),
        &sized(&[]),
        &16u16.to_be_bytes(),
    ];
    command(DEFINE, &[OWNER], &[sized(&[]), sized(&public.concat())].concat())
}

/// The command that has the TPM keep the marker.
#[must_use]
pub fn write() -> Vec<u8> {
    command(WRITE, &[OWNER, INDEX], &[sized(MARKER), vec![0, 0]].concat())
}

/// The command that reads it.
#[must_use]
pub fn read() -> Vec<u8> {
    command(READ, &[OWNER, INDEX], &[0, 16, 0, 0])
}

/// The command that has it keep the marker no longer.
#[must_use]
pub fn undefine() -> Vec<u8> {
    command(UNDEFINE, &[OWNER, INDEX], &[])
}

/// The command that measures something into a register.
#[must_use]
pub fn extend() -> Vec<u8> {
    let digest = [&1u32.to_be_bytes()[..], &SHA256.to_be_bytes(), &[7; 32]].concat();
    command(EXTEND, &[REGISTER], &digest)
}

/// What that register has.
pub fn measured(guest: &mut Console) -> String {
    let number = ASKED.fetch_add(1, Ordering::Relaxed);
    let read = format!("$(cat /sys/class/tpm/tpm0/pcr-sha256/{REGISTER})");
    guest.type_text(&format!("echo \"PCR{number}=\"\"{read}\"\r")).unwrap();
    guest.expect(&format!("PCR{number}="), 64).unwrap()
}

/// Bytes in hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// Bytes as the shell's `printf` takes them.
fn octal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "\\{byte:03o}").unwrap();
        text
    })
}

/// Has the guest send a command to its TPM; the first `digits` hexadecimal digits of the answer.
pub fn ask(guest: &mut Console, command: &[u8], digits: usize) -> String {
    let octal = octal(command);
    let answer = "$(dd bs=4096 count=1 <&3 2>/dev/null | od -An -v -tx1 | tr -d ' \\n')";
    // A shell whose `exec` fails ends, and the guest with it: on a busy machine the driver may not be there yet.
    // A console that is opened again shows what was said before.
    let number = ASKED.fetch_add(1, Ordering::Relaxed);
    let line = format!(
        "until (exec 3<>/dev/tpm0) 2>/dev/null; do sleep 1; done; exec 3<>/dev/tpm0; printf '{octal}' >&3; echo \"TPM{number}=\"\"{answer}............\"; exec 3>&-\r"
    );
    guest.type_text(&line).unwrap();
    guest.expect(&format!("TPM{number}="), digits).unwrap()
}

/// Has the guest send commands to its TPM, one after the other and then from the first one again, as long as it runs. Nobody else of the
/// guest can use the TPM meanwhile.
pub fn ask_on_and_on(guest: &mut Console, commands: &[Vec<u8>]) {
    let each = commands.iter().fold(String::new(), |mut text, command| {
        let octal = octal(command);
        write!(text, "printf '{octal}' >&3; dd bs=4096 count=1 <&3 >/dev/null 2>&1; ").unwrap();
        text
    });
    let begin = format!("(exec 3<>/dev/tpm0; while true; do {each}done) & echo ASKS-$((6 * 7))");
    shell_guest::run(guest, &begin, "ASKS-42").unwrap();
}

/// Checks that the guest's TPM keeps what it was told.
pub fn keeps(guest: &mut Console) {
    // After the header: the length of the parameters, and that of the data.
    let answer = ask(guest, &read(), 2 * (10 + 4 + 2 + 16));
    assert!(answer.ends_with(&format!("0010{}", hex(MARKER))), "{answer}");
}

/// Makes a VM of this guest with a TPM.
pub fn create(here: &Installation, vm: &str, more: &[&str]) {
    let disk =
        format!("datastore=local,format=raw,image={}", shell_guest::image().unwrap().display());
    let create = ["vm", "create", vm, "--policy", "encrypted", "--disk", &disk, "--tpm"];
    let small = ["--nic", "user", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &small, more].concat()).unwrap();
}

/// Starts a VM, and waits for its guest's shell.
#[must_use]
pub fn start(here: &Installation, vm: &str) -> Console {
    here.vmseal(&["vm", "start", vm]).unwrap();
    let mut guest = here.console(vm).unwrap();
    guest.expect("VMSEAL-NET eth0", 0).unwrap();
    guest
}

/// Whether the guest has a TPM.
pub fn has_tpm(guest: &mut Console) -> bool {
    let number = ASKED.fetch_add(1, Ordering::Relaxed);
    guest.type_text(&format!("[ -e /dev/tpm0 ]; echo \"HAS{number}=\"$?\r")).unwrap();
    guest.expect(&format!("HAS{number}="), 1).unwrap().ends_with('0')
}
