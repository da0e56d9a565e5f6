//! Virtual machines.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{self, Page, Plan, Vm};
use vmseal_api::request::{
    CloneVm, CreateVm, DecryptVm, EncryptVm, EvacuateVm, MigrateVm, MoveVm, RecryptVm, ResumeVm,
    SetVm, StartVm, StopVm,
};
use vmseal_control::services::{self, PageRequest, Services};

use crate::answer::{Accepted, Answer, VmOrPlan};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;

/// Which VMs are listed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct VmsQuery {
    /// The `next` of the last page.
    after: Option<String>,
    /// How many VMs at most.
    limit: Option<u32>,
    /// A label that they have: `KEY=VALUE`, or `KEY` with any value. A page may then have fewer than `limit`, and be
    /// followed by others.
    label: Option<String>,
}

/// Lists the VMs.
#[utoipa::path(get, path = "/api/v1/vms", tag = "vms", params(VmsQuery),
    responses((status = 200, body = Page<Vm>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<VmsQuery>,
) -> Result<Json<Page<Vm>>, ProblemResponse> {
    let VmsQuery { after, limit, label } = query;
    let part = PageRequest { after, limit };
    Ok(Json(services::vms::list(&control, &caller, part, label.as_deref()).await?))
}

/// Changes a VM. Of one that runs, its processors, its memory, and the limits and caches of another policy take effect
/// at its next start; `at_next_start` of the answer names them.
#[utoipa::path(patch, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery), request_body = SetVm,
    responses((status = 200, body = VmOrPlan), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetVm>,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    Ok(Answer(
        services::set_vm::set(&control, &caller, &name, request, query.dry_run).await?.map(Json),
    ))
}

/// Shows a VM.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Vm), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Vm>, ProblemResponse> {
    Ok(Json(services::vms::show(&control, &caller, &name).await?))
}

/// Creates a VM.
#[utoipa::path(post, path = "/api/v1/vms", tag = "vms", params(DryRunQuery), request_body = CreateVm,
    responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn create(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<CreateVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::create_vm::create(&control, &caller, request, query.dry_run).await?.map(Accepted),
    ))
}

/// Starts a VM that is off. A suspended one goes on where it was, unless its memory is given up.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/start", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<StartVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn start(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<StartVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let started = services::vms::start(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(started.map(Accepted)))
}

/// Stops a VM; one that is off stays off. With `force`, a task that waits for the guest to shut down cuts its power
/// instead, and the answer is that task.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/stop", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<StopVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn stop(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<StopVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vms::stop(&control, &caller, &name, request, query.dry_run).await?.map(Accepted),
    ))
}

/// Saves the memory of a guest that runs or is paused, sealed with the key of its VM, and stops the VM.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/suspend", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn suspend(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::suspend::suspend(&control, &caller, &name, query.dry_run).await?.map(Accepted),
    ))
}

/// Has the guest of a suspended VM go on where it was.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/resume", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<ResumeVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn resume(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<ResumeVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::suspend::resume(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Deletes a VM that is off, with its disks and its key, or the remains of one.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn delete(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(services::vms::delete(&control, &caller, &name, query.dry_run).await?.map(Accepted)))
}

/// Clones a VM, off, running or suspended, or a snapshot of one: a new VM with disks, keys, addresses and a TPM of its own.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/clone", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = CloneVm, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn clone(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<CloneVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::clone_vm::clone(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Encrypts the disks of a VM, all or some, off or running, and gives it a policy that encrypts. The disks are copied, the copies used,
/// and the former images overwritten and removed.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/encrypt", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<EncryptVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn encrypt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<EncryptVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::mirror::encrypt(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Decrypts the disks of a VM, off or running, gives it a policy that does not encrypt, and destroys its key, unless its
/// TPM needs it. Its data is in the clear on the datastore after that. With disks that are named it keeps key and policy.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/decrypt", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<DecryptVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn decrypt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<DecryptVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::mirror::decrypt(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Moves disks of a VM, off or running, to another datastore of its host: all of them, or those that are named. Encrypted
/// ones get new data keys under the key-encryption key that the VM has.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/move", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = MoveVm, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn move_disks(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<MoveVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun =
        services::mirror::move_disks(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Moves a VM to another host. While it runs, its memory is sent, encrypted, and the guest goes on there; a VM that is off or
/// suspended is registered there, if that host has all of its datastores.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/migrate", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<MigrateVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn migrate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<MigrateVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun =
        services::migrate::migrate(&control, &caller, &name, request, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Gives a VM whose host does not answer to another host, which has the pools of Ceph that all of its disks are on. The cluster takes nothing of
/// the former host for these disks from then on: what the guest had not flushed is lost, and a guest that runs there is ended when that host
/// answers again. It is started at the other host if it ran.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/evacuate", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<EvacuateVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn evacuate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<EvacuateVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun =
        services::migrate::evacuate::evacuate(&control, &caller, &name, request, query.dry_run);
    Ok(Answer(begun.await?.map(Accepted)))
}

/// Gives a VM that is off another key-encryption key, of its provider or another one, and destroys the old one. The
/// data of its disks is not rewritten. With `deep` it is: the disks of the VM, off or running, are copied with new data
/// keys under the key-encryption key that it has.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/recrypt", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<RecryptVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn recrypt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<RecryptVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::recrypt::recrypt(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}
