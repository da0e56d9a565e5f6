//! Storage policies.

use std::time::Duration;

use vmseal_api::client::ServerClient;
use vmseal_api::host::{Allocation, DiskLimits};
use vmseal_api::image_layout::ImageLayout;
use vmseal_api::model::{Policy, Replication};
use vmseal_api::redundancy::Redundancy;
use vmseal_api::replica::REPLICA_RATE;
use vmseal_api::request::{AddPolicy, SetPolicy};

use super::list;
use crate::arguments::{self, OnStall, Output};
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
            on_stall,
            cache,
            replicate_to,
            replicate_rate,
            cpu_model,
            downtime,
            messenger,
            osd_encryption,
            failures_to_tolerate,
            data_chunks,
            failure_domain,
            object_size,
            stripe_unit,
            stripe_count,
            dry_run,
        } => {
            let allocation = if preallocate { Allocation::Preallocated } else { Allocation::Thin };
            let stall_timeout = on_stall.and_then(|OnStall(seconds)| seconds);
            let limits = DiskLimits { iops, bandwidth, stall_timeout };
            let encryption = encrypt;
            let replica = replicate_to.map(|datastore| Replication {
                datastore,
                bytes_per_second: replicate_rate.unwrap_or(REPLICA_RATE),
            });
            let request = AddPolicy {
                name,
                encryption,
                provider,
                allocation,
                limits,
                cache,
                replica,
                cpu_model,
                downtime_milliseconds: downtime.map(milliseconds),
                messenger,
                osd_encryption,
                redundancy: Redundancy {
                    data_chunks,
                    failure_domain,
                    ..failures_to_tolerate.unwrap_or_default()
                },
                image_layout: ImageLayout { object_size, stripe_unit, stripe_count },
            };
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("policies", &request).await?);
            }
            // Only a plan says what hosts may lack of the CPU model, and what the failures to tolerate risk.
            if request.cpu_model.is_some() || request.redundancy.failures > 0 {
                plan::warn(&server.try_post("policies", &request).await?);
            }
            let policy: Policy = server.post("policies", &request).await?;
            print::one(output, &policy, &[])
        }
        arguments::Policy::Set(options) => set(server, output, options).await,
        arguments::Policy::Delete { name, dry_run } => {
            let path = format!("policies/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}

/// What stands for the default provider.
const DEFAULT_PROVIDER: &str = "default";

/// What stands for the processor model that each VM chooses.
const ANY_MODEL: &str = "any";

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

async fn set(
    server: &ServerClient,
    output: Output,
    options: arguments::SetPolicy,
) -> anyhow::Result<()> {
    let allocation = match (options.thin, options.preallocate) {
        (true, _) => Some(Allocation::Thin),
        (_, true) => Some(Allocation::Preallocated),
        _ => None,
    };
    let provider = options.provider.map(|name| match name.as_str() {
        DEFAULT_PROVIDER => String::new(),
        _ => name,
    });
    let request = SetPolicy {
        name: options.name,
        encryption: (options.encrypt || options.plain).then_some(options.encrypt),
        provider,
        allocation,
        iops: options.iops,
        bandwidth: options.bandwidth,
        // 0 has guests wait.
        stall_timeout: options.on_stall.map(|OnStall(seconds)| seconds.unwrap_or(0)),
        cache: options.cache,
        replicate_to: if options.no_replica { Some(String::new()) } else { options.replicate_to },
        replicate_rate: options.replicate_rate,
        cpu_model: options.cpu_model.map(|model| match model.as_str() {
            ANY_MODEL => String::new(),
            _ => model,
        }),
        downtime_milliseconds: options.downtime.map(milliseconds),
        messenger: options.messenger,
        osd_encryption: options.osd_encryption,
        redundancy: options.failures_to_tolerate,
        data_chunks: options.data_chunks,
        failure_domain: options.failure_domain.map(|domain| match domain.as_str() {
            arguments::ANY_DOMAIN => String::new(),
            _ => domain,
        }),
        object_size: options.object_size,
        stripe_unit: options.stripe_unit,
        stripe_count: options.stripe_count,
    };
    let path = format!("policies/{}", options.policy);
    if options.dry_run.dry_run {
        return plan::show(output, &server.try_patch(&path, &request).await?);
    }
    if request.cpu_model.is_some() || request.redundancy.is_some() {
        plan::warn(&server.try_patch(&path, &request).await?);
    }
    let policy: Policy = server.patch(&path, &request).await?;
    print::one(output, &policy, &[])
}
