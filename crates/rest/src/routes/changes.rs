//! The change number: `--watch` and waiting for a task use it.
//!
//! A client reads the change number first, then the resources that it shows, then waits here for another
//! number: so it misses no change in between, and reads again only after a change.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{CHANGE_MAX, Changes};
use vmseal_api::problem::Problem;
use vmseal_control::services::events::Kinds;
use vmseal_control::services::{self, Services};

use crate::connections::{self, Connection};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::QueryOf;

/// The state that the client has, and how long to wait for another.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ChangeQuery {
    /// Wait until the change number differs from this, at most 2⁶³ - 1: no change number is larger.
    after: Option<u64>,
    /// Only changes of these kinds, separated by commas: host, datastore, provider, policy, vm, task, event, alarm.
    kinds: Option<String>,
    /// How long to wait at most, in seconds, at most 25.
    wait_seconds: Option<u32>,
}

/// Returns the change number; with `after`, waits for another one first.
#[utoipa::path(get, path = "/api/v1/changes", tag = "events", params(ChangeQuery),
    responses((status = 200, body = Changes), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    QueryOf(query): QueryOf<ChangeQuery>,
) -> Result<Json<Changes>, ProblemResponse> {
    if query.after.is_some_and(|after| after > CHANGE_MAX) {
        return Err(Problem::invalid("after", format!("must be 0 to {CHANGE_MAX}")).into());
    }
    let kinds = query.kinds.as_deref().map(kinds_of).transpose()?.unwrap_or_else(Kinds::all);
    let wait = Duration::from_secs(query.wait_seconds.unwrap_or(0).into());
    let _held = if wait.is_zero() { None } else { connections::hold(connection.as_ref())? };
    Ok(Json(services::events::changes(&control, &caller, kinds, query.after, wait).await?))
}

fn kinds_of(list: &str) -> Result<Kinds, Problem> {
    list.split(',').try_fold(Kinds::NONE, |kinds, name| {
        let kind = serde_json::from_value(name.into());
        let unknown = |_| Problem::invalid("kinds", format!("there is no kind '{name}'"));
        Ok(kinds.with(kind.map_err(unknown)?))
    })
}
