//! Virtual machines.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::model::Vm;
use vmseal_api::request::{CreateVm, StopVm};

use super::{console, list, plan, task};
use crate::arguments::{self, DryRun, Output, Wait};
use crate::{disk_option, print};

pub async fn run(server: &ServerClient, output: Output, verb: arguments::Vm) -> anyhow::Result<()> {
    match verb {
        arguments::Vm::List(how) => list::run(server, output, &how, "vms").await,
        arguments::Vm::Show(of) => {
            list::one::<Vm>(server, output, &of, "vms", print::vm_details).await
        }
        arguments::Vm::Create { name, policy, vcpus, memory, disks, dry_run, wait } => {
            let disks = disks
                .iter()
                .enumerate()
                .map(|(index, option)| disk_option::parse(option, index))
                .collect::<anyhow::Result<_>>()?;
            let request = CreateVm { name, policy, vcpus, memory: memory.as_u64(), disks };
            begin(server, output, "vms", &request, &dry_run, &wait).await
        }
        arguments::Vm::Start { name, dry_run, wait } => {
            let path = format!("vms/{name}/start");
            begin(server, output, &path, &Value::Null, &dry_run, &wait).await
        }
        arguments::Vm::Stop { name, force, grace_period, dry_run, wait } => {
            let timeout_seconds =
                grace_period.map(|period| u32::try_from(period.as_secs()).unwrap_or(u32::MAX));
            let request = StopVm { force, timeout_seconds };
            begin(server, output, &format!("vms/{name}/stop"), &request, &dry_run, &wait).await
        }
        arguments::Vm::Console(options) => console::attach(server, &options).await,
        arguments::Vm::Delete { name, dry_run, wait } => {
            let path = format!("vms/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            let begun = server.delete_task(&path).await?;
            task::settle(server, output, begun, &wait).await
        }
    }
}

/// Begins a task and waits for it, as far as that is wanted.
async fn begin(
    server: &ServerClient,
    output: Output,
    path: &str,
    request: &(impl serde::Serialize + Sync),
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if dry_run.dry_run {
        return plan::show(output, &server.try_post(path, request).await?);
    }
    let begun = server.post(path, request).await?;
    task::settle(server, output, begun, wait).await
}
