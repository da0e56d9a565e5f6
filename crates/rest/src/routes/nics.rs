//! Network cards of VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::Vm;
use vmseal_api::request::SetNic;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, VmOrPlan};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;

/// Plugs a network card in or out, also while its VM runs. A host that does not answer does it when it does.
#[utoipa::path(patch, path = "/api/v1/vms/{vm}/nics/{nic}", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("nic" = String, Path, description = "The card's name within the VM, or its id"), DryRunQuery),
    request_body = SetNic,
    responses((status = 200, body = VmOrPlan), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, nic): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetNic>,
) -> Result<Answer<Json<Vm>>, ProblemResponse> {
    Ok(Answer(
        services::set_nic::set(&control, &caller, &vm, &nic, request, query.dry_run)
            .await?
            .map(Json),
    ))
}
