//! Disks, network cards and TPMs that are added to VMs and removed from them, and disks that grow.

use std::sync::Arc;

use axum::extract::State;
use vmseal_api::model::{Plan, Task};
use vmseal_api::request::{AddDisk, CreateNic, ResizeDisk};
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;

/// Adds a disk to a VM, which may run: then its guest gets it, too. Without a datastore it is on that of the VM's first disk.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery), request_body = AddDisk,
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add_disk(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddDisk>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vm_devices::add_disk(&control, &caller, &vm, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// Removes a disk of a VM, with its data. A guest that runs must let it go; a disk that it was started with it keeps until
/// it is off.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/disks/{disk}", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove_disk(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, disk): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vm_devices::remove_disk(&control, &caller, &vm, &disk, query.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// Makes a disk longer, of a VM that is off as of one that runs: its guest sees it.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/resize", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), DryRunQuery),
    request_body = ResizeDisk,
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn resize_disk(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, disk): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ResizeDisk>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vm_devices::resize_disk(&control, &caller, &vm, &disk, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// Gives a VM that is off a TPM. Its policy must encrypt.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/tpm", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add_tpm(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::vm_tpm::add(&control, &caller, &vm, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Takes its TPM from a VM that is off. What the TPM keeps is destroyed: a guest that has sealed keys to it cannot open them
/// any more.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/tpm", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove_tpm(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::vm_tpm::remove(&control, &caller, &vm, query.dry_run).await?;
    Ok(Answer(begun.map(Accepted)))
}

/// Adds a network card to a VM, which may run: then its guest gets it, too.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/nics", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery), request_body = CreateNic,
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add_nic(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<CreateNic>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vm_devices::add_nic(&control, &caller, &vm, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// Removes a network card of a VM. A guest that runs must let it go.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/nics/{nic}", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("nic" = String, Path, description = "The card's name within the VM, or its id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove_nic(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, nic): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vm_devices::remove_nic(&control, &caller, &vm, &nic, query.dry_run)
            .await?
            .map(Accepted),
    ))
}
