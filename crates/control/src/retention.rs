//! Deletes old events: those older than a number of days that the operator sets, and those beyond [`EVENTS_MAX`]. While a restored
//! inventory may be older than descriptors, the events stay that say of which VMs: without them, hosts would be told of these.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::hosts::restored;
use crate::store::{Store, StoreError, events};

/// How many events are kept at most: about 300 MB of inventory.
const EVENTS_MAX: i64 = 1_000_000;

/// How many days events are kept by default: an audit looks back a year.
pub const DAYS: u32 = 365;

/// How often old events are deleted. An hour's worth of events beyond the limit does no harm.
const EVERY: Duration = Duration::from_secs(3600);

/// Deletes old events periodically.
pub(crate) async fn delete_old_events(store: Arc<Store>, days: u32) {
    loop {
        match delete_once(&store, days, EVENTS_MAX).await {
            Ok(0) => {}
            Ok(deleted) => tracing::info!(deleted, days, "deleted old events"),
            Err(error) => tracing::error!(%error, "old events could not be deleted"),
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Deletes them once; returns how many.
pub(crate) async fn delete_once(store: &Store, days: u32, most: i64) -> Result<u64, StoreError> {
    let kept = SignedDuration::from_hours(24 * i64::from(days));
    let before = Timestamp::now().checked_sub(kept).unwrap_or(Timestamp::MIN);
    let mut write = store.write().await?;
    let needed = restored::needed_since(&mut write).await?;
    let deleted = events::delete_old(&mut write, before, most, needed).await?;
    write.commit().await?;
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::events::{Filter, NewEvent};

    async fn left(store: &Store) -> Vec<i64> {
        let mut read = store.read().await.unwrap();
        let left = events::after(&mut read, 0, 100, &Filter::default()).await.unwrap();
        left.iter().map(|event| event.sequence).collect()
    }

    #[tokio::test]
    async fn old_events_and_events_beyond_the_limit_are_deleted_and_numbers_are_not_reused() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let mut write = store.write().await.unwrap();
        for _ in 0..5 {
            let event = NewEvent { kind: "k", actor: "a", target: "t", detail: "" };
            write.event(event).await.unwrap();
        }
        sqlx::query("UPDATE events SET at = '2020-01-01T00:00:00Z' WHERE sequence <= 2")
            .execute(&mut *write)
            .await
            .unwrap();
        write.commit().await.unwrap();
        assert_eq!(delete_once(&store, 30, 100).await.unwrap(), 2);
        assert_eq!(left(&store).await, [3, 4, 5]);
        assert_eq!(delete_once(&store, 30, 2).await.unwrap(), 1);
        assert_eq!(left(&store).await, [4, 5]);
        assert_eq!(delete_once(&store, 0, 0).await.unwrap(), 2);
        let mut write = store.write().await.unwrap();
        let event = NewEvent { kind: "k", actor: "a", target: "t", detail: "" };
        write.event(event).await.unwrap();
        write.commit().await.unwrap();
        assert_eq!(left(&store).await, [6]);
    }
}
