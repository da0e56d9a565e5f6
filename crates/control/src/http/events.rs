//! Events and alarms.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::time::Instant;
use utoipa::IntoParams;
use vmseal_api::model::{Alarm, Event, Page};

use super::body::Asked;
use super::problem::Refusal;
use super::{App, page, page_limit};
use crate::connections::{self, Connection};
use crate::store::events::Filter;
use crate::store::{alarms, events};

/// The longest wait for an event; below the usual idle time-outs of what lies between.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(25);

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventQuery {
    /// Those after this sequence number.
    after: Option<i64>,
    /// How many at most.
    limit: Option<u32>,
    /// How long to wait where there is none yet, in seconds, at most 25.
    wait_seconds: Option<u32>,
    /// Those of this kind (`vm.started`), or of all kinds that begin so (`vm`).
    kind: Option<String>,
    /// Those about the resource of this name.
    target: Option<String>,
    /// Those since this time (RFC 3339), to the second.
    #[param(value_type = Option<String>, format = DateTime)]
    since: Option<Timestamp>,
    /// Those of the request with this id.
    request: Option<String>,
    /// The newest so many, in place of those after a sequence number.
    last: Option<u32>,
}

/// Lists events, oldest first; waits for the next one where that is asked for.
#[utoipa::path(get, path = "/api/v1/events", tag = "events", params(EventQuery),
    responses((status = 200, body = Page<Event>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    connection: Option<Extension<Connection>>,
    Asked(query): Asked<EventQuery>,
) -> Result<Json<Page<Event>>, Refusal> {
    let (mut after, limit) = (query.after.unwrap_or(0), page_limit(query.limit));
    let EventQuery { kind, target, since, request, .. } = query;
    let filter = Filter { kind, target, since, request };
    if let Some(last) = query.last {
        let last = page_limit(Some(last));
        let items = events::last_of(&mut *app.store.read().await?, last, &filter).await?;
        return Ok(Json(Page { items, next: None }));
    }
    let wait = Duration::from_secs(query.wait_seconds.unwrap_or(0).into()).min(WAIT_MAX);
    let _held = if wait.is_zero() { None } else { connections::hold(connection.as_ref())? };
    let deadline = Instant::now() + wait;
    let mut newest = app.store.newest_event();
    loop {
        let known = *newest.borrow_and_update();
        let items = events::after(&mut *app.store.read().await?, after, limit, &filter).await?;
        let waited = items.is_empty()
            && matches!(tokio::time::timeout_at(deadline, newest.changed()).await, Ok(Ok(())));
        // None of those that were there is wanted: they need not be looked at again.
        after = after.max(known);
        if !waited {
            return Ok(Json(page(items, limit, |it: &Event| it.sequence.to_string())));
        }
    }
}

/// Lists the alarms that stand, oldest first.
#[utoipa::path(get, path = "/api/v1/alarms", tag = "events",
    responses((status = 200, body = Page<Alarm>), Refusal))]
pub(super) async fn alarms(State(app): State<Arc<App>>) -> Result<Json<Page<Alarm>>, Refusal> {
    let items = alarms::list(&mut *app.store.read().await?).await?;
    Ok(Json(Page { items, next: None }))
}
