//! Measures the network of a guest beside the same guest in a QEMU that is started by hand with the same devices, and judges the
//! goals in `bench/goals.toml` that are about it. All guests run all the time, in a network namespace of this program, and take
//! turns under load. Two of them are by hand: what differs between those two is how far a ratio can be trusted.

#![allow(clippy::print_stdout)] // it is what this program is for

mod guests;
mod loads;

use std::path::Path;

use anyhow::{Context, ensure};
use clap::Parser;
use guests::{ByHand, Guest, Network, sealed};
use loads::{Load, Sample, booted};
use vmseal_lab::experiment::{Cell, Outcome};
use vmseal_lab::goals::{self, Goal, Metric, assess};
use vmseal_lab::machine::{self, Machine};
use vmseal_lab::statistics::Interval;
use vmseal_tests::installation::Installation;
use vmseal_tests::network::{bridge, own_namespace};
use vmseal_tests::shell_guest;

const GOALS: &str = "bench/goals.toml";

/// The systems in it, and the QEMU that the one by hand is compared with.
pub const VMSEAL: &str = "vmseal-encrypted";
const BY_HAND: &str = "qemu-by-hand";
const BY_HAND_AGAIN: &str = "qemu-by-hand-again";

/// How often each load is measured on each guest. The 95 % bounds of twelve values leave out two on either side.
const ROUNDS: u32 = 12;

fn workload(network: Network, load: Load) -> String {
    format!("network-{}-{}", network.name(), load.id())
}

/// The goals about networks; each is of a load that is there.
fn network_goals() -> anyhow::Result<Vec<Goal>> {
    let found = goals::read(Path::new(GOALS), goals::NETWORK)?;
    let measured = |goal: &Goal| {
        Network::ALL.into_iter().any(|network| {
            Load::ALL.into_iter().any(|load| {
                let metric = if load.counts_bytes() { Metric::Throughput } else { Metric::Iops };
                load.is_of(network)
                    && workload(network, load) == goal.workload
                    && metric == goal.metric
            })
        })
    };
    for goal in &found {
        ensure!(measured(goal), "goal {} names no load and metric that are measured", goal.id);
    }
    Ok(found)
}

/// Measure the network of a guest of vmseal beside the same guest in QEMUs started by hand, and judge the goals of it; as root
#[derive(Parser)]
struct Line {}

/// A sample, as the goals take it; a byte is a request where bytes are counted. What is not measured here is not a number, so
/// that no goal can be met by it.
fn cell(round: u32, system: &str, workload: &str, sample: &Sample) -> Cell {
    #[allow(clippy::cast_precision_loss)] // far below 2⁵²
    let count = sample.count as f64;
    Cell {
        requests: sample.count,
        seconds: sample.seconds,
        iops: count / sample.seconds,
        throughput: count / sample.seconds,
        cpu_per_io: sample.cpu * 1e9 / count,
        server_busy: sample.cpu / sample.seconds,
        client_busy: sample.client_cpu / sample.seconds,
        ..Cell::unmeasured(round, system, workload)
    }
}

/// Measures one load on all guests in turn, in each round from another one on.
fn measure(guests: &[Guest], network: Network, load: Load) -> anyhow::Result<Vec<Cell>> {
    let id = workload(network, load);
    // The first ones find cold caches and code that is not translated yet.
    for guest in guests {
        load.measure(guest, network)?;
    }
    let mut cells = Vec::new();
    for round in 0..ROUNDS {
        for turn in 0..guests.len() {
            let guest = &guests[(round as usize + turn) % guests.len()];
            cells.push(cell(round, guest.system, &id, &load.measure(guest, network)?));
        }
    }
    Ok(cells)
}

/// The line of one load.
fn line(network: Network, load: Load, outcome: &Outcome, goals: &[Goal]) -> String {
    let id = workload(network, load);
    let (name, unit, one) = load.shown();
    let values = |system: &str, value: fn(&Cell) -> f64| -> Vec<f64> {
        let of = |cell: &&Cell| cell.system == system && cell.workload == id;
        outcome.cells.iter().filter(of).map(value).collect()
    };
    let median = |system| {
        Interval::of(values(system, |cell| cell.iops)).map_or(f64::NAN, |it| it.median / one)
    };
    let ratio = |above, value| {
        let (above, below) = (values(above, value), values(BY_HAND, value));
        let ratio = Interval::of(above.iter().zip(&below).map(|(above, below)| above / below));
        ratio.map_or_else(String::new, |ratio| ratio.show(|value| format!("{value:.2}")))
    };
    let goal = goals.iter().find(|goal| goal.workload == id);
    format!(
        "| {}, {name}, {unit} | {:.0} / {:.0} | {} | {} | {} | {} | {} |",
        network.name(),
        median(VMSEAL),
        median(BY_HAND),
        ratio(VMSEAL, |cell| cell.iops),
        ratio(BY_HAND_AGAIN, |cell| cell.iops),
        ratio(VMSEAL, |cell| cell.cpu_per_io),
        ratio(BY_HAND_AGAIN, |cell| cell.cpu_per_io),
        goal.map_or_else(|| "no goal".to_owned(), |goal| verdict(goal, outcome)),
    )
}

fn verdict(goal: &Goal, outcome: &Outcome) -> String {
    let judged = assess(goal, outcome);
    let by_cpu = judged.by_cpu_time.map_or_else(String::new, |by| {
        let ratio = by.ratio.show(|value| format!("{value:.2}"));
        format!("; by CPU time {ratio}: {}", by.verdict)
    });
    format!("≥ {}: {}{by_cpu}", goal.value, judged.verdict)
}

fn main() -> anyhow::Result<()> {
    let Line {} = Line::parse();
    let goals = network_goals()?;
    let machine = Machine::here(Path::new("qemu-storage-daemon"), Path::new("nbdkit"));
    // Before there is a namespace: what it is built from is downloaded.
    let image = shell_guest::redis_image()?;
    ensure!(own_namespace()?, "run it as root");
    bridge("br0", "10.77.0.1/24")?;
    let here = Installation::probing()?;
    let host = here.json(&["host", "show", "here"])?;
    let accelerator = host["description"]["accelerator"]["kind"].as_str().context("no kind")?;
    let sealed = sealed(&here, &image)?;
    let one = ByHand::start(BY_HAND, 11, &image, accelerator)?;
    let other = ByHand::start(BY_HAND_AGAIN, 12, &image, accelerator)?;
    let guests = [sealed, one.guest.clone(), other.guest.clone()];
    guests.iter().try_for_each(booted)?;
    let vhost = Path::new("/dev/vhost-net").exists();
    println!(
        "{}, {} cores, Linux {}, QEMU {}, guests under {accelerator}, {} vhost-net, load average {} before; commit {}\n",
        machine.cpu,
        machine.cores,
        machine.kernel,
        machine.storage_daemon.as_deref().unwrap_or("of unknown version"),
        if vhost { "with" } else { "without" },
        machine.load_average,
        machine::commit(),
    );
    println!(
        "| load | vmseal, encrypted / QEMU by hand | ratio [95 %] | of two by hand | ratio by CPU time | of two by hand | goal |"
    );
    println!("|---|---|---|---|---|---|---|");
    let mut outcome = Outcome::default();
    for network in Network::ALL {
        for load in Load::ALL.into_iter().filter(|load| load.is_of(network)) {
            outcome.cells.extend(measure(&guests, network, load)?);
            println!("{}", line(network, load, &outcome, &goals));
        }
    }
    println!("\nMedians of {ROUNDS} rounds; ratios are taken within a round.");
    Ok(())
}
