//! `vmseal lab`.

use vmseal_lab::run::{self, RunArguments, RunError};
use vmseal_lab::stop::{self, Stopped};
use vmseal_lab::{BenchArguments, BenchError, catalogue};

use super::ceph;
use crate::arguments::{Lab, Output};
use crate::exit::{Ended, Exit};
use crate::print;

/// Carries out a verb.
pub async fn run(output: Output, verb: Lab) -> anyhow::Result<()> {
    match verb {
        Lab::Ceph(verb) => ceph::run(output, verb).await,
        Lab::Disk(options) => disk(&options),
        Lab::List(columns) => print::list(output, &columns, catalogue::list()),
        Lab::Run(options) => experiments(&options),
    }
}

/// Compares disks, and prints the report.
fn disk(arguments: &BenchArguments) -> anyhow::Result<()> {
    stop::on_signals()?;
    let report =
        vmseal_lab::run(arguments, &mut vmseal_lab::narrate).map_err(|error| match error {
            BenchError::Stopped(stopped) => interrupted(stopped),
            other => other.into(),
        })?;
    print::line(&report.show())?;
    print::line(&format!("results in {}", arguments.json.display()))
}

/// Runs experiments, and prints the report.
fn experiments(arguments: &RunArguments) -> anyhow::Result<()> {
    stop::on_signals()?;
    let report = run::run(arguments, &mut vmseal_lab::narrate).map_err(|error| match error {
        RunError::Stopped(stopped) => interrupted(stopped),
        other => other.into(),
    })?;
    print::line(&report.show())?;
    for path in &arguments.report {
        print::line(&format!("results in {}", path.display()))?;
    }
    Ok(())
}

fn interrupted(stopped: Stopped) -> anyhow::Error {
    Ended::new(Exit::Interrupted, stopped.to_string()).into()
}
