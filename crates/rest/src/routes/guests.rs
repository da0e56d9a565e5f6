//! What is done to guests that run.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::host::GuestControl;
use vmseal_api::model::{Plan, Task, Vm};
use vmseal_api::request::RebootVm;
use vmseal_control::services::{self, Caller, Services};

use crate::answer::{Accepted, Answer, VmOrPlan};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{EmptyBody, OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;

/// Reboots a VM: its guest shuts down, and is started again with what was changed of the VM since. A guest that does not
/// shut down in time runs on, and the task fails.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/reboot", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<RebootVm>, responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn reboot(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<RebootVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::guests::reboot(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// Resets a guest that runs: it boots again without shutting down, as after a power cut.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/reset", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 200, body = VmOrPlan), ProblemResponse))]
pub(super) async fn reset(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    controlled(&control, &caller, &name, GuestControl::Reset, &query).await
}

/// Pauses a guest that runs: its processors stand still, its memory is kept.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/pause", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 200, body = VmOrPlan), ProblemResponse))]
pub(super) async fn pause(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    controlled(&control, &caller, &name, GuestControl::Pause, &query).await
}

/// Lets a paused guest go on.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/unpause", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 200, body = VmOrPlan), ProblemResponse))]
pub(super) async fn unpause(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    controlled(&control, &caller, &name, GuestControl::Unpause, &query).await
}

/// Wakes a guest that is suspended to RAM (ACPI S3). The answer comes when it is awake; `timed-out` says that this is not known. A
/// guest that is awake, or paused, is refused.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/wakeup", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 200, body = VmOrPlan), ProblemResponse))]
pub(super) async fn wakeup(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    controlled(&control, &caller, &name, GuestControl::Wakeup, &query).await
}

async fn controlled(
    control: &Services,
    caller: &Caller,
    name: &str,
    what: GuestControl,
    query: &DryRunQuery,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    let outcome = services::guests::control(control, caller, name, what, query.dry_run).await?;
    Ok(Answer(outcome.map(Json)))
}
