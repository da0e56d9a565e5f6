//! Whether anything that can be shown has changed: what `--watch` and waiting for a task are built on.
//!
//! A client reads the change number first, then what it wants to show, then waits here for another
//! number: so it misses nothing, whatever happens in between, and asks only when there is something new.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::Changes;
use vmseal_control::services::{self, Services};

use crate::connections::{self, Connection};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::QueryOf;

/// How new a state is known to the client.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ChangeQuery {
    /// Wait until the change number is another one than this.
    after: Option<u64>,
    /// How long to wait at most, in seconds, at most 25.
    wait_seconds: Option<u32>,
}

/// Tells the change number; waits for another one where that is asked for.
#[utoipa::path(get, path = "/api/v1/changes", tag = "events", params(ChangeQuery),
    responses((status = 200, body = Changes), Refusal))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    QueryOf(query): QueryOf<ChangeQuery>,
) -> Result<Json<Changes>, Refusal> {
    let wait = Duration::from_secs(query.wait_seconds.unwrap_or(0).into());
    let _held = if wait.is_zero() { None } else { connections::hold(connection.as_ref())? };
    Ok(Json(services::events::changes(&control, &caller, query.after, wait).await?))
}
