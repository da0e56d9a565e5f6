//! `vmseal vm evacuate`, and `vmseal host evacuate`: the VMs of a host one after the other, each by a request of its own.

use std::io::IsTerminal;

use vmseal_api::client::ServerClient;
use vmseal_api::model::{Host, Plan, Vm};
use vmseal_api::request::EvacuateVm;

use super::reconnect::is_temporary;
use super::{confirm, task};
use crate::arguments::{DryRun, Output, Wait};
use crate::exit::{self, Ended, Exit};
use crate::print::plan;
use crate::stream::{printable, say};

/// What is said before an evacuation.
const FENCED: &str = "Nobody knows whether it runs there: the cluster keeps that host from the disks from now on, and a guest that runs there is ended. What a guest had not flushed is lost, as at a power cut";

fn path(vm: &str) -> String {
    format!("vms/{vm}/evacuate")
}

/// Evacuates a VM, once that is confirmed.
pub async fn vm(
    server: &ServerClient,
    output: Output,
    name: &str,
    request: &EvacuateVm,
    yes: bool,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if !yes && !dry_run.dry_run {
        require_terminal()?;
        // What would be refused is not asked about.
        server.try_post(&path(name), request).await?;
        ask(&format!("VM '{}' is taken from a host that does not answer", printable(name)))?;
    }
    task::begin(server, output, &path(name), request, dry_run, wait).await
}

/// The VMs of a host that can be evacuated, by name, and what is to be said of all.
struct Looked {
    movable: Vec<String>,
    plan: Plan,
    stay: usize,
}

/// Evacuates all VMs of a host that can be, once that is confirmed.
pub async fn host(
    server: &ServerClient,
    output: Output,
    name: &str,
    request: &EvacuateVm,
    yes: bool,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if !yes && !dry_run.dry_run {
        require_terminal()?;
    }
    let host: Host = server.get(&format!("hosts/{name}")).await?;
    let looked = look(server, &host, request).await?;
    if dry_run.dry_run {
        return plan::show(output, &looked.plan);
    }
    plan::warn(&looked.plan);
    if looked.movable.is_empty() && looked.stay == 0 {
        say(format!("host '{}' has no VMs", host.name));
        return Ok(());
    }
    if looked.movable.is_empty() {
        let message = format!("no VM of host '{}' can be evacuated", host.name);
        return Err(Ended::new(Exit::Conflict, message).into());
    }
    if !yes {
        let vms = printable(&looked.movable.join(", "));
        ask(&format!("VMs {vms} are taken from host '{}', which does not answer", host.name))?;
    }
    let mut stay = looked.stay;
    for vm in &looked.movable {
        say(format!("evacuating VM '{vm}'"));
        if let Err(error) = task::begin(server, output, &path(vm), request, dry_run, wait).await {
            // The user wants no more of it, or nothing is known of the server any more.
            if matches!(Exit::of(&error), Exit::Interrupted | Exit::GoesOn | Exit::OutcomeUnknown) {
                return Err(error);
            }
            say(format!("VM '{vm}': {}", exit::text(&error)));
            stay += 1;
        }
    }
    match stay {
        0 => Ok(()),
        stay => {
            let message = format!(
                "{stay} VMs of host '{}' were not evacuated, or did not start elsewhere: see above",
                host.name
            );
            Err(Ended::new(Exit::Failed, message).into())
        }
    }
}

/// Looks which of a host's VMs can be evacuated, and where each would go.
async fn look(server: &ServerClient, host: &Host, request: &EvacuateVm) -> anyhow::Result<Looked> {
    let mut vms: Vec<Vm> = server.all("vms").await?;
    vms.retain(|vm| vm.host == host.name);
    let (kind, target) = ("host.evacuate".to_owned(), host.name.clone());
    let plan = Plan { kind, target, ..Plan::default() };
    let mut looked = Looked { movable: Vec::new(), plan, stay: 0 };
    for vm in vms {
        match server.try_post(&path(&vm.name), request).await {
            Ok(planned) => looked.add(vm.name, planned),
            // Of the server itself.
            Err(problem) if is_temporary(&problem) => return Err(problem.into()),
            Err(problem) => {
                looked.stay += 1;
                looked.plan.warnings.push(format!("VM '{}' stays: {problem}", vm.name));
            }
        }
    }
    if looked.movable.is_empty() {
        looked.plan.steps.push("do nothing".to_owned());
    }
    Ok(looked)
}

impl Looked {
    /// A VM that can be evacuated.
    fn add(&mut self, vm: String, planned: Plan) {
        // The first step says where it goes, and what becomes of it there.
        let to = planned.steps.into_iter().next().unwrap_or_default();
        self.plan.steps.push(format!("evacuate VM '{vm}': {to}"));
        for warning in planned.warnings {
            // What holds for each is said once.
            if !self.plan.warnings.contains(&warning) {
                self.plan.warnings.push(warning);
            }
        }
        self.movable.push(vm);
    }
}

fn require_terminal() -> anyhow::Result<()> {
    if std::io::stdin().is_terminal() {
        return Ok(());
    }
    let message = format!("{FENCED}. There is no terminal to confirm it: give --yes");
    Err(Ended::new(Exit::Usage, message).into())
}

fn ask(what: &str) -> anyhow::Result<()> {
    if confirm::says_yes(&format!("{what}. {FENCED}. Go on"))? {
        return Ok(());
    }
    Err(Ended::new(Exit::Failed, "nothing was evacuated").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_for_each_vm_is_said_once() {
        let planned = |host: &str| Plan {
            steps: vec![format!("choose host '{host}'"), "check".to_owned()],
            warnings: vec!["it is fenced".to_owned()],
            ..Plan::default()
        };
        let mut looked = Looked { movable: Vec::new(), plan: Plan::default(), stay: 0 };
        looked.add("a".to_owned(), planned("x"));
        looked.add("b".to_owned(), planned("y"));
        assert_eq!(looked.movable, ["a", "b"]);
        let steps = ["evacuate VM 'a': choose host 'x'", "evacuate VM 'b': choose host 'y'"];
        assert_eq!(looked.plan.steps, steps);
        assert_eq!(looked.plan.warnings, ["it is fenced"]);
    }
}
