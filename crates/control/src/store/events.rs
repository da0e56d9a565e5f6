//! Events: appended, never changed.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::model::Event;
use vmseal_api::request_id;

use super::{StoreError, parse};

/// An event that is to be told.
#[derive(Clone, Copy, Debug)]
pub struct NewEvent<'a> {
    /// What kind.
    pub kind: &'a str,
    /// Who asked for it.
    pub actor: &'a str,
    /// The resource, by name.
    pub target: &'a str,
    /// What happened, for people.
    pub detail: &'a str,
}

#[derive(FromRow)]
struct Row {
    sequence: i64,
    at: String,
    kind: String,
    actor: String,
    target: String,
    detail: String,
    request_id: Option<String>,
}

/// Appends, for the request that is being worked for; gives the sequence number.
pub(super) async fn append(
    to: &mut SqliteConnection,
    event: NewEvent<'_>,
) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar(
        "INSERT INTO events (at, kind, actor, target, detail, request_id)
         VALUES (?, ?, ?, ?, ?, ?)
         RETURNING sequence",
    )
    .bind(Timestamp::now().to_string())
    .bind(event.kind)
    .bind(event.actor)
    .bind(event.target)
    .bind(event.detail)
    .bind(request_id::current().map(|id| id.to_string()))
    .fetch_one(to)
    .await?)
}

/// The sequence number of the newest; 0 when there is none.
pub async fn last(from: &mut SqliteConnection) -> Result<i64, StoreError> {
    let last: Option<i64> =
        sqlx::query_scalar("SELECT MAX(sequence) FROM events").fetch_one(from).await?;
    Ok(last.unwrap_or(0))
}

/// Which events are wanted; by default all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this kind, or of one that begins with it and a dot.
    pub kind: Option<String>,
    /// About this resource.
    pub target: Option<String>,
    /// Since this second.
    pub since: Option<Timestamp>,
    /// Caused by the request with this id.
    pub request: Option<String>,
}

/// The events after a sequence number that are wanted, oldest first.
pub async fn after(
    from: &mut SqliteConnection,
    sequence: i64,
    limit: u32,
    filter: &Filter,
) -> Result<Vec<Event>, StoreError> {
    read(from, OLDEST_FIRST, sequence, limit, filter).await
}

/// The newest events that are wanted, oldest first.
pub async fn last_of(
    from: &mut SqliteConnection,
    count: u32,
    filter: &Filter,
) -> Result<Vec<Event>, StoreError> {
    let mut events = read(from, NEWEST_FIRST, 0, count, filter).await?;
    events.reverse();
    Ok(events)
}

macro_rules! wanted {
    ($order:literal) => {
        concat!(
            "SELECT sequence, at, kind, actor, target, detail, request_id FROM events
             WHERE sequence > ?1
               AND (?2 IS NULL OR kind = ?2 OR substr(kind, 1, length(?2) + 1) = ?2 || '.')
               AND (?3 IS NULL OR target = ?3)
               AND (?4 IS NULL OR substr(at, 1, 19) >= ?4)
               AND (?5 IS NULL OR request_id = ?5)
             ORDER BY sequence ",
            $order,
            " LIMIT ?6"
        )
    };
}

const OLDEST_FIRST: &str = wanted!("ASC");
const NEWEST_FIRST: &str = wanted!("DESC");

async fn read(
    from: &mut SqliteConnection,
    statement: &'static str,
    sequence: i64,
    limit: u32,
    filter: &Filter,
) -> Result<Vec<Event>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(statement)
        .bind(sequence)
        .bind(&filter.kind)
        .bind(&filter.target)
        // Whole seconds compare as text; fractions of different lengths do not.
        .bind(filter.since.map(|at| at.strftime("%Y-%m-%dT%H:%M:%S").to_string()))
        .bind(&filter.request)
        .bind(limit)
        .fetch_all(from)
        .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Event {
                sequence: row.sequence,
                at: parse(&row.at, "a time")?,
                kind: row.kind,
                actor: row.actor,
                target: row.target,
                detail: row.detail,
                request_id: row.request_id,
            })
        })
        .collect()
}
