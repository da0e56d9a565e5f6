//! A VM that is on one of two hosts, and moves while processes die.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

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
/// The TPM, as a process.
pub const SWTPM: &str = "swtpm";

/// What the agent says of a guest that QEMU has lost with its filter (docs/decisions/020).
pub const KNOWN_LIMIT: &str =
    "as QEMU before 9.0 does when a filter has died while the guest was not using the disk";

/// The steps of a migration from the one on at which the guest may go on at the other host, as the server tells them.
const FROM_SWITCH_ON: [&str; 2] =
    ["let the guest go on at the other host", "end its processes at the former host"];

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

/// The same after this was killed. None where that was the guest's end, and the agent says so: QEMU before 9.0 has lost it with its
/// filter (docs/decisions/020), or the QEMU that was killed was about to let it go on, for the host had the VM by then.
fn only_host_after(
    here: &Installation,
    vm: &str,
    victim: Victim,
) -> anyhow::Result<Option<String>> {
    let is_lost = || {
        let shown = here.vm(vm).ok().filter(|shown| shown["power"] == "off")?;
        let reason = shown["stopped"]["reason"].as_str()?;
        let said = shown["stopped"]["detail"].as_str()?;
        let is_lost = match victim {
            Victim::FilterOf(_) => reason == "filter_died" && said.contains(KNOWN_LIMIT),
            Victim::Qemu => reason == "qemu_died" && said.contains("was ended by SIGKILL"),
            _ => false,
        };
        is_lost.then(|| eprintln!("the guest is lost: {said}"))
    };
    in_the_end(here, vm, || runs_alone(here, vm).map(Some).or_else(|| is_lost().map(|()| None)))
}

/// Moves a VM again and again while one of `victims` after the other is killed, up to `longest` milliseconds after a move began. The
/// guest `has_all` after each, on the host that it is on then. One that is lost with what was killed is started again, and
/// `starts` brings it to where it has all. What was killed when the guest may already have gone on with it could not save the guest;
/// every other loss happens at few instants, so it is allowed seldom.
pub fn move_while_processes_die(
    here: &mut Installation,
    vm: &str,
    (victims, longest): (&[Victim], u64),
    starts: impl Fn(&Installation),
    has_all: impl Fn(&Installation, &str),
) {
    let (rounds, mut random) = rounds_of_kills(victims.len());
    let mut lost = 0;
    for round in 0..rounds {
        let source = only_host(here, vm).unwrap();
        let task = begins(here, &["vm", "migrate", vm, other(&source)]);
        let milliseconds = random.u64(0..longest);
        sleep(Duration::from_millis(milliseconds));
        let arrived = here.vm(vm).unwrap()["host"] != source.as_str();
        let id = task["id"].as_str().unwrap();
        let victim = victims[round % victims.len()];
        eprintln!("round {round}: {victim:?} after {milliseconds} ms, arrived: {arrived}");
        let is_of_guest = matches!(victim, Victim::Qemu | Victim::Tpm);
        // What a guest that runs at the destination already would not survive is not killed.
        if !(arrived && is_of_guest) {
            victim.kill(here, &source);
        }
        // Seen after the kill: a guest that goes on between a look at the task and the kill could not be saved either.
        let may_have_gone_on = is_of_guest && {
            let step = here.json(&["task", "show", id]).unwrap()["step"].clone();
            FROM_SWITCH_ON.iter().any(|it| step == *it)
        };
        let _ = here.try_vmseal(&["task", "wait", id]).unwrap();
        match only_host_after(here, vm, victim).unwrap() {
            // The server had yet to learn that the guest ran there already: the TPM that was killed was in use.
            Some(host)
                if matches!(victim, Victim::Tpm)
                    && host != source
                    && processes(here, &host, SWTPM).is_empty() =>
            {
                eprintln!("the guest has lost its TPM");
                here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
            }
            Some(host) => {
                has_all(here, &host);
                continue;
            }
            None => {}
        }
        lost += usize::from(!may_have_gone_on);
        assert!(lost <= 1 + rounds / 12, "{lost} guests of {rounds} are lost");
        starts(here);
    }
}

/// Begins what a command says; gives the task. Where other tests write much, a datastore may not respond for a moment.
#[must_use]
pub fn begins(here: &Installation, command: &[&str]) -> serde_json::Value {
    let begun = || match here.json(&[command, &["--no-wait"]].concat()) {
        Err(error) if error.to_string().contains("does not respond") => None,
        begun => Some(begun),
    };
    eventually("the datastores respond", begun).unwrap().unwrap()
}

/// Waits until a migration sends this, as its task names it.
pub fn sends(here: &Installation, task: &str, phase: &str) {
    let is_so_far = || {
        let shown = here.json(&["task", "show", task]).ok()?;
        (shown["migration"]["phase"] == phase).then_some(())
    };
    eventually(&format!("it sends: {phase}"), is_so_far).unwrap();
}

/// Waits until nothing is left in the directory of the datastore that a host has alone.
pub fn nothing_is_left(here: &Installation, host: &str) {
    let left = || here.datastore_entries(&own_directory(here, host)).ok();
    eventually(&format!("nothing is left at {host}"), || left().filter(Vec::is_empty).map(drop))
        .unwrap_or_else(|error| panic!("{error}: {:?}", left()));
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
    // Where its filter has died, whether QEMU takes another one is known some seconds later.
    let disks_down = here.alarms(vm).ok()?.iter().any(|alarm| alarm["code"] == "disks-down");
    let served = !processes(here, &host, FILTER).is_empty() && !disks_down;
    (runs && served && left == 0).then_some(host)
}

/// What is killed while a VM moves.
#[derive(Clone, Copy, Debug)]
pub enum Victim {
    /// The agent of the source, or of the destination.
    AgentOf(bool),
    /// The destination's QEMU; the source's is the guest, and its death that of the guest.
    Qemu,
    /// The filters of the source, or of the destination.
    FilterOf(bool),
    /// The destination's TPM.
    Tpm,
    /// The server.
    Server,
}

impl Victim {
    /// Those of any VM.
    pub const OF_ANY_VM: [Self; 6] = [
        Self::AgentOf(true),
        Self::AgentOf(false),
        Self::Server,
        Self::Qemu,
        Self::FilterOf(true),
        Self::FilterOf(false),
    ];

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
            Self::Tpm => processes(here, end(false), SWTPM).into_iter().for_each(kill_hard),
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

/// How many moves are disturbed with `VMSEAL_ALL`, as `scripts/soak` has it.
const ALL_KILLS: usize = 100;

/// How many moves are disturbed, and when: `MIGRATION_KILLS` and `MIGRATION_SEED`, or `usual` and a seed that is printed.
#[must_use]
pub fn rounds_of_kills(usual: usize) -> (usize, fastrand::Rng) {
    let number = |name| std::env::var(name).ok().and_then(|it| it.parse::<u64>().ok());
    let seed = number("MIGRATION_SEED").unwrap_or_else(|| fastrand::u64(..));
    eprintln!("MIGRATION_SEED={seed}");
    let usual = if std::env::var_os("VMSEAL_ALL").is_some() { ALL_KILLS } else { usual };
    let rounds = number("MIGRATION_KILLS").and_then(|it| usize::try_from(it).ok()).unwrap_or(usual);
    (rounds, fastrand::Rng::with_seed(seed))
}
