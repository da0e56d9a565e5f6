//! The users of the API, and the one-time tokens of joining hosts. Tokens are stored as SHA-256, in hexadecimal: they
//! are 256 random bits, which need no slow hash.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sqlx::{FromRow, SqliteConnection};

use super::{StoreError, from_name, to_name};

/// What a user may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Everything.
    Administrator,
    /// Read the metrics, and nothing else.
    Metrics,
}

/// A user.
#[derive(Clone, Debug, FromRow)]
pub struct User {
    /// The name.
    pub name: String,
    /// The SHA-256 of the token.
    pub token_sha256: String,
    role: String,
}

impl User {
    /// What the user may do.
    ///
    /// # Errors
    /// [`StoreError`]: it is of a later version.
    pub fn role(&self) -> Result<Role, StoreError> {
        from_name(&self.role, "a user's role")
    }
}

/// All users.
pub async fn list(from: &mut SqliteConnection) -> Result<Vec<User>, StoreError> {
    Ok(sqlx::query_as("SELECT name, token_sha256, role FROM users ORDER BY name")
        .fetch_all(from)
        .await?)
}

/// Removes a user.
pub async fn delete(to: &mut SqliteConnection, name: &str) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM users WHERE name = $1").bind(name).execute(to).await?;
    Ok(())
}

/// Adds a user.
pub async fn insert(
    to: &mut SqliteConnection,
    name: &str,
    token_sha256: &str,
    role: Role,
) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO users (name, token_sha256, role) VALUES ($1, $2, $3)")
        .bind(name)
        .bind(token_sha256)
        .bind(to_name(&role))
        .execute(to)
        .await?;
    Ok(())
}

/// Adds a join token, and drops those that have expired.
pub async fn insert_join_token(
    to: &mut SqliteConnection,
    sha256: &str,
    expires: Timestamp,
) -> Result<(), StoreError> {
    // RFC 3339 in UTC with the same number of digits sorts as time does.
    sqlx::query("DELETE FROM join_tokens WHERE expires < $1")
        .bind(sortable(Timestamp::now()))
        .execute(&mut *to)
        .await?;
    sqlx::query("INSERT INTO join_tokens (sha256, expires) VALUES ($1, $2)")
        .bind(sha256)
        .bind(sortable(expires))
        .execute(to)
        .await?;
    Ok(())
}

/// Whether the join token exists and has not expired.
pub async fn has_join_token(from: &mut SqliteConnection, sha256: &str) -> Result<bool, StoreError> {
    let found: Option<(i64,)> =
        sqlx::query_as("SELECT 1 FROM join_tokens WHERE sha256 = $1 AND expires >= $2")
            .bind(sha256)
            .bind(sortable(Timestamp::now()))
            .fetch_optional(from)
            .await?;
    Ok(found.is_some())
}

/// Uses up a join token; false if it does not exist or has expired.
pub async fn take_join_token(to: &mut SqliteConnection, sha256: &str) -> Result<bool, StoreError> {
    let taken = sqlx::query("DELETE FROM join_tokens WHERE sha256 = $1 AND expires >= $2")
        .bind(sha256)
        .bind(sortable(Timestamp::now()))
        .execute(to)
        .await?;
    Ok(taken.rows_affected() == 1)
}

fn sortable(at: Timestamp) -> String {
    format!("{at:.3}")
}
