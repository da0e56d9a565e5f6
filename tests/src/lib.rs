//! The base of the whole-system tests (in `tests/tests/`): a complete vmseal on this machine, used
//! through its command line like a user does, with real guests.
//!
//! | module | what |
//! |---|---|
//! | [`installation`] | a server and an agent of their own, on a loopback address of their own |
//! | [`filter`] | a `vmseal-filter` started by hand, without server or agent |
//! | [`figures`] | what the filter of a VM counts |
//! | [`guest`] | disks that guests boot from, and their consoles |
//! | [`firmware_shell`] | the shell of UEFI firmware, and its variables |
//! | [`uefi_guest`] | a guest that UEFI firmware starts, and that says from what |
//! | [`first_boot`] | a small Linux guest that reads what it is told at its first boot |
//! | [`as_user`] | commands as a user gives them who is not root |
//! | [`experiment`] | `vmseal lab run` with an experiment of a test's own |
//! | [`ceph`] | a cluster of Ceph's own programs |
//! | [`ceph_pool`] | a pool of such a cluster, which tests may share |
//! | [`ceph_datastore`] | an installation with a pool of such a cluster as datastore |
//! | [`cable`] | a cable between a test and the network of its cluster, which can be cut |
//! | [`huge_pages`] | the huge pages of this machine |
//! | [`capture`] | what goes over the network of a test |
//! | [`network`] | networks of a test's own, and the guest that is on them |
//! | [`fio_guest`] | fio in a guest, which writes and verifies all the time |
//! | [`one_instant`] | whether copies of the disks of that guest are of one instant |
//! | [`shell_guest`] | a small Linux guest with a shell on its console, in a VM |
//! | [`counting_guest`] | the same with a marker on its disk, and numbers that it writes and reads |
//! | [`cuts`] | connections of a server to agents and other servers, which can be cut |
//! | [`dying_guest`] | a guest that moves while its QEMU or filter dies |
//! | [`terminal`] | commands at a terminal of their own |
//! | [`test_guest`] | a small Linux guest that runs a script with real dm-crypt and fio |
//! | [`tpm_guest`] | a guest that has its TPM keep something |
//! | [`exposed`] | `vmseal disk expose` |
//! | [`postgres_guest`] | PostgreSQL in a guest, which works all the time |
//! | [`process`] | children that never outlive their test |
//! | [`kills`] | processes that die in the middle of a task |
//! | [`two_hosts`] | a VM that is on one of two hosts |
//! | [`two_planes`] | two control planes, and a VM that goes from one to the other |
//! | [`wire`] | an attacker between two hosts |
//! | [`header`] | damage and forgery of an image's LUKS2 header |
//! | [`redis`] | a client of redis that writes while the guest moves |
//! | [`rest`] | the REST API through curl |
//! | [`scan`] | a search for secrets in files and processes |

pub mod as_user;
pub mod cable;
pub mod capture;
pub mod ceph;
pub mod ceph_datastore;
pub mod ceph_pool;
pub mod counting_guest;
pub mod cuts;
pub mod dying_guest;
pub mod experiment;
pub mod exposed;
pub mod figures;
pub mod filter;
pub mod fio_guest;
pub mod firmware_shell;
pub mod first_boot;
pub mod guest;
pub mod header;
pub mod held_steps;
pub mod huge_pages;
pub mod installation;
pub mod kills;
pub mod network;
pub mod one_instant;
pub mod postgres_guest;
pub mod process;
pub mod redis;
pub mod rest;
pub mod scan;
pub mod shell_guest;
pub mod terminal;
pub mod test_guest;
pub mod tpm_guest;
pub mod two_hosts;
pub mod two_planes;
pub mod uefi_guest;
pub mod viewer;
pub mod wire;

use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// The longest time for anything but a guest's boot. Generous: the machine may be busy with other tests.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Says that the test which runs does not try what it is for, or not all of it, on this machine, and why. `scripts/test` repeats these
/// lines at its end.
pub fn skipped(why: impl Display) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default();
    let line = format!("skipped: {name}: {why}\n");
    // Not by a macro, whose output the harness hides when a test passes. Where nobody hears it, the test goes on.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Waits until `test` gives something, and gives it; fails with `what` after [`TIMEOUT`].
pub fn eventually<T>(what: &str, mut test: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(found) = test() {
            return Ok(found);
        }
        if begun.elapsed() > TIMEOUT {
            bail!("not so after {TIMEOUT:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A program of this workspace, as `cargo build` left it beside the tests.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directory = test.ancestors().nth(2).context("the test lies in no target directory")?;
    let program = directory.join(name);
    if !program.exists() {
        bail!("{} is not built: run `cargo build --workspace` first", program.display());
    }
    Ok(program)
}
