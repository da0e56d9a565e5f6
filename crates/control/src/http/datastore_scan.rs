//! What is on a datastore, compared with the inventory.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::datastore::DatastoreScan;
use vmseal_api::host::DatastoreSpec;

use super::App;
use super::body::Named;
use super::problem::Refusal;
use crate::store::disks;

/// Looks at what is on a datastore, and says which images belong to no VM, and which are missing. Changes
/// nothing.
#[utoipa::path(get, path = "/api/v1/datastores/{datastore}/scan", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id")),
    responses((status = 200, body = DatastoreScan), Refusal))]
pub(super) async fn scan(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<DatastoreScan>, Refusal> {
    let datastore = super::datastores::find(&app, &name).await?;
    let agent = app.hosts.connected(datastore.host)?;
    let location = datastore.location.clone();
    // What is made or deleted while the host looks is whole, or there, in one of the two.
    let before = disks::placed(&mut *app.store.read().await?).await?;
    let contents =
        agent.scan_datastore(DatastoreSpec { datastore: datastore.id, location }).await?;
    let after = disks::placed(&mut *app.store.read().await?).await?;
    Ok(Json(crate::scan::compare(&datastore, contents, &before, &after)))
}
