//! Datastores.

use vmseal_api::client::ServerClient;
use vmseal_api::host::DatastoreLocation;
use vmseal_api::model::Datastore;
use vmseal_api::request::AddDatastore;

use super::list;
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
            let datastore: Datastore = server.get(&format!("datastores/{}", of.name)).await?;
            print::one(output, &datastore, &[])
        }
        arguments::Datastore::Add { name, host, path } => {
            let request = AddDatastore { name, host, location: DatastoreLocation::Dir { path } };
            let datastore: Datastore = server.post("datastores", &request).await?;
            print::one(output, &datastore, &[])
        }
        arguments::Datastore::Scan(of) => {
            let scan = server.get(&format!("datastores/{}/scan", of.name)).await?;
            crate::print_scan::scan(output, &scan)
        }
        arguments::Datastore::Remove(of) => {
            Ok(server.delete(&format!("datastores/{}", of.name)).await?)
        }
    }
}
