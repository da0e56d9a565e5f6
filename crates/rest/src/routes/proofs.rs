//! Proofs that VMs are encrypted.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{Plan, Proof, Task};
use vmseal_api::request::ProveVm;
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;

/// Has the host of a VM read the VM's files and report whether they are encrypted. The VM may run; nothing is changed.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/prove", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery),
    request_body = Option<ProveVm>, responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn prove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<ProveVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let begun = services::proofs::prove(&control, &caller, &vm, request, query.dry_run).await;
    Ok(Answer(begun?.map(Accepted)))
}

/// Which report.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReportQuery {
    /// The SHA-256 of its text in hexadecimal, as the event `vm.proved` has it, or the id of its task; by default the newest.
    report: Option<String>,
}

/// The newest report on a VM, or another one of the last ones, which are kept.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/proof", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"), ReportQuery),
    responses((status = 200, body = Proof), ProblemResponse))]
pub(super) async fn kept(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<ReportQuery>,
) -> Result<Json<Proof>, ProblemResponse> {
    Ok(Json(services::proofs::kept(&control, &caller, &vm, query.report.as_deref()).await?))
}
