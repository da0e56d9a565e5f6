//! Virtual machines.

use vmseal_api::client::ServerClient;
use vmseal_api::model::{Task, Vm};
use vmseal_api::request::{CreateVm, StopVm};

use super::{console, list, task};
use crate::arguments::{self, Output};
use crate::{disk_option, print};

pub async fn run(server: &ServerClient, output: Output, verb: arguments::Vm) -> anyhow::Result<()> {
    match verb {
        arguments::Vm::List(how) => list::run(server, output, &how, "vms").await,

        arguments::Vm::Show(of) => {
            let vm: Vm = server.get(&format!("vms/{}", of.name)).await?;
            print::one(output, &vm, &print::vm_details(&vm))
        }
        arguments::Vm::Create { name, policy, vcpus, memory, disks, wait } => {
            let disks = disks
                .iter()
                .enumerate()
                .map(|(index, option)| disk_option::parse(option, index))
                .collect::<anyhow::Result<_>>()?;
            let request = CreateVm { name, policy, vcpus, memory: memory.as_u64(), disks };
            let begun: Task = server.post("vms", &request).await?;
            task::settle(server, output, begun, &wait).await
        }
        arguments::Vm::Start { name, wait } => {
            let path = format!("vms/{name}/start");
            let begun: Task = server.post(&path, &serde_json::Value::Null).await?;
            task::settle(server, output, begun, &wait).await
        }
        arguments::Vm::Stop { name, force, timeout, wait } => {
            let request = StopVm { force, timeout_seconds: timeout };
            let begun: Task = server.post(&format!("vms/{name}/stop"), &request).await?;
            task::settle(server, output, begun, &wait).await
        }
        arguments::Vm::Console(of) => console::attach(server, &of.name).await,
        arguments::Vm::Delete { name, wait } => {
            let begun: Task = server.delete_task(&format!("vms/{name}")).await?;
            task::settle(server, output, begun, &wait).await
        }
    }
}
