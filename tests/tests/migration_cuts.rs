//! Connections of a server that are cut for a while, while a guest moves: that to the agent of the host that it comes from or goes to, and
//! that to the server of the other control plane. Nothing passes and nobody is told, or all connections end and none is made.
//!
//! A cut is shorter than a server goes on trying, so the guest arrives all the same, unless somebody cancels the migration meanwhile.
//! Afterwards one host alone runs the guest, which has lost nothing, and nothing is left at the other one. A migration that was cancelled
//! succeeds when it is begun again.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ops::Range;
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::counting_guest::{
    has_lost_nothing, remember, started_with_one_disk, write_marker,
};
use vmseal_tests::cuts::{How, Way};
use vmseal_tests::dying_guest::{End, goes_on};
use vmseal_tests::held_steps::all_of_all;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::shell_guest::{self, booted};
use vmseal_tests::two_hosts::{
    HERE, THERE, add_host_with_datastore, begins, nothing_is_left, only_host, other,
    rounds_of_kills,
};
use vmseal_tests::two_planes::{self, NAMES, introduce};

const VM: &str = "web";

/// So slow that a migration takes some seconds.
const RATE: &str = "60MiB";

/// When a cut begins, in milliseconds after the migration: during it, or just after it.
const BEGINS: Range<u64> = 0..3500;

/// How long it takes, in milliseconds: less than an agent or a server has to answer.
const LASTS: Range<u64> = 200..4000;

/// The same where all is tried: sometimes longer than an agent has to say what its VMs do (10 s), and always less than ten attempts take.
const LASTS_OF_ALL: Range<u64> = 200..14_000;

/// A cut at a moment of a migration.
#[derive(Debug)]
struct Moment {
    how: How,
    begins: Duration,
    lasts: Duration,
    /// Whether somebody cancels the migration in the middle of it.
    is_cancelled: bool,
}

impl Moment {
    fn any(random: &mut fastrand::Rng) -> Self {
        let lasts = if all_of_all() { LASTS_OF_ALL } else { LASTS };
        Self {
            how: if random.bool() { How::Silent } else { How::Refused },
            begins: Duration::from_millis(random.u64(BEGINS)),
            lasts: Duration::from_millis(random.u64(lasts)),
            is_cancelled: random.bool(),
        }
    }

    /// Begins a migration, cuts this way at the moment, and waits until the task has ended; how it has, as the task says it.
    fn of(&self, here: &Installation, migrate: &[&str], way: &Way) -> String {
        let task = begins(here, migrate);
        let task = task["id"].as_str().unwrap();
        sleep(self.begins);
        let cut = way.cut(self.how);
        sleep(self.lasts / 2);
        if self.is_cancelled {
            // It is refused where the guest runs there already.
            let _ = here.try_vmseal(&["task", "cancel", task]).unwrap();
        }
        sleep(self.lasts / 2);
        drop(cut);
        let output = here.try_vmseal(&["task", "wait", task]).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let shown = here.json(&["task", "show", task]).unwrap();
        let state = shown["state"].as_str().unwrap();
        eprintln!("{state}: {said}");
        assert!(self.is_cancelled || state == "done", "a cut of {self:?} has ended it: {said}");
        if state == "unknown" {
            // What it says of a guest that ran there already when it was asked to have it back.
            here.vmseal(&["task", "resolve", task]).unwrap();
        }
        state.to_owned()
    }
}

/// Whether a guest has arrived whose migration has ended so.
fn is_there(state: &str) -> bool {
    match state {
        "done" | "unknown" => true,
        "failed" | "cancelled" => false,
        other => panic!("it has ended as {other}"),
    }
}

/// The host that runs the guest, which lacks nothing; nothing of it is left at the other one.
fn only_place(here: &Installation) -> String {
    here.wait_rest().unwrap();
    let host = only_host(here, VM).unwrap();
    nothing_is_left(here, other(&host));
    has_lost_nothing(here, VM);
    host
}

