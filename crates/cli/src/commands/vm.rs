//! Virtual machines.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::host::Power;
use vmseal_api::model::{Host, Vm};
use vmseal_api::request::{CreateVm, RecryptVm, StopVm};

use super::{console, import, launch, list, ssh, task};
use crate::arguments::{self, Output};
use crate::exit::{Ended, Exit};
use crate::print::{self, plan};
use crate::{disk_option, first_boot, libvirt, nic_option};

pub async fn run(server: &ServerClient, output: Output, verb: arguments::Vm) -> anyhow::Result<()> {
    match verb {
        arguments::Vm::List(how) => list::run(server, output, &how, "vms").await,
        arguments::Vm::Show(how) if how.libvirt => {
            show_domain(server, &server.get(&format!("vms/{}", how.of.name)).await?).await
        }
        arguments::Vm::Show(how) => {
            list::one::<Vm>(server, output, &how.of, "vms", print::vm_details).await
        }
        arguments::Vm::Create {
            name,
            policy,
            vcpus,
            memory,
            disks,
            nics,
            first_boot,
            dry_run,
            wait,
        } => {
            let disks = disk_option::parse_all(&disks)?;
            let nics = nic_option::parse_all(&nics)?;
            let cloud_init = first_boot::asked(&first_boot)?;
            if cloud_init.is_some() {
                first_boot::warn_if_plain(server, &policy).await;
            }
            let request = CreateVm { name, policy, vcpus, memory, disks, nics, cloud_init };
            task::begin(server, output, "vms", &request, &dry_run, &wait).await
        }
        arguments::Vm::Import(options) => import::run(server, output, options).await,
        arguments::Vm::Start { name, dry_run, wait } => {
            let path = format!("vms/{name}/start");
            task::begin(server, output, &path, &Value::Null, &dry_run, &wait).await
        }
        arguments::Vm::Stop { name, force, grace_period, dry_run, wait } => {
            let timeout_seconds =
                grace_period.map(|period| u32::try_from(period.as_secs()).unwrap_or(u32::MAX));
            let request = StopVm { force, timeout_seconds };
            task::begin(server, output, &format!("vms/{name}/stop"), &request, &dry_run, &wait)
                .await
        }
        arguments::Vm::Recrypt { name, provider, dry_run, wait } => {
            let (path, request) = (format!("vms/{name}/recrypt"), RecryptVm { provider });
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Vm::Launch(options) => launch::run(server, output, options).await,
        arguments::Vm::Ssh(options) => ssh::run(server, options).await,
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

async fn show_domain(server: &ServerClient, vm: &Vm) -> anyhow::Result<()> {
    let (name, host) = (&vm.name, &vm.host);
    if vm.power != Some(Power::Running) {
        let message = format!(
            "VM '{name}' does not run, so there is no filter whose sockets a domain could name: start it first (vmseal vm start {name})"
        );
        return Err(Ended::new(Exit::Conflict, message).into());
    }
    let host: Host = server.get(&format!("hosts/{host}")).await?;
    let silent = || {
        Ended::new(
            Exit::NoAnswer,
            format!("host '{}' is unreachable; check that its agent is running", vm.host),
        )
    };
    let description = host.description.ok_or_else(silent)?;
    print::line(libvirt::domain(vm, &description).trim_end())
}
