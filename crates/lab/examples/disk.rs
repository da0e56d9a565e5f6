//! `vmseal lab disk` by itself, for `scripts/bench`: a release build of the whole program takes longer.

use anyhow::Context;
use clap::Parser;
use vmseal_lab::BenchArguments;

/// Compare vmseal's disks with QEMU's storage daemon and nbdkit, plain and encrypted
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    arguments: BenchArguments,
}

fn main() -> anyhow::Result<()> {
    let Line { arguments } = Line::parse();
    vmseal_lab::stop::on_signals().context("signals cannot be handled")?;
    let report = vmseal_lab::run(&arguments, &mut vmseal_lab::narrate).context("no benchmark")?;
    println!("{}", report.show());
    println!("results in {}", arguments.json.display());
    Ok(())
}