#[test]
fn whichever_agent_a_server_is_cut_off_from_the_guest_runs_on_one_host_and_has_lost_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started_with_one_disk(VM, "encrypted");
    add_host_with_datastore(&mut here).unwrap();
    remember(&mut console);
    drop(console);
    let ways = [HERE, THERE].map(|host| Way::to_agent(&here, host).unwrap());
    let (rounds, mut random) = rounds_of_kills(2);
    let mut source = only_place(&here);
    for round in 0..rounds {
        let destination = other(&source);
        let cut_off = if round % 2 == 0 { &*source } else { destination };
        let moment = Moment::any(&mut random);
        eprintln!("round {round}, from {source}, {cut_off} is cut off: {moment:?}");
        let migrate = ["vm", "migrate", VM, destination];
        let way = &ways[usize::from(cut_off == THERE)];
        let state = moment.of(&here, &[&migrate[..], &["--rate", RATE]].concat(), way);
        let host = only_place(&here);
        assert_eq!(host == destination, is_there(&state), "it is on {host}: {state}");
        if host == source {
            here.vmseal(&migrate).unwrap();
            assert_eq!(only_place(&here), destination);
        }
        source = destination.to_owned();
    }
}

/// Whose connection to a server is cut, of a guest that goes to another control plane.
#[derive(Clone, Copy, Debug)]
enum Between {
    /// The source's server and the destination's.
    Servers,
    /// The server of the source and its agent.
    Source,
    /// The same of the destination.
    Destination,
}

impl Between {
    const ALL: [Self; 3] = [Self::Servers, Self::Source, Self::Destination];
}

/// Two control planes, and the ways to each.
struct Planes {
    planes: [Installation; 2],
    /// Those to the servers, from the other one.
    to_servers: [Way; 2],
    to_agents: [Way; 2],
}

impl Planes {
    fn new() -> Self {
        let planes = two_planes::planes();
        let to_servers = planes.each_ref().map(|here| Way::to_server(here).unwrap());
        let to_agents = planes.each_ref().map(|here| Way::to_agent(here, HERE).unwrap());
        for (one, other) in [(0, 1), (1, 0)] {
            let url = to_servers[other].url();
            introduce(&planes[one], &planes[other], (NAMES[other], &url));
        }
        shell_guest::start(&planes[0], VM, "encrypted", &[]).unwrap();
        let mut console = booted(&planes[0], VM).unwrap();
        write_marker(&mut console);
        remember(&mut console);
        Self { planes, to_servers, to_agents }
    }

    /// The connection that is cut while the VM moves away from control plane `from`.
    fn way(&self, between: Between, from: usize) -> &Way {
        match between {
            Between::Servers => &self.to_servers[1 - from],
            Between::Source => &self.to_agents[from],
            Between::Destination => &self.to_agents[1 - from],
        }
    }

    /// The index of the control plane that has the VM alone; its guest runs and lacks nothing.
    fn only_place(&self) -> usize {
        for here in &self.planes {
            here.wait_rest().unwrap();
        }
        let at = usize::from(self.planes[0].vm(VM).is_err());
        let here = &self.planes[at];
        two_planes::is_alone(here, &self.planes[1 - at], VM);
        assert!(goes_on(End { here, host: HERE }, VM, false, None), "nothing has died");
        at
    }
}

#[test]
fn whatever_is_cut_on_the_way_to_another_control_plane_one_of_both_runs_the_guest_with_all_it_had()
{
    if !has_its_turn() {
        return;
    }
    let planes = Planes::new();
    let (rounds, mut random) = rounds_of_kills(Between::ALL.len());
    let mut from = planes.only_place();
    for round in 0..rounds {
        let (to, between) = (1 - from, Between::ALL[round % Between::ALL.len()]);
        let moment = Moment::any(&mut random);
        eprintln!("round {round}, from {}, {between:?}: {moment:?}", NAMES[from]);
        let migrate = ["vm", "migrate", VM, "--remote", NAMES[to]];
        let (source, way) = (&planes.planes[from], planes.way(between, from));
        let state = moment.of(source, &[&migrate[..], &["--rate", RATE]].concat(), way);
        let at = planes.only_place();
        assert_eq!(at == to, is_there(&state), "it is at {}: {state}", NAMES[at]);
        if at == from {
            source.vmseal(&migrate).unwrap();
            assert_eq!(planes.only_place(), to);
        }
        from = to;
    }
}
