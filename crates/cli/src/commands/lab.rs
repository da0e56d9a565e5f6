//! The laboratory.

use vmseal_lab::BenchArguments;

/// Compares disks; shows the report.
pub fn disk(arguments: &BenchArguments) -> anyhow::Result<()> {
    let report = vmseal_lab::run(arguments, &mut vmseal_lab::narrate)?;
    println!("{}", report.show());
    println!("results in {}", arguments.json.display());
    Ok(())
}
