//! `vmseal lab`.

use vmseal_lab::BenchArguments;

use crate::print;

/// Compares disks, and prints the report.
pub fn disk(arguments: &BenchArguments) -> anyhow::Result<()> {
    let report = vmseal_lab::run(arguments, &mut vmseal_lab::narrate)?;
    print::line(&report.show())?;
    print::line(&format!("results in {}", arguments.json.display()))
}
