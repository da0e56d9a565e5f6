//! Events, alarms, and change numbers.

use std::time::Duration;

use tokio::time::Instant;
use vmseal_api::model::{Alarm, Changes, Event, Page};
use vmseal_api::problem::Problem;

use super::caller::{Caller, Privilege};
use super::{Services, page_limit, page_of};
use crate::store::{alarms, events};

pub use crate::store::changes::Kinds;

pub use crate::store::events::Filter;

/// The longest wait for an event; below the usual idle timeouts of proxies.
pub const WAIT_MAX: Duration = Duration::from_secs(25);

/// The requested events.
#[derive(Debug, Default)]
pub struct EventsRequest {
    /// Only those after this sequence number.
    pub after: i64,
    /// How many at most.
    pub limit: Option<u32>,
    /// How long to wait if there is none yet.
    pub wait: Duration,
    /// Only this many of the newest; not together with a sequence number.
    pub last: Option<u32>,
    /// Only those that match.
    pub filter: Filter,
}

/// Lists events, oldest first; on request waits for the next one if there is none.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: EventsRequest,
) -> Result<Page<Event>, Problem> {
    caller.require(Privilege::Read)?;
    let EventsRequest { mut after, limit, wait, last, filter } = request;
    if let Some(last) = last {
        let last = page_limit(Some(last));
        let items = events::last_of(&mut *services.store.read().await?, last, &filter).await?;
        return Ok(Page { items, next: None });
    }
    let (limit, deadline) = (page_limit(limit), Instant::now() + wait.min(WAIT_MAX));
    let mut newest = services.store.newest_event();
    loop {
        let known = *newest.borrow_and_update();
        let items =
            events::after(&mut *services.store.read().await?, after, limit, &filter).await?;
        let waited = items.is_empty()
            && matches!(tokio::time::timeout_at(deadline, newest.changed()).await, Ok(Ok(())));
        // None of the existing events matches: they need not be read again.
        after = after.max(known);
        if !waited {
            return Ok(page_of(items, limit, |it: &Event| it.sequence.to_string()));
        }
    }
}

/// Lists the active alarms, oldest first.
pub async fn alarms(services: &Services, caller: &Caller) -> Result<Page<Alarm>, Problem> {
    caller.require(Privilege::Read)?;
    let items = alarms::list(&mut *services.store.read().await?).await?;
    Ok(Page { items, next: None })
}

/// Returns the change number of these kinds; waits up to `wait` until it differs from `after`.
pub async fn changes(
    services: &Services,
    caller: &Caller,
    kinds: Kinds,
    after: Option<u64>,
    wait: Duration,
) -> Result<Changes, Problem> {
    caller.require(Privilege::Read)?;
    let mut changes = services.store.changes();
    let another = changes.wait_for(|numbers| after != Some(numbers.of(kinds)));
    // If nothing changes in time, the number is the one that the caller has.
    let _ = tokio::time::timeout(wait.min(WAIT_MAX), another).await;
    let change = changes.borrow().of(kinds);
    Ok(Changes { change })
}
