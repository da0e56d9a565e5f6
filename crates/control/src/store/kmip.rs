//! KMIP providers: their servers, trusted certificates, and the client's certificate.

use serde::{Deserialize, Serialize};
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::ProviderId;

use super::{StoreError, from_json, taken, to_json};

/// How a server's certificate is checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Trust {
    /// It must be this certificate (PEM), which an operator trusts.
    Pinned {
        /// The certificate.
        certificate: String,
    },
    /// One of these authorities (PEM) must have signed it.
    Authorities {
        /// Their certificates.
        certificates: String,
    },
}

/// A server of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Its name within the provider.
    pub alias: String,
    /// A DNS name or an IP address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The trust; `None` until an operator has set it.
    pub trust: Option<Trust>,
}

/// The client key and certificate of a provider.
#[derive(Clone, Debug, PartialEq, Eq, FromRow)]
pub struct ClientRow {
    /// The name of the sealed file that holds the private key.
    pub key_file: String,
    /// The certificate with its chain (PEM); `None` until there is one for this key.
    pub certificate: Option<String>,
    /// The name of the sealed file of another private key, which waits for its certificate.
    pub next_key_file: Option<String>,
}

#[derive(FromRow)]
struct Row {
    alias: String,
    host: String,
    port: u16,
    trust: Option<String>,
}

/// Adds the servers of a provider, in their order.
pub async fn insert_servers(
    to: &mut SqliteConnection,
    provider: ProviderId,
    servers: &[Server],
) -> Result<(), StoreError> {
    for (position, server) in servers.iter().enumerate() {
        sqlx::query(
            "INSERT INTO kmip_servers (provider_id, position, alias, host, port, trust)
             VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(provider.to_string())
        .bind(i64::try_from(position).unwrap_or(i64::MAX))
        .bind(&server.alias)
        .bind(&server.host)
        .bind(server.port)
        .bind(server.trust.as_ref().map(to_json))
        .execute(&mut *to)
        .await
        .map_err(taken(|| format!("a server '{}' of this provider", server.alias)))?;
    }
    Ok(())
}

/// Replaces the servers of a provider.
pub async fn replace_servers(
    to: &mut SqliteConnection,
    provider: ProviderId,
    servers: &[Server],
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM kmip_servers WHERE provider_id = $1")
        .bind(provider.to_string())
        .execute(&mut *to)
        .await?;
    insert_servers(to, provider, servers).await
}

/// The servers of a provider, in their order.
pub async fn servers(
    from: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<Vec<Server>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT alias, host, port, trust FROM kmip_servers WHERE provider_id = $1 ORDER BY position",
    )
    .bind(provider.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter()
        .map(|row| {
            let trust = row.trust.map(|json| from_json(&json, "whom to trust")).transpose()?;
            Ok(Server { alias: row.alias, host: row.host, port: row.port, trust })
        })
        .collect()
}

/// Records the trust in a server.
pub async fn set_trust(
    to: &mut SqliteConnection,
    provider: ProviderId,
    alias: &str,
    trust: &Trust,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE kmip_servers SET trust = $1 WHERE provider_id = $2 AND alias = $3")
        .bind(to_json(trust))
        .bind(provider.to_string())
        .bind(alias)
        .execute(to)
        .await?;
    Ok(())
}

/// The client key and certificate of a provider.
pub async fn client(
    from: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<Option<ClientRow>, StoreError> {
    Ok(sqlx::query_as(
        "SELECT key_file, certificate, next_key_file FROM kmip_clients WHERE provider_id = $1",
    )
    .bind(provider.to_string())
    .fetch_optional(from)
    .await?)
}

/// Records the client key and certificate of a new provider.
pub async fn insert_client(
    to: &mut SqliteConnection,
    provider: ProviderId,
    client: &ClientRow,
) -> Result<(), StoreError> {
    let sql = "INSERT INTO kmip_clients (provider_id, key_file, certificate, next_key_file)
               VALUES ($1, $2, $3, $4)";
    sqlx::query(sql)
        .bind(provider.to_string())
        .bind(&client.key_file)
        .bind(&client.certificate)
        .bind(&client.next_key_file)
        .execute(to)
        .await?;
    Ok(())
}

/// Changes the client key and certificate of a provider, if its key is still in the file `was`; false if it is not.
pub async fn change_client(
    to: &mut SqliteConnection,
    provider: ProviderId,
    was: &str,
    client: &ClientRow,
) -> Result<bool, StoreError> {
    let changed = sqlx::query(
        "UPDATE kmip_clients SET key_file = $1, certificate = $2, next_key_file = $3
         WHERE provider_id = $4 AND key_file = $5",
    )
    .bind(&client.key_file)
    .bind(&client.certificate)
    .bind(&client.next_key_file)
    .bind(provider.to_string())
    .bind(was)
    .execute(to)
    .await?;
    Ok(changed.rows_affected() == 1)
}
