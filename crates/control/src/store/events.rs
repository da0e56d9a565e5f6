//! Events: appended, never changed, deleted when they are old.

use jiff::Timestamp;
use sqlx::query::QueryAs;
use sqlx::sqlite::SqliteArguments;
use sqlx::{FromRow, Sqlite, SqliteConnection};
use vmseal_api::model::Event;
use vmseal_api::request_id;

use super::uncertain::known_since;
use super::{StoreError, parse};

/// A new event.
#[derive(Clone, Copy, Debug)]
pub struct NewEvent<'a> {
    /// Its kind.
    pub kind: &'a str,
    /// The user who caused it.
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

/// Appends an event, with the id of the current request; returns its sequence number.
pub(super) async fn append(
    to: &mut SqliteConnection,
    event: NewEvent<'_>,
) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar(
        "INSERT INTO events (at, kind, actor, target, detail, request_id)
         VALUES ($1, $2, $3, $4, $5, $6)
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

/// The requested events; by default all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this kind, or of kinds that begin with it and a dot.
    pub kind: Option<String>,
    /// About this resource.
    pub target: Option<String>,
    /// Since this second.
    pub since: Option<Timestamp>,
    /// Caused by the request with this id.
    pub request: Option<String>,
}

/// A filter by target or request has its own statement, which uses an index; an optional condition would prevent
/// that.
macro_rules! wanted {
    ($rest:literal) => {
        concat!(
            "SELECT sequence, at, kind, actor, target, detail, request_id FROM events
             WHERE sequence > $1
               AND (CAST($2 AS TEXT) IS NULL OR kind = $2
                    OR substr(kind, 1, length($2) + 1) = $2 || '.')
               AND (CAST($3 AS TEXT) IS NULL OR substr(at, 1, 19) >= $3) ",
            $rest
        )
    };
}

/// The requested events after a sequence number, oldest first.
pub async fn after(
    from: &mut SqliteConnection,
    sequence: i64,
    limit: u32,
    filter: &Filter,
) -> Result<Vec<Event>, StoreError> {
    let query = match (&filter.target, &filter.request) {
        (None, None) => sqlx::query_as(wanted!("ORDER BY sequence LIMIT $4")),
        (Some(_), None) => sqlx::query_as(wanted!("AND target = $5 ORDER BY sequence LIMIT $4")),
        (None, Some(_)) => {
            sqlx::query_as(wanted!("AND request_id = $5 ORDER BY sequence LIMIT $4"))
        }
        (Some(_), Some(_)) => sqlx::query_as(wanted!(
            "AND target = $5 AND request_id = $6 ORDER BY sequence LIMIT $4"
        )),
    };
    read(from, query, sequence, limit, filter).await
}

/// The newest of the requested events, oldest first.
pub async fn last_of(
    from: &mut SqliteConnection,
    count: u32,
    filter: &Filter,
) -> Result<Vec<Event>, StoreError> {
    let query = match (&filter.target, &filter.request) {
        (None, None) => sqlx::query_as(wanted!("ORDER BY sequence DESC LIMIT $4")),
        (Some(_), None) => {
            sqlx::query_as(wanted!("AND target = $5 ORDER BY sequence DESC LIMIT $4"))
        }
        (None, Some(_)) => {
            sqlx::query_as(wanted!("AND request_id = $5 ORDER BY sequence DESC LIMIT $4"))
        }
        (Some(_), Some(_)) => sqlx::query_as(wanted!(
            "AND target = $5 AND request_id = $6 ORDER BY sequence DESC LIMIT $4"
        )),
    };
    let mut events = read(from, query, 0, count, filter).await?;
    events.reverse();
    Ok(events)
}

async fn read(
    from: &mut SqliteConnection,
    query: QueryAs<'static, Sqlite, Row, SqliteArguments>,
    sequence: i64,
    limit: u32,
    filter: &Filter,
) -> Result<Vec<Event>, StoreError> {
    let query = query
        .bind(sequence)
        .bind(filter.kind.clone())
        // Whole seconds compare as text; fractions of different lengths do not.
        .bind(filter.since.map(|at| at.strftime("%Y-%m-%dT%H:%M:%S").to_string()))
        .bind(limit);
    let by = [&filter.target, &filter.request].into_iter().flatten();
    let rows: Vec<Row> = by.fold(query, |query, by| query.bind(by.clone())).fetch_all(from).await?;
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

/// Deletes the events from before a time, and the oldest beyond a number of them; returns how many. Those from `restored` on stay that say
/// which VMs are uncertain ([`super::uncertain`]).
pub async fn delete_old(
    to: &mut SqliteConnection,
    before: Timestamp,
    most: i64,
    restored: Option<i64>,
) -> Result<u64, StoreError> {
    let deleted = sqlx::query(concat!(
        "DELETE FROM events
         WHERE (sequence <= (SELECT COALESCE(MAX(sequence), 0) FROM events) - $1
                OR sequence < (SELECT COALESCE(MIN(sequence), 0) FROM events
                               WHERE substr(at, 1, 19) >= $2))
           AND NOT (sequence >= $3
                    AND (kind IN ('server.restored', 'vm.adoption-undone') OR kind IN ",
        known_since!(),
        "))"
    ))
    .bind(most)
    .bind(before.strftime("%Y-%m-%dT%H:%M:%S").to_string())
    .bind(restored.unwrap_or(i64::MAX))
    .execute(to)
    .await?;
    Ok(deleted.rows_affected())
}
