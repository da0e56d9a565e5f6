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

use super::App;
use super::body::Asked;
use super::events::WAIT_MAX;
use super::problem::Refusal;
use crate::connections::{self, Connection};

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
    State(app): State<Arc<App>>,
    connection: Option<Extension<Connection>>,
    Asked(query): Asked<ChangeQuery>,
) -> Result<Json<Changes>, Refusal> {
    let wait = Duration::from_secs(query.wait_seconds.unwrap_or(0).into()).min(WAIT_MAX);
    let _held = if wait.is_zero() { None } else { connections::hold(connection.as_ref())? };
    let mut changes = app.store.changes();
    let another = changes.wait_for(|change| query.after != Some(*change));
    // When nothing comes in time, the number is the one that the client has.
    let _ = tokio::time::timeout(wait, another).await;
    let change = *changes.borrow();
    Ok(Json(Changes { change }))
}
