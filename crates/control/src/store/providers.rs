//! Key providers: their properties, not their keys.

use std::collections::HashMap;

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::ProviderId;
use vmseal_api::model::ProviderKind;

use super::{Part, StoreError, from_name, parse, taken, to_name};

/// A provider as the inventory has it.
#[derive(Clone, Debug)]
pub struct Provider {
    /// Its id.
    pub id: ProviderId,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: ProviderKind,
    /// Whether it is the default one.
    pub default: bool,
    /// Whether its backup has been verified.
    pub verified: bool,
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    kind: String,
    is_default: bool,
    verified: bool,
}

impl TryFrom<Row> for Provider {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: parse(&row.id, "a provider's id")?,
            name: row.name,
            kind: from_name(&row.kind, "a kind of provider")?,
            default: row.is_default,
            verified: row.verified,
        })
    }
}

/// Adds a provider.
pub async fn insert(to: &mut SqliteConnection, provider: &Provider) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO providers (id, name, kind, is_default, verified) VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(provider.id.to_string())
    .bind(&provider.name)
    .bind(to_name(&provider.kind))
    .bind(provider.default)
    .bind(provider.verified)
    .execute(to)
    .await
    .map_err(taken(|| format!("a provider '{}', or the one of this backup,", provider.name)))?;
    Ok(())
}

/// A provider by its name or id.
pub async fn find(
    from: &mut SqliteConnection,
    name_or_id: &str,
) -> Result<Option<Provider>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT id, name, kind, is_default, verified FROM providers WHERE name = $1 OR id = $2",
    )
    .bind(name_or_id)
    .bind(name_or_id)
    .fetch_optional(from)
    .await?;
    row.map(Provider::try_from).transpose()
}

/// The default provider.
pub async fn default(from: &mut SqliteConnection) -> Result<Option<Provider>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT id, name, kind, is_default, verified FROM providers WHERE is_default",
    )
    .fetch_optional(from)
    .await?;
    row.map(Provider::try_from).transpose()
}

/// The names of key providers.
pub async fn names(from: &mut SqliteConnection) -> Result<HashMap<ProviderId, String>, StoreError> {
    let rows: Vec<(String, String)> =
        sqlx::query_as("SELECT id, name FROM providers ORDER BY id").fetch_all(from).await?;
    rows.into_iter().map(|(id, name)| Ok((parse(&id, "a provider's id")?, name))).collect()
}

/// Providers in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Provider>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, name, kind, is_default, verified FROM providers
         WHERE id > $1 ORDER BY id LIMIT $2",
    )
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Provider::try_from).collect()
}

/// Makes a provider the default one.
pub async fn set_default(
    to: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE providers SET is_default = FALSE WHERE is_default")
        .execute(&mut *to)
        .await?;
    sqlx::query("UPDATE providers SET is_default = TRUE WHERE id = $1")
        .bind(provider.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records that a provider's backup was verified.
pub async fn set_verified(
    to: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE providers SET verified = TRUE WHERE id = $1")
        .bind(provider.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// How many keys that are not destroyed, and policies that name it, a provider has.
pub async fn uses(
    from: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<(i64, i64), StoreError> {
    Ok(sqlx::query_as(
        "SELECT (SELECT COUNT(*) FROM keys WHERE provider_id = $1 AND NOT destroyed AND NOT unwanted)
                  + (SELECT COUNT(*) FROM vms WHERE provider_id = $2 AND key_id IS NULL),
                (SELECT COUNT(*) FROM policies WHERE provider_id = $3)",
    )
    .bind(provider.to_string())
    .bind(provider.to_string())
    .bind(provider.to_string())
    .fetch_one(from)
    .await?)
}

/// Removes a provider. The tombstones of its keys stay.
pub async fn delete(to: &mut SqliteConnection, provider: ProviderId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM providers WHERE id = $1")
        .bind(provider.to_string())
        .execute(to)
        .await?;
    Ok(())
}
