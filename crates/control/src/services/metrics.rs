//! The metrics for Prometheus: the server's own, and those of each host, which the server fetches.
//! Agents accept only certificates of the control plane, and Prometheus has none.

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use vmseal_api::host::{KeyState, Power};
use vmseal_api::id::HostId;
use vmseal_api::model::{Alarm, Connection, ProviderStatus};
use vmseal_api::problem::Problem;

use super::Services;
use super::caller::{Caller, Privilege};
use crate::metrics;
use crate::store::datastores::Datastore;
use crate::store::providers::Provider;
use crate::store::vms::Vm;
use crate::store::{Part, alarms, datastores, hosts, providers, to_name, vms};

/// The server's own, as OpenMetrics text.
pub async fn server(services: &Services, caller: &Caller) -> Result<String, Problem> {
    caller.require(Privilege::ReadMetrics)?;
    let mut read = services.store.read().await?;
    let known = hosts::list(&mut read, &Part::all()).await?;
    let seen = vms::list(&mut read, &Part::all()).await?;
    let snapshot = Snapshot {
        hosts: known
            .into_iter()
            .map(|host| {
                let up = services.hosts.view(host.id).connection == Connection::Connected;
                (host.name, up)
            })
            .collect(),
        vms: seen.into_iter().map(|vm| labels_of(services, &vm)).collect(),
        datastores: datastores::list(&mut read, &Part::all()).await?,
        providers: providers::list(&mut read, &Part::all())
            .await?
            .into_iter()
            .map(|provider| (services.providers.status(&provider), provider))
            .collect(),
        alarms: alarms::list(&mut read).await?,
    };
    drop(read);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(snapshot));
    let mut text = String::new();
    metrics::get()
        .encode(&mut text)
        .and_then(|()| prometheus_client::encoding::text::encode(&mut text, &registry))
        .map_err(|error| crate::internal(&error))?;
    Ok(text)
}

/// One host's, as its agent gives them.
pub async fn host(services: &Services, caller: &Caller, name: &str) -> Result<String, Problem> {
    caller.require(Privilege::ReadMetrics)?;
    let host = hosts::find(&mut *services.store.read().await?, name).await?;
    let host = host.ok_or_else(|| Problem::not_found("host", name))?;
    services.hosts.connected(host.id)?.metrics().await
}

/// The hosts with metrics, with their names.
pub async fn hosts(services: &Services, caller: &Caller) -> Result<Vec<(HostId, String)>, Problem> {
    caller.require(Privilege::ReadMetrics)?;
    let known = hosts::list(&mut *services.store.read().await?, &Part::all()).await?;
    Ok(known.into_iter().map(|host| (host.id, host.name)).collect())
}

/// The labels of a VM.
#[derive(Debug)]
struct VmLabels {
    vm: String,
    name: String,
    host: String,
    power: String,
    key: String,
}

fn labels_of(services: &Services, vm: &Vm) -> VmLabels {
    let view = services.hosts.view(vm.host);
    let seen = view.vm(vm.id);
    let unknown = || "unknown".to_owned();
    VmLabels {
        vm: vm.id.to_string(),
        name: vm.name.clone(),
        host: vm.host_name.clone(),
        power: seen.map_or_else(unknown, |seen| to_name::<Power>(&seen.power)),
        key: seen.map_or_else(unknown, |seen| to_name::<KeyState>(&seen.key)),
    }
}

/// The current state.
#[derive(Debug)]
struct Snapshot {
    hosts: Vec<(String, bool)>,
    vms: Vec<VmLabels>,
    datastores: Vec<Datastore>,
    providers: Vec<(ProviderStatus, Provider)>,
    alarms: Vec<Alarm>,
}

fn encode_gauges<const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    samples: impl IntoIterator<Item = ([(&'static str, String); N], u64)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in samples {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        family.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

/// How often each value occurs.
fn counted(values: impl Iterator<Item = String>) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts
}

impl Collector for Snapshot {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        encode_gauges(
            &mut to,
            ("vmseal_host_up", "Whether a host answers the server."),
            self.hosts.iter().map(|(name, up)| ([("host", name.clone())], u64::from(*up))),
        )?;
        encode_gauges(
            &mut to,
            ("vmseal_vm_info", "The VMs: 1 for each, with its id, name, host, power and key."),
            self.vms.iter().map(|vm| {
                let labels = [
                    ("vm", vm.vm.clone()),
                    ("name", vm.name.clone()),
                    ("host", vm.host.clone()),
                    ("power", vm.power.clone()),
                    ("key", vm.key.clone()),
                ];
                (labels, 1)
            }),
        )?;
        encode_gauges(
            &mut to,
            (
                "vmseal_provider_info",
                "The key providers: 1 for each, with its id, name and status.",
            ),
            self.providers.iter().map(|(status, provider)| {
                let labels = [
                    ("provider", provider.id.to_string()),
                    ("name", provider.name.clone()),
                    ("status", to_name(status)),
                ];
                (labels, 1)
            }),
        )?;
        let places = || self.datastores.iter().filter_map(|it| Some((it, it.usage?)));
        let labels = |it: &Datastore| [("datastore", it.name.clone()), ("host", it.host_names())];
        encode_gauges(
            &mut to,
            ("vmseal_datastore_capacity_bytes", "The size of a datastore."),
            places().map(|(it, usage)| (labels(it), usage.capacity)),
        )?;
        encode_gauges(
            &mut to,
            ("vmseal_datastore_free_bytes", "The free room of a datastore."),
            places().map(|(it, usage)| (labels(it), usage.free)),
        )?;
        encode_gauges(
            &mut to,
            ("vmseal_alarms", "Active alarms, by code."),
            counted(self.alarms.iter().map(|alarm| alarm.code.clone()))
                .into_iter()
                .map(|(code, count)| ([("code", code)], count)),
        )
    }
}
