//! `GET /metrics`: what Prometheus scrapes, behind the same tokens as the API.
//!
//! ```text
//! GET /metrics              the server's own
//! GET /metrics/hosts/{host} one host's agent and filters, fetched from it
//! GET /metrics/targets      both kinds as targets, for Prometheus' HTTP service discovery
//! ```
//! Agents take certificates of the control plane only, and Prometheus has none: so the server asks them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::http::{HeaderMap, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use serde::Serialize;
use vmseal_api::host::{KeyState, Power};
use vmseal_api::model::{Alarm, Connection, ProviderStatus};
use vmseal_api::problem::Problem;

use super::App;
use super::problem::Refusal;
use crate::metrics;
use crate::store::datastores::Datastore;
use crate::store::providers::Provider;
use crate::store::vms::Vm;
use crate::store::{Part, alarms, datastores, hosts, providers, to_name, vms};

/// Counts and times every request, by its route's pattern.
pub(super) async fn count(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = known(request.method());
    let route = request.extensions().get::<MatchedPath>();
    // What matches no route is whatever strangers make up.
    let route = route.map_or("none", MatchedPath::as_str).to_owned();
    let response = next.run(request).await;
    metrics::get().request(method, &route, response.status().as_u16(), began.elapsed());
    response
}

/// Methods are words that clients choose; those that the API has are told.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

fn text(body: String) -> Response {
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], body).into_response()
}

/// The server's own.
pub(super) async fn server(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let mut read = app.store.read().await?;
    let known = hosts::list(&mut read, &Part::all()).await?;
    let seen = vms::list(&mut read, &Part::all()).await?;
    let snapshot = Snapshot {
        hosts: known
            .into_iter()
            .map(|host| (host.name, app.hosts.view(host.id).connection == Connection::Connected))
            .collect(),
        vms: seen.into_iter().map(|vm| standing(&app, &vm)).collect(),
        datastores: datastores::list(&mut read, &Part::all()).await?,
        providers: providers::list(&mut read, &Part::all())
            .await?
            .into_iter()
            .map(|provider| (app.providers.status(&provider), provider))
            .collect(),
        alarms: alarms::list(&mut read).await?,
    };
    drop(read);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(snapshot));
    let mut body = String::new();
    metrics::get()
        .encode(&mut body)
        .and_then(|()| prometheus_client::encoding::text::encode(&mut body, &registry))
        .map_err(|error| crate::internal(&error))?;
    Ok(text(body))
}

/// One host's.
pub(super) async fn host(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, Refusal> {
    let host = hosts::find(&mut *app.store.read().await?, &name).await?;
    let host = host.ok_or_else(|| Problem::not_found("host", &name))?;
    Ok(text(app.hosts.connected(host.id)?.metrics().await?))
}

/// A group of targets (Prometheus documentation, HTTP SD).
#[derive(Serialize)]
pub(super) struct Targets {
    targets: [String; 1],
    labels: BTreeMap<&'static str, String>,
}

/// The server and its hosts. The address is the one that Prometheus used to ask.
pub(super) async fn targets(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Json<Vec<Targets>>, Refusal> {
    let address = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let known = hosts::list(&mut *app.store.read().await?, &Part::all()).await?;
    let target = |path: String, instance: String| Targets {
        targets: [address.to_owned()],
        labels: BTreeMap::from([("__metrics_path__", path), ("instance", instance)]),
    };
    let mut all = vec![target("/metrics".to_owned(), "server".to_owned())];
    all.extend(
        known.into_iter().map(|host| target(format!("/metrics/hosts/{}", host.id), host.name)),
    );
    Ok(Json(all))
}

/// A VM as it is labelled.
#[derive(Debug)]
struct Standing {
    vm: String,
    name: String,
    host: String,
    power: String,
    key: String,
}

fn standing(app: &App, vm: &Vm) -> Standing {
    let view = app.hosts.view(vm.host);
    let seen = view.vm(vm.id);
    let unknown = || "unknown".to_owned();
    Standing {
        vm: vm.id.to_string(),
        name: vm.name.clone(),
        host: vm.host_name.clone(),
        power: seen.map_or_else(unknown, |seen| to_name::<Power>(&seen.power)),
        key: seen.map_or_else(unknown, |seen| to_name::<KeyState>(&seen.key)),
    }
}

/// What is true now.
#[derive(Debug)]
struct Snapshot {
    hosts: Vec<(String, bool)>,
    vms: Vec<Standing>,
    datastores: Vec<Datastore>,
    providers: Vec<(ProviderStatus, Provider)>,
    alarms: Vec<Alarm>,
}

fn gauges<const N: usize>(
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
        gauges(
            &mut to,
            ("vmseal_host_up", "Whether a host answers the server."),
            self.hosts.iter().map(|(name, up)| ([("host", name.clone())], u64::from(*up))),
        )?;
        gauges(
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
        gauges(
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
        let labels =
            |it: &Datastore| [("datastore", it.name.clone()), ("host", it.host_name.clone())];
        gauges(
            &mut to,
            ("vmseal_datastore_capacity_bytes", "The size of a datastore."),
            places().map(|(it, usage)| (labels(it), usage.capacity)),
        )?;
        gauges(
            &mut to,
            ("vmseal_datastore_free_bytes", "The free room of a datastore."),
            places().map(|(it, usage)| (labels(it), usage.free)),
        )?;
        gauges(
            &mut to,
            ("vmseal_alarms", "Alarms that stand, by code."),
            counted(self.alarms.iter().map(|alarm| alarm.code.clone()))
                .into_iter()
                .map(|(code, count)| ([("code", code)], count)),
        )
    }
}
