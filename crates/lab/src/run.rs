//! `vmseal lab run`: experiments by id or file.

mod pools;
mod room;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Args;
use serde::Serialize;

use self::pools::{InCluster, Stored};
use crate::arguments::{BenchArguments, BenchError, beside_this_program};
use crate::catalogue;
use crate::ceph::room::Shortage;
use crate::ceph::setup::Setup;
use crate::claim::{self, Assessed, Place};
use crate::definition::{
    AxisValue, CLUSTERS, Definition, DefinitionError, Extent, Matter, REDUNDANCY,
};
use crate::experiment::{self, Cell, ExperimentError, Outcome, Plan, Progress};
use crate::goals::{self, Assessment, Metric, Verdict};
use crate::load::Workload;
use crate::machine::{self, Machine};
use crate::migration;
use crate::operation::{self, Choice, Found};
use crate::outcome::{RequestTimes, Served, Times};
use crate::report::{Measured, Unavailable};
use crate::sections::{self, Section};
use crate::stop::{self, Stopped};
use crate::storage::Storage;

/// The version of the JSON: since 2 the course of a move has tenths of a second.
pub const VERSION: u32 = 2;

/// The goals that come with vmseal.
const GOALS: &str = include_str!("../../../bench/goals.toml");

/// The choices of `vmseal lab run`.
#[derive(Args, Clone, Debug)]
pub struct RunArguments {
    /// Ids of `vmseal lab list`, or files of one's own
    #[arg(required = true, value_name = "ID|FILE")]
    pub experiments: Vec<String>,
    /// Sizes and times that end in minutes (default)
    #[arg(long, conflicts_with = "full")]
    pub small: bool,
    /// Sizes and times as in the documents: takes hours
    #[arg(long)]
    pub full: bool,
    /// How often everything is measured, in place of what the experiments say; below 5 nothing is resolved
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Write the report to this file, too, by its name: all values as .json, the measurements of each round as .csv, or
    /// tables and plots for a browser as .html; may be repeated
    #[arg(long, value_name = "FILE", value_parser = report_file)]
    pub report: Vec<PathBuf>,
    /// Where disks in memory are made
    #[arg(long, default_value = "/dev/shm")]
    pub directory: PathBuf,
    /// Where disks on ext4, and installations, are made
    #[arg(long, default_value = "target")]
    pub ext4_directory: PathBuf,
    /// The Ceph cluster of experiments whose storage is `ceph`, which `vmseal lab ceph up --directory DIR` has made. Each makes
    /// a pool of its own there, and removes it when it ends. It takes root. May be repeated: an experiment that compares
    /// clusters takes for each the first directory whose cluster is set up so, the others take the first one of all
    #[arg(long, value_name = "DIR")]
    pub ceph_directory: Vec<PathBuf>,
    /// The program vmseal-filter; by default beside this one, else in PATH
    #[arg(long)]
    pub filter: Option<PathBuf>,
    /// The program vmseal, of which installations are made; by default this one
    #[arg(long)]
    pub vmseal: Option<PathBuf>,
    /// The disk of a guest with redis, for experiments in which a client asks it; by default the one that
    /// scripts/build-network-guest --redis builds, where that is below the working directory
    #[arg(long, value_name = "IMAGE")]
    pub guest: Option<PathBuf>,
}

fn report_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|it| it.to_str()) {
        Some("json" | "csv" | "html") => Ok(path),
        _ => Err("the name of a report ends in .json, .csv or .html".to_owned()),
    }
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A signal has asked for the end.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// An experiment cannot be used.
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    /// Measuring failed.
    #[error("experiment {id}")]
    Experiment {
        /// Which.
        id: String,
        /// How.
        source: ExperimentError,
    },
    /// The clusters may fill their file system.
    #[error("{0}")]
    Room(Shortage),
    /// The goals cannot be used, or the report cannot be written.
    #[error(transparent)]
    Bench(#[from] BenchError),
}

/// Everything about a run.
#[derive(Debug, Serialize)]
pub struct RunReport {
    /// [`VERSION`].
    pub version: u32,
    /// When it began, in UTC.
    pub started: jiff::Timestamp,
    /// The commit that was measured.
    pub commit: String,
    /// The machine.
    pub machine: Machine,
    /// The experiments.
    pub experiments: Vec<ExperimentReport>,
    /// The goals about what was measured.
    pub goals: Vec<Assessment>,
}

