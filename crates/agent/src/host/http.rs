//! The agent's HTTPS: [`HostAgent`] under the paths that `vmseal_api::host` lists, for the server alone.

mod listener;

use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use vmseal_api::carry::{MESSAGE_MAX, carry};
use vmseal_api::console::ConsoleClaim;
use vmseal_api::host::version::{CONTRACT, CONTRACT_HEADER, NotARange};
use vmseal_api::host::{
    BODY_MAX, ContractRange, Exposing, HostAgent, JobKind, JobSpec, STATE_WAIT_MAX, VmSpec,
};
use vmseal_api::id::{DiskId, Incarnation, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::{self, RequestId};

use crate::host::identity::{Identity, IdentityError};

pub use listener::TlsListener;

/// How long requests under way may take to end when the agent is told to.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// What every server may ask, whichever versions of the contract it speaks.
const DESCRIPTION: &str = "/v1/host";

type Agent = Arc<dyn HostAgent>;

/// A problem as an HTTP response.
struct Failure(Problem);

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let content = [(header::CONTENT_TYPE, "application/problem+json")];
        (status, content, serde_json::to_vec(&self.0).unwrap_or_default()).into_response()
    }
}

type Answer<T> = Result<T, Failure>;

fn json<T: Serialize>(value: &T) -> Answer<Response> {
    let text = serde_json::to_vec(value)
        .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

fn done() -> Answer<Response> {
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn body<T: DeserializeOwned>(body: Body) -> Result<T, Problem> {
    let bytes = to_bytes(body, BODY_MAX).await.map_err(|_| {
        let what = format!("the body could not be read, or is longer than {BODY_MAX} bytes");
        Problem::new(ErrorCode::TooLarge, what)
    })?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.to_string()))
}

fn id<T: FromStr>(name: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_| Problem::invalid(name, format!("'{text}' is no id")))
}

/// The routes, over any agent.
pub fn router(agent: Agent) -> Router {
    Router::new()
        .route(DESCRIPTION, get(describe))
        .route("/v1/state", get(state))
        .route("/v1/datastores", post(probe_datastore))
        .route("/v1/datastores/examine", post(examine_datastore))
        .route("/v1/datastores/examine-disk", post(examine_disk))
        .route("/v1/datastores/share", post(share_datastore))
        .route("/v1/datastores/key", put(offer_pool_key))
        .route("/v1/datastores/remount", post(remount_datastore))
        .route("/v1/fence", post(fence_vm))
        .route("/v1/datastores/measure", post(measure_datastore))
        .route("/v1/datastores/scan", post(scan_datastore))
        .route("/v1/datastores/survey", post(survey_datastore))
        .route("/v1/metrics", get(metrics))
        .route("/v1/usage", get(usage))
        .route("/v1/log-level", get(log_level).put(set_log_level))
        .route("/v1/hardware/examine", post(examine_hardware))
        .route("/v1/migrations/examine-port", post(examine_migration_port))
        .route("/v1/vms/{vm}", put(register_vm).delete(unregister_vm))
        .route("/v1/vms/{vm}/key", put(offer_key))
        .route("/v1/vms/{vm}/key/check", post(check_key))
        .route("/v1/vms/{vm}/key/add", post(add_key))
        .route("/v1/vms/{vm}/key/drop-others", post(drop_other_keys))
        .route("/v1/vms/{vm}/key/share", post(share_data_keys))
        .route("/v1/vms/{vm}/measure-kept", post(measure_kept))
        .route("/v1/vms/{vm}/measure-medium", post(measure_medium))
        .route("/v1/vms/{vm}/examine-nic", post(examine_nic))
        .route("/v1/vms/{vm}/examine-job", post(examine_job))
        .route("/v1/vms/{vm}/examine-change", post(examine_change))
        .route("/v1/vms/{vm}/jobs/{task}", put(put_job).get(job))
        .route("/v1/vms/{vm}/jobs/{task}/pace", put(set_pace))
        .route("/v1/vms/{vm}/jobs/{task}/commit", post(commit_job))
        .route("/v1/vms/{vm}/jobs/{task}/cancel", post(cancel_job))
        .route("/v1/vms/{vm}/disks/{disk}", delete(delete_disk))
        .route("/v1/vms/{vm}/disks/{disk}/grow", post(grow_disk))
        .route("/v1/vms/{vm}/disks/{disk}/expose", get(expose_disk))
        .route("/v1/vms/{vm}/disks/{disk}/bitmaps", get(bitmaps).post(change_bitmap))
        .route("/v1/vms/{vm}/disks/{disk}/replica", get(replica))
        .route("/v1/vms/{vm}/power-on", post(power_on))
        .route("/v1/vms/{vm}/power-on-from", post(power_on_from))
        .route("/v1/vms/{vm}/power-on-with", post(power_on_with))
        .route("/v1/vms/{vm}/suspend", post(suspend))
        .route("/v1/vms/{vm}/suspend-as", post(suspend_as))
        .route("/v1/vms/{vm}/memory", delete(discard_memory))
        .route("/v1/vms/{vm}/dumps/{dump}", delete(discard_dump))
        .route("/v1/backups/read", post(read_backup))
        .route("/v1/backups/discard", post(discard_backup))
        .route("/v1/vms/{vm}/power-off", post(power_off))
        .route("/v1/vms/{vm}/control", post(control_guest))
        .route("/v1/vms/{vm}/console", get(console))
        .route("/v1/vms/{vm}/screen", get(screen))
        .route("/v1/vms/{vm}/guest", post(guest))
        .fallback(async || Failure(Problem::new(ErrorCode::NotFound, "there is no such path")))
        .method_not_allowed_fallback(async || {
            Failure(Problem::new(ErrorCode::InvalidRequest, "this path has no such method"))
        })
        .layer(axum::middleware::from_fn(agree))
        .layer(axum::middleware::from_fn(identify))
        .with_state(agent)
}

