//! What VMs use.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::usage::Usage;
use vmseal_control::services::{self, Services};

use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::QueryOf;

/// Which VMs.
#[derive(Clone, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct UsageQuery {
    /// Only this one, by name or id.
    vm: Option<String>,
}

/// Shows what the VMs that run use: counters since each of them started, read from their hosts now.
#[utoipa::path(get, path = "/api/v1/usage", tag = "vms", params(UsageQuery),
    responses((status = 200, body = Usage), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<UsageQuery>,
) -> Result<Json<Usage>, ProblemResponse> {
    Ok(Json(services::usage::of_vms(&control, &caller, query.vm.as_deref()).await?))
}
