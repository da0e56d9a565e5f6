//! `--dry-run`: what a command would do.

use vmseal_api::model::Plan;

use crate::arguments::Output;
use crate::print;

/// Says what would be done, and that it was not.
pub fn show(output: Output, plan: &Plan) -> anyhow::Result<()> {
    if output != Output::Table {
        return print::one(output, plan, &[]);
    }
    print::line(&format!("{} {} would:", plan.kind, plan.target));
    for (index, step) in plan.steps.iter().enumerate() {
        print::line(&format!("{:>3}. {step}", index + 1));
    }
    eprintln!("nothing was done: this was a dry run");
    Ok(())
}
