//! The laboratory.

use vmseal_lab::BenchArguments;
use vmseal_lab::experiment::Progress;

/// Compares disks; shows the report.
pub fn disk(arguments: &BenchArguments) -> anyhow::Result<()> {
    let report = vmseal_lab::run(arguments, &mut |progress| match progress {
        Progress::Filling(system) => eprintln!("{system}: filling a disk and reading it back"),
        Progress::Round(round, rounds) => eprintln!("round {round} of {rounds}"),
        Progress::Done(_) => {}
    })?;
    println!("{}", report.show());
    println!("results in {}", arguments.json.display());
    Ok(())
}
