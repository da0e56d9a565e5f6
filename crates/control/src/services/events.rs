//! Events, alarms, and that something has changed.

use std::time::Duration;

use tokio::time::Instant;
use vmseal_api::model::{Alarm, Changes, Event, Page};
use vmseal_api::problem::Problem;

use super::caller::{Caller, Privilege};
use super::{Services, page_limit, page_of};
use crate::store::{alarms, events};

pub use crate::store::events::Filter;

/// The longest wait for an event; below the usual idle time-outs of what lies between.
pub const WAIT_MAX: Duration = Duration::from_secs(25);

/// Which events.
#[derive(Debug, Default)]
pub struct EventsRequest {
    /// Those after this sequence number.
    pub after: i64,
    /// How many at most.
    pub limit: Option<u32>,
    /// How long to wait where there is none yet.
    pub wait: Duration,
    /// The newest so many, in place of those after a sequence number.
    pub last: Option<u32>,
    /// Those that it lets pass.
    pub filter: Filter,
}

/// Lists events, oldest first; waits for the next one where that is asked for.
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
        // None of those that were there is wanted: they need not be looked at again.
        after = after.max(known);
        if !waited {
            return Ok(page_of(items, limit, |it: &Event| it.sequence.to_string()));
        }
    }
}

/// Lists the alarms that stand, oldest first.
pub async fn alarms(services: &Services, caller: &Caller) -> Result<Page<Alarm>, Problem> {
    caller.require(Privilege::Read)?;
    let items = alarms::list(&mut *services.store.read().await?).await?;
    Ok(Page { items, next: None })
}

/// Tells the change number; waits until it is another one than `after`, for as long as `wait`.
pub async fn changes(
    services: &Services,
    caller: &Caller,
    after: Option<u64>,
    wait: Duration,
) -> Result<Changes, Problem> {
    caller.require(Privilege::Read)?;
    let mut changes = services.store.changes();
    let another = changes.wait_for(|change| after != Some(*change));
    // When nothing comes in time, the number is the one that the caller has.
    let _ = tokio::time::timeout(wait.min(WAIT_MAX), another).await;
    let change = *changes.borrow();
    Ok(Changes { change })
}