/// An experiment with its results.
#[derive(Debug, Serialize)]
pub struct ExperimentReport {
    /// Its id.
    pub id: String,
    /// Its title.
    pub title: String,
    /// What it is about.
    pub measures: Vec<Metric>,
    /// Why it, or a part of it, cannot be measured here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// The points that cannot be measured here, and why, where others can.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unavailable: Vec<Unavailable>,
    /// The Ceph clusters that it was measured on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub clusters: Vec<MeasuredCluster>,
    /// Its points.
    pub measured: Vec<Measured>,
    /// What is claimed, and whether it is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<Assessed>,
}

/// A Ceph cluster that was measured on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MeasuredCluster {
    /// How it is set up, where the experiment compares clusters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setup: Option<Setup>,
    /// The release of its daemons, such as `16.2.15 (pacific)`. Clients have the libraries of this machine.
    pub release: String,
}

impl fmt::Display for MeasuredCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(setup) = self.setup {
            write!(f, "{setup}: ")?;
        }
        write!(f, "Ceph {}", self.release)
    }
}

/// What measuring an experiment gives: the points that were measured, those that were not, and the clusters.
type One = (Found, Vec<Unavailable>, Vec<MeasuredCluster>);

/// Measures the experiments one after the other, and judges.
///
/// # Errors
/// [`RunError`]. What cannot be measured here, and what is not met, is no error.
pub fn run(
    arguments: &RunArguments,
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<RunReport, RunError> {
    // All are read before the first begins.
    let find = |id: &String| catalogue::find(id).map(|it| it.within(arguments.full));
    let definitions: Vec<Definition> =
        arguments.experiments.iter().map(find).collect::<Result<_, _>>()?;
    let goals = goals::parse(Path::new("bench/goals.toml"), GOALS).map_err(BenchError::from)?;
    let (started, commit) = (jiff::Timestamp::now(), machine::commit());
    let machine = Machine::here(Path::new("qemu-storage-daemon"), Path::new("nbdkit"));
    arguments.check_room(&definitions)?;
    let (mut experiments, mut all) = (Vec::new(), Outcome::default());
    for (definition, named) in definitions.iter().zip(&arguments.experiments) {
        observe(Progress::Section(&definition.id, &definition.title));
        let one = arguments.one(definition, named, observe);
        // Being stopped says more than what failed by it.
        stop::check()?;
        let failed = |source| RunError::Experiment { id: definition.id.clone(), source };
        let ((measured, places, outcome, refused), unavailable, clusters) = one.map_err(failed)?;
        // What was measured of an experiment is judged without the rest.
        let some = refused.is_none() || !measured.is_empty();
        let claim = definition.claim.as_ref().filter(|_| some);
        let claim = claim.map(|it| claim::assess(it, &places, &outcome, machine.cores));
        all.cells.extend(outcome.cells);
        all.idle.extend(outcome.idle);
        let (id, title) = (definition.id.clone(), definition.title.clone());
        let measures = definition.measures.clone();
        experiments.push(ExperimentReport {
            id,
            title,
            measures,
            refused,
            unavailable,
            clusters,
            measured,
            claim,
        });
    }
    let judged = goals.iter().map(|goal| goals::assess(goal, &all));
    let goals = judged.filter(|it| it.verdict != Verdict::NotMeasured).collect();
    let report = RunReport { version: VERSION, started, commit, machine, experiments, goals };
    for path in &arguments.report {
        let failed = |source| BenchError::Write { path: path.clone(), source };
        report.write(path).map_err(failed)?;
    }
    Ok(report)
}

impl RunArguments {
    /// Measures an experiment, which was named so.
    fn one(
        &self,
        definition: &Definition,
        named: &str,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<One, ExperimentError> {
        match definition.storage() {
            Some(Storage::Ceph) => self.on_ceph(definition, named, observe),
            _ => Ok((self.measure(definition, &[], observe)?, Vec::new(), Vec::new())),
        }
    }

    /// Measures an experiment, on Ceph in these pools.
    fn measure(
        &self,
        definition: &Definition,
        pools: &[InCluster],
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Found, ExperimentError> {
        match &definition.matter {
            Matter::Disk(matrix, steps) => {
                let clients = matrix.clients.iter().copied().max().unwrap_or(1);
                let stored = self.mount(pools, clients)?;
                self.disk(definition, steps.extent(self.full), &stored, observe)
            }
            Matter::Operation(matrix, steps) => {
                let directory = match steps.storage {
                    Some(Storage::Memory) => &self.directory,
                    Some(Storage::Ext4 | Storage::Ceph) | None => &self.ext4_directory,
                };
                let pool = pools.first().and_then(|(_, pool)| pool.accesses().first());
                let pool = pool.map(|(_, access)| access.clone());
                let choice = Choice { pool, ..self.choice(directory) };
                operation::run(&choice, &definition.id, matrix, steps, observe)
            }
            Matter::Migration(matrix, steps) => {
                let choice = self.choice(&self.ext4_directory);
                migration::run(&choice, &definition.id, matrix, steps, observe)
            }
        }
    }

    /// The program that mounts pools: beside vmseal-filter, as agents have it.
    fn pool_program(&self) -> PathBuf {
        let name = "vmseal-rbd";
        let beside = self.filter.as_ref().map(|filter| filter.with_file_name(name));
        beside.unwrap_or_else(|| beside_this_program(name))
    }

    fn choice(&self, directory: &Path) -> Choice {
        Choice {
            program: self.vmseal.clone(),
            directory: directory.to_owned(),
            full: self.full,
            rounds: self.rounds,
            guest: self.guest.clone(),
            pool: None,
        }
    }

    fn disk(
        &self,
        definition: &Definition,
        extent: Extent,
        stored: &[Stored],
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Found, ExperimentError> {
        let of = |section: &Section| stored.iter().find(|it| it.has(section));
        let bench = |section: &Section| BenchArguments {
            pool: of(section).map(|stored| stored.access.clone()),
            ..self.bench(extent)
        };
        let (mut measured, mut places, mut all) = (Vec::new(), Vec::new(), Outcome::default());
        let mut sections = sections::of_definition(definition);
        // Some points may have no pool here.
        sections.retain(|section| section.storage != Storage::Ceph || of(section).is_some());
        for together in sections.chunk_by(Section::is_beside) {
            if let Some(why) = together.iter().find_map(|it| bench(it).obstacle(it)) {
                return Ok((measured, places, all, Some(why)));
            }
            let mut parts = Vec::new();
            for section in together {
                observe(Progress::Section(section.id, section.title));
                let served = of(section).map(|stored| stored.served(section));
                let served = served.unwrap_or_default();
                let bench = bench(section);
                let plan = Plan { served, ..bench.plan(section) };
                parts.push((section, plan, bench.systems(section)));
            }
            let of_all: Vec<experiment::Part<'_>> =
                parts.iter().map(|(_, plan, systems)| (plan, &systems[..])).collect();
            let outcome = experiment::run_joined(&of_all, &mut |progress| {
                if together[0].tells(progress) {
                    observe(progress);
                }
            })?;
            for (section, plan, _) in &parts {
                measured.push(Measured::of(section, plan, &outcome.under(section.workloads)));
                places.push(place(definition, section));
            }
            all.cells.extend(outcome.cells);
            all.idle.extend(outcome.idle);
        }
        Ok((measured, places, all, None))
    }

    /// The same choices as those of `vmseal lab disk`.
    fn bench(&self, extent: Extent) -> BenchArguments {
        BenchArguments {
            rounds: self.rounds.unwrap_or(extent.rounds),
            seconds: extent.seconds,
            size_mib: extent.size_mib,
            directory: self.directory.clone(),
            ext4_directory: self.ext4_directory.clone(),
            filter: self.filter.clone(),
            ..BenchArguments::default()
        }
    }
}

fn place(definition: &Definition, section: &Section) -> Place {
    let numbers = [
        ("clients", u64::from(section.clients)),
        ("disks", u64::from(section.disks)),
        ("delay_us", section.delay_us),
        ("neighbours", u64::from(section.neighbours)),
    ];
    let mut axes: BTreeMap<_, _> =
        numbers.into_iter().map(|(axis, value)| (axis, AxisValue::from(value))).collect();
    axes.extend(section.cluster.map(|cluster| (CLUSTERS, cluster.id().into())));
    axes.extend(section.redundancy.map(|raid| (REDUNDANCY, raid.id().into())));
    // What the axes add to names.
    let suffix = section.id.strip_prefix(&*definition.id).unwrap_or_default();
    let in_file = |load: &Workload| load.id.strip_suffix(suffix).unwrap_or(load.id);
    Place {
        axes,
        workloads: section.workloads.iter().map(|load| (load.id, None)).collect(),
        loads: section.workloads.iter().map(in_file).collect(),
    }
}

impl RunReport {
    fn write(&self, path: &Path) -> io::Result<()> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        fs::create_dir_all(directory)?;
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        match path.extension().and_then(|it| it.to_str()) {
            Some("csv") => file.write_all(self.csv().as_bytes())?,
            Some("html") => file.write_all(self.page().as_bytes())?,
            _ => serde_json::to_writer_pretty(&mut file, self)?,
        }
        file.persist(path).map(drop).map_err(|error| error.error)
    }

    /// A line for each measurement. Names have no characters that CSV gives a meaning.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut text =
            "experiment,point,workload,system,round,requests,seconds,iops,bytes_per_second,\
                        cpu_ns_per_io,p50_ns,p99_ns,gap_ns,memory_bytes,server_busy,neighbour_per_second,\
                        cpu_ns_per_gib,requests_before_per_second,requests_during_per_second,\
                        requests_after_per_second,mean_ns,p95_ns,read_mean_ns,read_p50_ns,read_p95_ns,\
                        write_mean_ns,write_p50_ns,write_p95_ns,storage_cpu_ns_per_io,\
                        source_cpu_ns_per_gib,destination_cpu_ns_per_gib,dip_seconds,recovery_seconds,\
                        switch_over_seconds,latency_before_ns,latency_during_ns,latency_after_ns\n"
                .to_owned();
        for experiment in &self.experiments {
            for measured in &experiment.measured {
                for cell in &measured.cells {
                    // What does not apply is left empty.
                    let number = |value: f64| match value.is_finite() {
                        true => value.to_string(),
                        false => String::new(),
                    };
                    let served = cell.served.as_ref();
                    let of_served = |value: fn(&Served) -> f64| served.map_or(f64::NAN, value);
                    let values = [
                        cell.seconds,
                        cell.iops,
                        cell.throughput,
                        cell.cpu_per_io,
                        cell.p50,
                        cell.p99,
                        cell.gap,
                        cell.memory,
                        cell.server_busy,
                        cell.neighbour.unwrap_or(f64::NAN),
                        cell.cpu_per_gib.unwrap_or(f64::NAN),
                        of_served(|it| it.before),
                        of_served(|it| it.during),
                        of_served(|it| it.after),
                    ];
                    let values = [&values[..], &apart(cell)].concat();
                    let values = values.into_iter().map(number).collect::<Vec<_>>().join(",");
                    let _ = writeln!(
                        text,
                        "{},{},{},{},{},{},{values}",
                        experiment.id,
                        measured.section,
                        cell.workload,
                        cell.system,
                        cell.round,
                        cell.requests,
                    );
                }
            }
        }
        text
    }
}

/// The last columns of a line: times of all requests, of reads and of writes, the storage's CPU time; of a migration the CPU time of
/// either end, and what a client noticed.
fn apart(cell: &Cell) -> Vec<f64> {
    let of = |which: fn(&Times) -> Option<RequestTimes>| {
        let times = cell.times.as_ref().and_then(which);
        times.map_or([f64::NAN; 3], |it| [it.mean, it.p50, it.p95])
    };
    let [mean, _, p95] = of(|times| Some(times.all));
    let ([a, b, c], [d, e, f]) = (of(|times| times.reads), of(|times| times.writes));
    let [storage, source, destination] =
        [cell.storage_cpu_per_io, cell.source_cpu_per_gib, cell.destination_cpu_per_gib]
            .map(|value| value.unwrap_or(f64::NAN));
    let measured = [mean, p95, a, b, c, d, e, f, storage, source, destination];
    let noticed = cell.served.as_ref().map_or([f64::NAN; 6], |it| {
        let (before, during, after) = (it.latency_before, it.latency_during, it.latency_after);
        [it.silence, it.recovery, it.stood_still, before, during, after]
    });
    [&measured[..], &noticed].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::cell;
    use crate::report::tests::report;

    /// A run of one experiment.
    fn of_cells(cells: Vec<Cell>) -> RunReport {
        let mut measured = report().sections.remove(0);
        measured.cells = cells;
        RunReport {
            version: VERSION,
            started: "2001-02-03T04:05:06Z".parse().unwrap(),
            commit: "0123456".to_owned(),
            machine: report().machine,
            experiments: vec![ExperimentReport {
                id: "mine".to_owned(),
                title: "mine".to_owned(),
                measures: Vec::new(),
                refused: None,
                unavailable: Vec::new(),
                clusters: Vec::new(),
                measured: vec![measured],
                claim: None,
            }],
            goals: Vec::new(),
        }
    }

    #[test]
    fn the_release_of_a_cluster_is_named_where_it_was_measured_on() {
        let mut run = of_cells(Vec::new());
        for text in [run.show(), run.page(), serde_json::to_string(&run).unwrap()] {
            assert!(!text.contains("Ceph") && !text.contains("clusters"), "{text}");
        }
        let release = "18.2.7 (reef)".to_owned();
        let one = MeasuredCluster { setup: None, release: release.clone() };
        let two = MeasuredCluster { setup: Some(Setup::Secure), release };
        run.experiments[0].clusters = vec![one, two];
        for text in [run.show(), run.page()] {
            for part in ["easured on Ceph 18.2.7 (reef)", "easured on secure: Ceph 18.2.7 (reef)"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let value = serde_json::to_value(&run).unwrap();
        let expected = serde_json::json!([
            { "release": "18.2.7 (reef)" },
            { "setup": "secure", "release": "18.2.7 (reef)" },
        ]);
        assert_eq!(value["experiments"][0]["clusters"], expected);
    }

    #[test]
    fn a_line_of_csv_has_reads_and_writes_apart() {
        let one = RequestTimes { mean: 11.0, p50: 12.0, p95: 13.0 };
        let two = RequestTimes { mean: 21.0, p50: 22.0, p95: 23.0 };
        let mixed = Cell {
            times: Some(Times { all: one, reads: Some(two), writes: None }),
            storage_cpu_per_io: Some(31.0),
            destination_cpu_per_gib: Some(41.0),
            served: Some(Served {
                silence: 0.5,
                recovery: 1.5,
                stood_still: 0.25,
                latency_during: 51.0,
                ..Served::default()
            }),
            ..cell(0, "ours", "w", 100.0)
        };
        let csv = of_cells(vec![mixed, cell(0, "theirs", "w", 100.0)]).csv();
        let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 3);
        let column = |name: &str| lines[0].iter().position(|it| *it == name).unwrap();
        let of = |line: usize, name: &str| lines[line][column(name)];
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{csv}");
        assert_eq!((of(1, "mean_ns"), of(1, "p95_ns")), ("11", "13"));
        assert_eq!((of(1, "read_p50_ns"), of(1, "write_p50_ns")), ("22", ""));
        assert_eq!((of(1, "storage_cpu_ns_per_io"), of(2, "storage_cpu_ns_per_io")), ("31", ""));
        let ends = (of(1, "source_cpu_ns_per_gib"), of(1, "destination_cpu_ns_per_gib"));
        assert_eq!(ends, ("", "41"));
        assert_eq!((of(1, "dip_seconds"), of(1, "recovery_seconds")), ("0.5", "1.5"));
        assert_eq!((of(1, "switch_over_seconds"), of(2, "switch_over_seconds")), ("0.25", ""));
        assert_eq!((of(1, "latency_during_ns"), of(2, "latency_after_ns")), ("51", ""));
        assert_eq!((of(2, "mean_ns"), of(2, "neighbour_per_second")), ("", ""));
    }
}
