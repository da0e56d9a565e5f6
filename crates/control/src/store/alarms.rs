//! Active alarms. Each source reports all of its alarms at once; an alarm that it no longer reports is cleared.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::HostId;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::Alarm;

use super::events::NewEvent;
use super::{StoreError, Write, from_name, parse, to_name};

/// An alarm as its source reports it; the store adds the time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaisedAlarm {
    /// Its kind.
    pub code: &'static str,
    /// The resource, by name.
    pub target: String,
    /// What happened and what to do.
    pub detail: String,
    /// Why a key is unavailable, if that is its cause.
    pub reason: Option<KeyFault>,
}

/// The source of the alarms about a host's datastores; those about the host and its VMs have the host's id.
#[must_use]
pub fn source_of_datastores(host: HostId) -> String {
    format!("datastores of {host}")
}

#[derive(FromRow)]
struct Row {
    code: String,
    target: String,
    since: String,
    detail: String,
    reason: Option<String>,
}

async fn of_source(from: &mut SqliteConnection, source: &str) -> Result<Vec<Row>, StoreError> {
    Ok(sqlx::query_as("SELECT code, target, since, detail, reason FROM alarms WHERE source = $1")
        .bind(source)
        .fetch_all(from)
        .await?)
}

/// Whether a source's alarms differ from these.
pub async fn differ(
    from: &mut SqliteConnection,
    source: &str,
    raised: &[RaisedAlarm],
) -> Result<bool, StoreError> {
    let known = of_source(from, source).await?;
    let same = known.len() == raised.len()
        && raised.iter().all(|alarm| {
            known.iter().any(|row| {
                row.code == alarm.code
                    && row.target == alarm.target
                    && row.detail == alarm.detail
                    && row.reason == alarm.reason.as_ref().map(to_name)
            })
        });
    Ok(!same)
}

/// Whether a source has an alarm of this kind.
pub async fn is_raised(
    from: &mut SqliteConnection,
    source: &str,
    code: &str,
) -> Result<bool, StoreError> {
    let raised =
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM alarms WHERE source = $1 AND code = $2)");
    Ok(raised.bind(source).bind(code).fetch_one(from).await?)
}

/// Replaces a source's alarms, with an event for each one raised or cleared. `standing` has every (code, target)
/// at most once.
pub async fn replace(
    write: &mut Write<'_>,
    source: &str,
    raised: &[RaisedAlarm],
) -> Result<(), StoreError> {
    let known = of_source(write, source).await?;
    for row in &known {
        if !raised.iter().any(|alarm| alarm.code == row.code && alarm.target == row.target) {
            sqlx::query("DELETE FROM alarms WHERE source = $1 AND code = $2 AND target = $3")
                .bind(source)
                .bind(&row.code)
                .bind(&row.target)
                .execute(&mut **write)
                .await?;
            tell(write, "alarm.cleared", &row.target, &row.code).await?;
        }
    }
    for alarm in raised {
        raise(write, source, alarm).await?;
    }
    Ok(())
}

/// Adds one alarm to a source's, with an event if it is new.
pub async fn raise(
    write: &mut Write<'_>,
    source: &str,
    alarm: &RaisedAlarm,
) -> Result<(), StoreError> {
    let known: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM alarms WHERE source = $1 AND code = $2 AND target = $3",
    )
    .bind(source)
    .bind(alarm.code)
    .bind(&alarm.target)
    .fetch_one(&mut **write)
    .await?;
    sqlx::query(
        "INSERT INTO alarms (source, code, target, since, detail, reason) VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (source, code, target) DO UPDATE
         SET detail = excluded.detail, reason = excluded.reason",
    )
    .bind(source)
    .bind(alarm.code)
    .bind(&alarm.target)
    .bind(Timestamp::now().to_string())
    .bind(&alarm.detail)
    .bind(alarm.reason.as_ref().map(to_name))
    .execute(&mut **write)
    .await?;
    if known == 0 {
        let detail = format!("{}: {}", alarm.code, alarm.detail);
        tell(write, "alarm.raised", &alarm.target, &detail).await?;
    }
    Ok(())
}

async fn tell(
    write: &mut Write<'_>,
    kind: &str,
    target: &str,
    detail: &str,
) -> Result<(), StoreError> {
    write.event(NewEvent { kind, actor: crate::SELF, target, detail }).await
}

/// All active alarms, oldest first.
pub async fn list(from: &mut SqliteConnection) -> Result<Vec<Alarm>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT code, target, since, detail, reason FROM alarms ORDER BY since, code, target",
    )
    .fetch_all(from)
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Alarm {
                since: parse(&row.since, "a time")?,
                code: row.code,
                target: row.target,
                detail: row.detail,
                reason: row.reason.map(|name| from_name(&name, "a fault of a key")).transpose()?,
            })
        })
        .collect()
}
