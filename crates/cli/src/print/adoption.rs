//! What becomes of the VMs of a datastore, as a table or as the API's own document.

use vmseal_api::adopt::{AdoptedVm, Adoption};

use super::Lines;
use crate::arguments::Output;
use crate::rows::column::{Cell, Column, more, usual};
use crate::rows::{Row, word};
use crate::stream::say;

/// Prints it. All but the VMs goes to standard error, so that standard output is only the table.
pub fn show(output: Output, adoption: &Adoption) -> anyhow::Result<()> {
    if !matches!(output, Output::Table | Output::Csv) {
        return super::whole(output, adoption);
    }
    if adoption.vms.is_empty() {
        say(format_args!("datastore '{}' has no VMs", adoption.datastore));
    } else {
        super::append(output, &mut Lines::all(output), &adoption.vms)?;
    }
    for vm in &adoption.vms {
        let name = vm.name.clone().unwrap_or_else(|| vm.vm.to_string());
        for newer in &vm.newer {
            say(format_args!("VM '{name}': {newer}"));
        }
        for differs in &vm.differs {
            say(format_args!("VM '{name}' differs: {differs}"));
        }
        for warning in &vm.warnings {
            say(format_args!("warning: VM '{name}': {warning}"));
        }
    }
    if let Some(why) = &adoption.incomplete {
        say(format_args!("the list is incomplete: {why}"));
    }
    Ok(())
}

impl Row for AdoptedVm {
    const PLURAL: &'static str = "VMs";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| it.name.clone().into()),
        usual("vm", |it| it.vm.to_string().into()),
        usual("status", |it| word(&it.status).into()),
        usual("power", |it| it.power.as_ref().map(word).into()),
        usual("disks", |it| it.disks.map_or(Cell::Nothing, |count| Cell::Number(count as u64))),
        usual("policy", |it| it.policy.clone().into()),
        more("key", |it| it.key_id.clone().into()),
        usual("detail", |it| (&it.detail).into()),
    ];
    fn identity(&self) -> String {
        self.vm.to_string()
    }
}