/// Works for the request that the server names; what the server does of itself has no id.
async fn identify(request: axum::extract::Request, next: axum::middleware::Next) -> Response {
    let sent = request.headers().get(request_id::HEADER).map(header::HeaderValue::as_bytes);
    request_id::during(RequestId::sent(sent), answer(request, next)).await
}

/// Refuses a server with which there is no common version of the contract. What the agent is can be asked by any.
async fn agree(request: axum::extract::Request, next: axum::middleware::Next) -> Response {
    let refused = if request.uri().path() == DESCRIPTION {
        None
    } else {
        speaks(request.headers().get(CONTRACT_HEADER)).err()
    };
    match refused {
        Some(problem) => Failure(problem).into_response(),
        None => next.run(request).await,
    }
}

/// Whether a server that says this speaks what this agent does. One of version 1 says nothing.
fn speaks(said: Option<&header::HeaderValue>) -> Result<(), Problem> {
    let theirs = match said {
        None => ContractRange { min: 1, max: 1 },
        Some(value) => value
            .to_str()
            .map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.to_string()))?
            .parse()
            .map_err(|error: NotARange| {
                Problem::new(ErrorCode::InvalidRequest, error.to_string())
            })?,
    };
    CONTRACT.agree(theirs, "the server").map(drop)
}

/// What only reads, or is asked by the server of itself, is not worth a line each.
async fn answer(request: axum::extract::Request, next: axum::middleware::Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    if method.is_safe() || request_id::current().is_none() {
        tracing::debug!(%method, path, status, "answered");
    } else {
        tracing::info!(%method, path, status, "answered");
    }
    response
}

async fn describe(State(agent): State<Agent>) -> Answer<Response> {
    json(&agent.describe().await?)
}

/// `after` means something together with the incarnation whose version it is.
#[derive(Deserialize)]
struct StateQuery {
    incarnation: Option<Incarnation>,
    after: Option<u64>,
    wait_seconds: Option<u64>,
}

