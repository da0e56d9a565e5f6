//! `vmseal lab`.

use vmseal_lab::BenchArguments;
use vmseal_lab::run::{self, RunArguments};
use vmseal_lab::tables;

use crate::arguments::Lab;
use crate::print;

/// Carries out a verb.
pub fn run(verb: &Lab) -> anyhow::Result<()> {
    match verb {
        Lab::Disk(options) => disk(options),
        Lab::List => print::line(&tables::list()),
        Lab::Run(options) => experiments(options),
    }
}

/// Compares disks, and prints the report.
fn disk(arguments: &BenchArguments) -> anyhow::Result<()> {
    let report = vmseal_lab::run(arguments, &mut vmseal_lab::narrate)?;
    print::line(&report.show())?;
    print::line(&format!("results in {}", arguments.json.display()))
}

/// Runs experiments, and prints the report.
fn experiments(arguments: &RunArguments) -> anyhow::Result<()> {
    let report = run::run(arguments, &mut vmseal_lab::narrate)?;
    print::line(&report.show())?;
    if let Some(path) = &arguments.report {
        print::line(&format!("results in {}", path.display()))?;
    }
    Ok(())
}
