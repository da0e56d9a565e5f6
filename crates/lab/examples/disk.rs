//! `vmseal lab disk` by itself, for `scripts/bench`.

use anyhow::Context;
use clap::Parser;
use vmseal_lab::BenchArguments;
use vmseal_lab::experiment::Progress;
use vmseal_lab::goals::Verdict;

/// Compare vmseal's disks with QEMU's storage daemon, plain and encrypted
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    arguments: BenchArguments,
}

fn main() -> anyhow::Result<()> {
    let Line { arguments } = Line::parse();
    let report = vmseal_lab::run(&arguments, &mut tell).context("no benchmark")?;
    println!("\n{}", report.show());
    println!(
        "{} met, {} not met, {} not resolved, {} not measured; results in {}",
        report.count(Verdict::Met),
        report.count(Verdict::NotMet),
        report.count(Verdict::NotResolved),
        report.count(Verdict::NotMeasured),
        arguments.json.display()
    );
    Ok(())
}

fn tell(progress: Progress<'_>) {
    match progress {
        Progress::Filling(system) => eprintln!("{system}: fill a disk and read it back"),
        Progress::Round(round, rounds) => eprintln!("round {round} of {rounds}"),
        Progress::Done(cell) => eprintln!(
            "  {:<22} {:<22} {:>8.1} kIOPS {:>7.0} MB/s {:>9.2} µs CPU",
            cell.workload,
            cell.system,
            cell.iops / 1e3,
            cell.throughput / 1e6,
            cell.cpu_per_io / 1e3
        ),
    }
}