async fn state(
    State(agent): State<Agent>,
    query: Result<Query<StateQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer<Response> {
    let Query(query) =
        query.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    let wait = Duration::from_secs(query.wait_seconds.unwrap_or(0)).min(STATE_WAIT_MAX);
    json(&agent.state(query.incarnation.zip(query.after), wait).await?)
}

async fn probe_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.probe_datastore(body(request).await?).await?)
}

async fn examine_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.examine_datastore(body(request).await?).await?)
}

async fn examine_disk(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    agent.examine_disk(body(request).await?).await?;
    done()
}

async fn share_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    agent.share_datastore(body(request).await?).await?;
    done()
}

async fn offer_pool_key(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    agent.offer_pool_key(body(request).await?).await?;
    done()
}

async fn remount_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.remount_datastore(body(request).await?).await?)
}

async fn fence_vm(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    agent.fence_vm(body(request).await?).await?;
    done()
}

async fn measure_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.measure_datastore(body(request).await?).await?)
}

async fn scan_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.scan_datastore(body(request).await?).await?)
}

async fn survey_datastore(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.survey_datastore(body(request).await?).await?)
}

/// A server of an earlier version does not say how much memory the VM has.
#[derive(Deserialize)]
struct HardwareQuery {
    memory: Option<u64>,
}

async fn examine_hardware(
    State(agent): State<Agent>,
    query: Result<Query<HardwareQuery>, axum::extract::rejection::QueryRejection>,
    request: Body,
) -> Answer<Response> {
    let Query(query) =
        query.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    agent.examine_hardware(body(request).await?, query.memory).await?;
    done()
}

async fn metrics(State(agent): State<Agent>) -> Answer<Response> {
    Ok(agent.metrics().await?.into_response())
}

async fn usage(State(agent): State<Agent>) -> Answer<Response> {
    json(&agent.usage().await?)
}

async fn log_level(State(agent): State<Agent>) -> Answer<Response> {
    json(&agent.log_level().await?)
}

async fn set_log_level(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.set_log_level(body(request).await?).await?)
}

async fn register_vm(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    let spec: VmSpec = body(request).await?;
    if spec.vm != id("vm", &vm)? {
        return Err(Problem::invalid("vm", "is another VM than the path names").into());
    }
    agent.register_vm(spec).await?;
    done()
}

async fn unregister_vm(State(agent): State<Agent>, Path(vm): Path<String>) -> Answer<Response> {
    agent.unregister_vm(id("vm", &vm)?).await?;
    done()
}

async fn offer_key(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.offer_key(id("vm", &vm)?, body(request).await?).await?;
    done()
}

fn disk_of((vm, disk): &(String, String)) -> Result<(VmId, DiskId), Problem> {
    Ok((id("vm", vm)?, id("disk", disk)?))
}

