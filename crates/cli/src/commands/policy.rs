//! Storage policies.

use vmseal_api::client::ServerClient;
use vmseal_api::host::{Allocation, DiskLimits};
use vmseal_api::model::{Policy, Replication};
use vmseal_api::replica::REPLICA_RATE;
use vmseal_api::request::AddPolicy;

use super::list;
use crate::arguments::{self, Output};
use crate::print::{self, plan};

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Policy,
) -> anyhow::Result<()> {
    match verb {
        arguments::Policy::List(how) => list::run(server, output, &how, "policies").await,
        arguments::Policy::Show(of) => {
            list::one::<Policy>(server, output, &of, "policies", |_| Vec::new()).await
        }
        arguments::Policy::Create {
            name,
            encrypt,
            plain: _,
            provider,
            thin: _,
            preallocate,
            iops,
            bandwidth,
            cache,
            replicate_to,
            replicate_rate,
            dry_run,
        } => {
            let allocation = if preallocate { Allocation::Preallocated } else { Allocation::Thin };
            let limits = DiskLimits { iops, bandwidth };
            let encryption = encrypt;
            let replica = replicate_to.map(|datastore| Replication {
                datastore,
                bytes_per_second: replicate_rate.unwrap_or(REPLICA_RATE),
            });
            let request =
                AddPolicy { name, encryption, provider, allocation, limits, cache, replica };
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("policies", &request).await?);
            }
            let policy: Policy = server.post("policies", &request).await?;
            print::one(output, &policy, &[])
        }
        arguments::Policy::Delete { name, dry_run } => {
            let path = format!("policies/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}
