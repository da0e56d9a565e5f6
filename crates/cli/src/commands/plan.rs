//! `--dry-run`: what a command would do.

use vmseal_api::model::Plan;

use crate::arguments::Output;
use crate::print;

/// Says what would be done, and that it was not.
pub fn show(output: Output, plan: &Plan) -> anyhow::Result<()> {
    if output != Output::Table {
        return print::one(output, plan, &[]);
    }
    let what = format!("{} {}", plan.kind, plan.target);
    print::words(&format!("{} would:", what.trim_end()))?;
    for (index, step) in plan.steps.iter().enumerate() {
        print::words(&format!("{:>3}. {step}", index + 1))?;
    }
    print::say("dry run: nothing was changed");
    Ok(())
}
