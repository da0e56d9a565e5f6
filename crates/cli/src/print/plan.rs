//! `--dry-run`: the plan of a command.

use vmseal_api::model::Plan;

use super::Lines;
use crate::arguments::Output;
use crate::stream::{say, words};

/// Prints what would be done, and that nothing was changed.
pub fn show(output: Output, plan: &Plan) -> anyhow::Result<()> {
    if output == Output::Csv && !plan.vms.is_empty() {
        return super::append(output, &mut Lines::usual(output), &plan.vms);
    }
    if output != Output::Table {
        return super::one(output, plan, &[]);
    }
    let what = format!("{} {}", plan.kind, plan.target);
    words(&format!("{} would:", what.trim_end()))?;
    for (index, step) in plan.steps.iter().enumerate() {
        words(&format!("{:>3}. {step}", index + 1))?;
    }
    if !plan.vms.is_empty() {
        super::append(output, &mut Lines::usual(output), &plan.vms)?;
    }
    warn(plan);
    say("dry run: nothing was changed");
    Ok(())
}

/// Prints what may turn out to be too much, on standard error.
pub fn warn(plan: &Plan) {
    for warning in &plan.warnings {
        say(format!("warning: {warning}"));
    }
}
