//! VMs that come from other control planes while they run. Their servers call this.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::remote::{
    ArrivalAddress, ArrivalChecks, ArrivalSession, ArrivalShown, BeginArrival,
};
use vmseal_control::services::{self, Services};

use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment};

/// Says of each thing that a VM of another control plane needs whether it is here. Nothing is changed.
#[utoipa::path(post, path = "/api/v1/arrivals/check", tag = "arrivals", request_body = BeginArrival,
    responses((status = 200, body = ArrivalChecks), ProblemResponse))]
pub(super) async fn check(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    body::Json(request): body::Json<BeginArrival>,
) -> Result<Json<ArrivalChecks>, ProblemResponse> {
    Ok(Json(services::arrivals::check(&control, &caller, request).await?))
}

/// Begins to receive a VM of another control plane: takes its names and makes its key. The id is that of the task; one that is there
/// already is shown. Needs *migrate*, too, and *encrypt new* where the VM has a key, as all of these.
#[utoipa::path(put, path = "/api/v1/arrivals/{arrival}", tag = "arrivals",
    params(("arrival" = String, Path, description = "Its id, which the caller has made")),
    request_body = BeginArrival,
    responses((status = 200, body = ArrivalShown), ProblemResponse))]
pub(super) async fn begin(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    body::Json(request): body::Json<BeginArrival>,
) -> Result<Json<ArrivalShown>, ProblemResponse> {
    Ok(Json(services::arrivals::begin(&control, &caller, &id, request).await?))
}

/// Shows how far a VM is that arrives. One whose source does not ask for ten minutes is given up, unless it was asked to go on here.
#[utoipa::path(get, path = "/api/v1/arrivals/{arrival}", tag = "arrivals",
    params(("arrival" = String, Path, description = "Its id")),
    responses((status = 200, body = ArrivalShown), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
) -> Result<Json<ArrivalShown>, ProblemResponse> {
    Ok(Json(services::arrivals::show(&control, &caller, &id).await?))
}

/// Has the host of an arrival wait for its source: one attempt to send it.
#[utoipa::path(post, path = "/api/v1/arrivals/{arrival}/session", tag = "arrivals",
    params(("arrival" = String, Path, description = "Its id")), request_body = ArrivalSession,
    responses((status = 200, body = ArrivalAddress), ProblemResponse))]
pub(super) async fn session(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    body::Json(request): body::Json<ArrivalSession>,
) -> Result<Json<ArrivalAddress>, ProblemResponse> {
    Ok(Json(services::arrivals::session(&control, &caller, &id, request).await?))
}

/// Has the guest of an arrival go on here: its source stands still, with all of it sent. The answer waits a while until that is
/// decided; from then on only `running` and `cancelled` say what became of it.
#[utoipa::path(post, path = "/api/v1/arrivals/{arrival}/commit", tag = "arrivals",
    params(("arrival" = String, Path, description = "Its id")),
    responses((status = 200, body = ArrivalShown), ProblemResponse))]
pub(super) async fn commit(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Json<ArrivalShown>, ProblemResponse> {
    Ok(Json(services::arrivals::commit(&control, &caller, &id).await?))
}

/// Gives an arrival up, unless its guest was asked to go on here.
#[utoipa::path(post, path = "/api/v1/arrivals/{arrival}/cancel", tag = "arrivals",
    params(("arrival" = String, Path, description = "Its id")),
    responses((status = 200, body = ArrivalShown), ProblemResponse))]
pub(super) async fn cancel(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Json<ArrivalShown>, ProblemResponse> {
    Ok(Json(services::arrivals::cancel(&control, &caller, &id).await?))
}
