//! Storage policies.

use vmseal_api::client::ServerClient;
use vmseal_api::host::Allocation;
use vmseal_api::model::Policy;
use vmseal_api::request::AddPolicy;

use super::list;
use crate::arguments::{self, Output};
use crate::print;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Policy,
) -> anyhow::Result<()> {
    match verb {
        arguments::Policy::List(how) => list::run(server, output, &how, "policies").await,

        arguments::Policy::Show(of) => {
            let policy: Policy = server.get(&format!("policies/{}", of.name)).await?;
            print::one(output, &policy, &[])
        }
        arguments::Policy::Add { name, encrypt, plain: _, provider, thin: _, preallocate } => {
            let allocation = if preallocate { Allocation::Preallocated } else { Allocation::Thin };
            let request = AddPolicy { name, encryption: encrypt, provider, allocation };
            let policy: Policy = server.post("policies", &request).await?;
            print::one(output, &policy, &[])
        }
        arguments::Policy::Remove(of) => {
            Ok(server.delete(&format!("policies/{}", of.name)).await?)
        }
    }
}
