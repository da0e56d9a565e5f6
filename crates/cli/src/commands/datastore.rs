//! Datastores.

use vmseal_api::client::ServerClient;
use vmseal_api::host::DatastoreLocation;
use vmseal_api::model::Datastore;
use vmseal_api::request::AddDatastore;

use super::{list, plan};
use crate::arguments::{self, Output};
use crate::print;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Datastore,
) -> anyhow::Result<()> {
    match verb {
        arguments::Datastore::List(how) => list::run(server, output, &how, "datastores").await,
        arguments::Datastore::Show(of) => {
            list::one::<Datastore>(server, output, &of, "datastores", |_| Vec::new()).await
        }
        arguments::Datastore::Add { name, host, path, dry_run } => {
            let request = AddDatastore { name, host, location: DatastoreLocation::Dir { path } };
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("datastores", &request).await?);
            }
            let datastore: Datastore = server.post("datastores", &request).await?;
            print::one(output, &datastore, &[])
        }
        arguments::Datastore::Scan(of) => {
            let scan = server.get(&format!("datastores/{}/scan", of.name)).await?;
            crate::print_scan::scan(output, &scan)
        }
        arguments::Datastore::Remove { name, dry_run } => {
            let path = format!("datastores/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}
