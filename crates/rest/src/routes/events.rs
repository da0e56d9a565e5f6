//! Events and alarms.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use jiff::Timestamp;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{Alarm, Event, Page};
use vmseal_control::services::events::{EventsRequest, Filter};
use vmseal_control::services::{self, Services};

use crate::connections::{self, Connection};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::QueryOf;

/// The requested events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventQuery {
    /// Only those after this sequence number.
    after: Option<i64>,
    /// How many at most.
    limit: Option<u32>,
    /// How long to wait if there is none yet, in seconds, at most 25.
    wait_seconds: Option<u32>,
    /// Only those of this kind (`vm.started`), or of all kinds with this prefix (`vm`).
    kind: Option<String>,
    /// Only those about the resource of this name.
    target: Option<String>,
    /// Only those since this time (RFC 3339), to the second.
    #[param(value_type = Option<String>, format = DateTime)]
    since: Option<Timestamp>,
    /// Only those of the request with this id.
    request: Option<String>,
    /// Only this many of the newest; not together with a sequence number.
    last: Option<u32>,
}

/// Lists events, oldest first; with `wait_seconds`, waits for the next one if there is none.
#[utoipa::path(get, path = "/api/v1/events", tag = "events", params(EventQuery),
    responses((status = 200, body = Page<Event>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    QueryOf(query): QueryOf<EventQuery>,
) -> Result<Json<Page<Event>>, ProblemResponse> {
    let EventQuery { after, limit, wait_seconds, kind, target, since, request, last } = query;
    let wait = Duration::from_secs(wait_seconds.unwrap_or(0).into());
    let waits = last.is_none() && !wait.is_zero();
    let _held = if waits { connections::hold(connection.as_ref())? } else { None };
    let filter = Filter { kind, target, since, request };
    let request = EventsRequest { after: after.unwrap_or(0), limit, wait, last, filter };
    Ok(Json(services::events::list(&control, &caller, request).await?))
}

/// Lists the active alarms, oldest first.
#[utoipa::path(get, path = "/api/v1/alarms", tag = "events",
    responses((status = 200, body = Page<Alarm>), ProblemResponse))]
pub(super) async fn alarms(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
) -> Result<Json<Page<Alarm>>, ProblemResponse> {
    Ok(Json(services::events::alarms(&control, &caller).await?))
}