async fn check_key(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.check_key(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn add_key(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.add_key(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn drop_other_keys(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.drop_other_keys(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn share_data_keys(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.share_data_keys(id("vm", &vm)?, body(request).await?).await?;
    done()
}

/// A job; one of a kind that this agent does not know is refused as such.
async fn job_spec(request: Body) -> Result<JobSpec, Problem> {
    /// What every job says first.
    #[derive(Deserialize)]
    struct Head {
        kind: JobKind,
    }
    let spec: serde_json::Value = body(request).await?;
    if Head::deserialize(&spec).is_ok_and(|head| head.kind == JobKind::Unknown) {
        let what = format!(
            "this agent (vmseal {}) has no job of the kind {}: upgrade it",
            env!("CARGO_PKG_VERSION"),
            spec["kind"]
        );
        return Err(Problem::new(ErrorCode::Unsupported, what));
    }
    serde_json::from_value(spec)
        .map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.to_string()))
}

fn task_of((vm, task): &(String, String)) -> Result<(VmId, TaskId), Problem> {
    Ok((id("vm", vm)?, id("task", task)?))
}

async fn measure_kept(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    json(&agent.measure_kept(id("vm", &vm)?, body(request).await?).await?)
}

async fn measure_medium(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    json(&agent.measure_medium(id("vm", &vm)?, body(request).await?).await?)
}

async fn examine_nic(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.examine_nic(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn examine_migration_port(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    agent.examine_migration_port(body(request).await?).await?;
    done()
}

async fn examine_job(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.examine_job(id("vm", &vm)?, job_spec(request).await?).await?;
    done()
}

async fn examine_change(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.examine_change(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn put_job(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
    request: Body,
) -> Answer<Response> {
    let (vm, task) = task_of(&path)?;
    agent.put_job(vm, task, job_spec(request).await?).await?;
    done()
}

async fn job(State(agent): State<Agent>, Path(path): Path<(String, String)>) -> Answer<Response> {
    let (vm, task) = task_of(&path)?;
    json(&agent.job(vm, task).await?)
}

async fn set_pace(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
    request: Body,
) -> Answer<Response> {
    let (vm, task) = task_of(&path)?;
    agent.set_pace(vm, task, body(request).await?).await?;
    done()
}

async fn commit_job(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
    request: Body,
) -> Answer<Response> {
    let (vm, task) = task_of(&path)?;
    agent.commit_job(vm, task, job_spec(request).await?).await?;
    done()
}

async fn cancel_job(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
    request: Body,
) -> Answer<Response> {
    let (vm, task) = task_of(&path)?;
    agent.cancel_job(vm, task, job_spec(request).await?).await?;
    done()
}

async fn delete_disk(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
) -> Answer<Response> {
    let (vm, disk) = disk_of(&path)?;
    agent.delete_disk(vm, disk).await?;
    done()
}

async fn bitmaps(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
) -> Answer<Response> {
    let (vm, disk) = disk_of(&path)?;
    json(&agent.bitmaps(vm, disk).await?)
}

async fn change_bitmap(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
    request: Body,
) -> Answer<Response> {
    let (vm, disk) = disk_of(&path)?;
    let (name, change) = body(request).await?;
    json(&agent.change_bitmap(vm, disk, name, change).await?)
}

async fn replica(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
) -> Answer<Response> {
    let (vm, disk) = disk_of(&path)?;
    json(&agent.replica(vm, disk).await?)
}

async fn power_on(State(agent): State<Agent>, Path(vm): Path<String>) -> Answer<Response> {
    agent.power_on(id("vm", &vm)?).await?;
    done()
}

async fn suspend(State(agent): State<Agent>, Path(vm): Path<String>) -> Answer<Response> {
    agent.suspend(id("vm", &vm)?).await?;
    done()
}

async fn suspend_as(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.suspend_as(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn discard_memory(State(agent): State<Agent>, Path(vm): Path<String>) -> Answer<Response> {
    agent.discard_memory(id("vm", &vm)?).await?;
    done()
}

async fn discard_dump(
    State(agent): State<Agent>,
    Path((vm, dump)): Path<(String, String)>,
) -> Answer<Response> {
    agent.discard_dump(id("vm", &vm)?, id("dump", &dump)?).await?;
    done()
}

async fn read_backup(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    json(&agent.read_backup(body(request).await?).await?)
}

async fn discard_backup(State(agent): State<Agent>, request: Body) -> Answer<Response> {
    agent.discard_backup(body(request).await?).await?;
    done()
}

async fn control_guest(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.control_guest(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn grow_disk(
    State(agent): State<Agent>,
    Path(path): Path<(String, String)>,
    request: Body,
) -> Answer<Response> {
    let (vm, disk) = disk_of(&path)?;
    agent.grow_disk(vm, disk, body(request).await?).await?;
    done()
}

async fn power_on_from(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.power_on_from(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn power_on_with(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.power_on_with(id("vm", &vm)?, body(request).await?).await?;
    done()
}

async fn power_off(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    agent.power_off(id("vm", &vm)?, body(request).await?).await?;
    done()
}

/// Whether a console in use is to be taken over.
#[derive(Deserialize)]
struct ConsoleQuery {
    #[serde(default)]
    force: bool,
}

async fn console(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    query: Result<Query<ConsoleQuery>, axum::extract::rejection::QueryRejection>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Answer<Response> {
    let upgrade =
        upgrade.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    let Query(ConsoleQuery { force }) =
        query.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    let claim = if force { ConsoleClaim::TakeOver } else { ConsoleClaim::IfFree };
    let stream = agent.console(id("vm", &vm)?, claim).await?;
    let upgrade = upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX);
    Ok(upgrade.on_upgrade(async move |socket| {
        carry(socket, stream).await;
    }))
}

async fn screen(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Answer<Response> {
    let upgrade =
        upgrade.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    let stream = agent.screen(id("vm", &vm)?).await?;
    let upgrade = upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX);
    Ok(upgrade.on_upgrade(async move |socket| {
        carry(socket, stream).await;
    }))
}

async fn guest(
    State(agent): State<Agent>,
    Path(vm): Path<String>,
    request: Body,
) -> Answer<Response> {
    json(&agent.guest(id("vm", &vm)?, body(request).await?).await?)
}

/// What is opened of a disk's exposure.
#[derive(Deserialize)]
struct ExposeQuery {
    #[serde(default)]
    connect: bool,
    #[serde(default)]
    writable: bool,
    #[serde(default)]
    snapshot: Option<String>,
    #[serde(default)]
    sealed: bool,
}

async fn expose_disk(
    State(agent): State<Agent>,
    Path((vm, disk)): Path<(String, String)>,
    query: Result<Query<ExposeQuery>, axum::extract::rejection::QueryRejection>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Answer<Response> {
    let upgrade =
        upgrade.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    let Query(ExposeQuery { connect, writable, snapshot, sealed }) =
        query.map_err(|error| Problem::new(ErrorCode::InvalidRequest, error.body_text()))?;
    let snapshot = snapshot.map(|snapshot| id("snapshot", &snapshot)).transpose()?;
    let what = Exposing::of_query(connect, writable, snapshot, sealed)?;
    let stream = agent.expose_disk(id("vm", &vm)?, id("disk", &disk)?, what).await?;
    let upgrade = upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX);
    Ok(upgrade.on_upgrade(async move |socket| {
        carry(socket, stream).await;
    }))
}

/// Why the agent does not listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Its certificate.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The address.
    #[error("cannot listen at {address}: {error}")]
    Bind {
        /// Where.
        address: String,
        /// Why not.
        error: io::Error,
    },
}

/// An agent's listening socket.
pub struct Endpoint {
    listener: TlsListener,
}

impl Endpoint {
    /// Listens where the identity says.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn bind(identity: &Identity) -> Result<Self, ListenError> {
        let told = |error| ListenError::Bind { address: identity.address.clone(), error };
        let tls = identity.tls()?;
        let listener = TcpListener::bind(&identity.address).await.map_err(told)?;
        Ok(Self { listener: TlsListener::new(listener, tls).map_err(told)? })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.listener.address
    }

    /// Serves an agent until `shutdown`; what is being answered then gets a moment to end. Long polls and
    /// consoles do not hold it up.
    ///
    /// # Errors
    /// Of the listening socket.
    pub async fn serve(
        self,
        agent: Agent,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let heard = Arc::new(Notify::new());
        let tell = heard.clone();
        let serving =
            axum::serve(self.listener, router(agent)).with_graceful_shutdown(async move {
                shutdown.await;
                tell.notify_one();
            });
        tokio::select! {
            result = serving => result,
            () = async {
                heard.notified().await;
                tokio::time::sleep(SHUTDOWN_GRACE).await;
            } => Ok(()),
        }
    }
}
