//! The disks that are exposed. A row is there from the event of the begin until that of the end, so that there is an end
//! also where the server does not see it.

use sqlx::{FromRow, SqliteConnection};
use uuid::Uuid;

use super::{StoreError, parse};

/// A disk that is exposed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// Of this exposure.
    pub id: Uuid,
    /// The VM, by the name that it had.
    pub vm: String,
    /// The disk, by name.
    pub disk: String,
    /// The user who exposed it.
    pub actor: String,
}

#[derive(FromRow)]
struct Row {
    id: String,
    vm: String,
    disk: String,
    actor: String,
}

/// Records that a disk is exposed.
pub async fn insert(to: &mut SqliteConnection, exposed: &Exposed) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO exposures (id, vm, disk, actor) VALUES ($1, $2, $3, $4)")
        .bind(exposed.id.to_string())
        .bind(&exposed.vm)
        .bind(&exposed.disk)
        .bind(&exposed.actor)
        .execute(to)
        .await?;
    Ok(())
}

/// Records that it no longer is.
pub async fn delete(to: &mut SqliteConnection, id: Uuid) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM exposures WHERE id = $1").bind(id.to_string()).execute(to).await?;
    Ok(())
}

/// Those that are recorded, oldest first.
pub async fn list(from: &mut SqliteConnection) -> Result<Vec<Exposed>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as("SELECT id, vm, disk, actor FROM exposures ORDER BY id")
        .fetch_all(from)
        .await?;
    let exposed = rows.into_iter().map(|Row { id, vm, disk, actor }| {
        Ok(Exposed { id: parse(&id, "an exposure's id")?, vm, disk, actor })
    });
    exposed.collect()
}
