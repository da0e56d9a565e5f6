//! A VM that is on one of two hosts, and moves while processes die.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;

use crate::eventually;
use crate::installation::{Installation, text};
use crate::process::kill_hard;

/// The first host.
pub const HERE: &str = "here";
/// The host that is added.
pub const THERE: &str = "there";
/// QEMU, as a process.
pub const QEMU: &str = "qemu-system-x86_64";
/// The filter, as a process.
pub const FILTER: &str = "vmseal-filter";

/// Adds the second host, with a datastore of its own.
///
/// # Errors
/// Those of the commands.
pub fn add_host_with_datastore(here: &mut Installation) -> anyhow::Result<()> {
    here.add_host(THERE)?;
    let path = own_directory(here, THERE);
    std::fs::create_dir(&path)?;
    here.vmseal(&[
        "datastore",
        "add",
        own_datastore(THERE),
        "--host",
        THERE,
        "--path",
        text(&path)?,
    ])?;
    Ok(())
}

/// The datastore that a host has alone.
#[must_use]
pub fn own_datastore(host: &str) -> &'static str {
    if host == HERE { "local" } else { "far" }
}

/// Its directory.
#[must_use]
pub fn own_directory(here: &Installation, host: &str) -> PathBuf {
    here.path(if host == HERE { "datastore" } else { "far" })
}

/// The processes of guests on a host.
#[must_use]
pub fn processes(here: &Installation, host: &str, name: &str) -> Vec<i32> {
    match host {
        HERE => here.guest_processes(name),
        other => here.guest_processes_on(other, name),
    }
}

/// The other host.
#[must_use]
pub fn other(host: &str) -> &'static str {
    if host == HERE { THERE } else { HERE }
}

/// The host that the guest of a VM runs on, and no other has a process of it.
///
/// # Errors
/// It does not come to that.
pub fn only_host(here: &Installation, vm: &str) -> anyhow::Result<String> {
    in_the_end(here, vm, || runs_alone(here, vm))
}

/// The same after a process was killed. None where it was a filter, and the guest is stopped, as QEMU before 9.0 does not take another
/// one for a guest that stands still (docs/decisions/020): it has lost what it had in memory.
///
/// # Errors
/// It does not come to that.
pub fn only_host_after(
    here: &Installation,
    vm: &str,
    victim: Victim,
) -> anyhow::Result<Option<String>> {
    let stopped = || {
        let shown = here.vm(vm).ok()?;
        let lost = matches!(victim, Victim::FilterOf(_))
            && shown["power"] == "off"
            && shown["stopped"]["reason"] == "filter_died";
        lost.then(|| eprintln!("the guest is lost with its filter: {}", shown["stopped"]))
    };
    in_the_end(here, vm, || runs_alone(here, vm).map(Some).or_else(|| stopped().map(|()| None)))
}

fn in_the_end<T>(
    here: &Installation,
    vm: &str,
    found: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let on = |host| (processes(here, host, QEMU), processes(here, host, FILTER));
    eventually("it runs on one host alone", found).map_err(|error| {
        let (vm, near, far) = (here.vm(vm), on(HERE), on(THERE));
        error.context(format!("{vm:?}, QEMU and filters {near:?} and {far:?}"))
    })
}

fn runs_alone(here: &Installation, vm: &str) -> Option<String> {
    let shown = here.vm(vm).ok().filter(|shown| shown["power"] == "running")?;
    let host = shown["host"].as_str()?.to_owned();
    let left = [QEMU, FILTER].iter().flat_map(|it| processes(here, other(&host), it)).count();
    let runs = processes(here, &host, QEMU).len() == 1;
    (runs && left == 0).then_some(host)
}

/// What is killed while a VM moves.
#[derive(Clone, Copy, Debug)]
pub enum Victim {
    /// The agent of the source, or of the destination.
    AgentOf(bool),
    /// The destination's QEMU.
    Qemu,
    /// The filters of the source, or of the destination.
    FilterOf(bool),
    /// The server.
    Server,
}

impl Victim {
    /// Each in turn; a source's QEMU is the guest, and its death that of the guest.
    #[must_use]
    pub fn of_round(round: usize) -> Self {
        [
            Self::AgentOf(true),
            Self::AgentOf(false),
            Self::Server,
            Self::Qemu,
            Self::FilterOf(true),
            Self::FilterOf(false),
        ][round % 6]
    }

    /// Kills it, while the VM moves from this host; agents and servers are started again.
    pub fn kill(self, here: &mut Installation, source: &str) {
        let end = |is_source: bool| if is_source { source } else { other(source) };
        match self {
            Self::AgentOf(is_source) if end(is_source) == HERE => {
                here.kill_agent();
                here.start_agent().unwrap();
            }
            Self::AgentOf(_) => {
                here.kill_agent_of(THERE).unwrap();
                here.start_agent_of(THERE).unwrap();
            }
            Self::Qemu => processes(here, end(false), QEMU).into_iter().for_each(kill_hard),
            Self::FilterOf(is_source) => {
                processes(here, end(is_source), FILTER).into_iter().for_each(kill_hard);
            }
            Self::Server => {
                here.kill_server();
                here.start_server().unwrap();
            }
        }
    }
}

/// How many moves are disturbed, and when: `MIGRATION_KILLS` and `MIGRATION_SEED`, or 6 and a seed that is printed.
#[must_use]
pub fn rounds_of_kills() -> (usize, fastrand::Rng) {
    let number = |name| std::env::var(name).ok().and_then(|it| it.parse::<u64>().ok());
    let seed = number("MIGRATION_SEED").unwrap_or_else(|| fastrand::u64(..));
    eprintln!("MIGRATION_SEED={seed}");
    let rounds = number("MIGRATION_KILLS").and_then(|it| usize::try_from(it).ok()).unwrap_or(6);
    (rounds, fastrand::Rng::with_seed(seed))
}
