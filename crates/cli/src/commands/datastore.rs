//! Datastores.

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::host::DatastoreLocation;
use vmseal_api::model::Datastore;
use vmseal_api::redundancy::PoolFacts;
use vmseal_api::request::{AddDatastore, ShareDatastore};

use super::{adopt, list};
use crate::arguments::{self, Output};
use crate::print::{self, plan, scan};

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Datastore,
) -> anyhow::Result<()> {
    match verb {
        arguments::Datastore::List(how) => list::run(server, output, &how, "datastores").await,
        arguments::Datastore::Show(of) => {
            list::one::<Datastore>(server, output, &of, "datastores", pools).await
        }
        arguments::Datastore::Add { name, host, path, pool, existing, dry_run } => {
            let dir = path.clone().map(|path| DatastoreLocation::Dir { path });
            let location = pool.location(&name, path).or(dir);
            let location = location.context("give --path or --pool")?;
            let request = AddDatastore { name, host, location, existing };
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("datastores", &request).await?);
            }
            let datastore: Datastore = server.post("datastores", &request).await?;
            print::one(output, &datastore, &[])
        }
        arguments::Datastore::Adopt(options) => adopt::run(server, output, *options).await,
        arguments::Datastore::Scan(of) => {
            let found = server.get(&format!("datastores/{}/scan", of.name)).await?;
            scan::show(output, &found)
        }
        arguments::Datastore::Share { name, host, path, dry_run } => {
            let location = path.map(|path| DatastoreLocation::Dir { path });
            let request = ShareDatastore { host, location };
            let hosts = format!("datastores/{name}/hosts");
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&hosts, &request).await?);
            }
            let datastore: Datastore = server.post(&hosts, &request).await?;
            print::one(output, &datastore, &[])
        }
        arguments::Datastore::Unshare { name, host, dry_run } => {
            let path = format!("datastores/{name}/hosts/{host}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
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

/// How the cluster keeps what is stored in each pool.
fn pools(datastore: &Datastore) -> Vec<(&'static str, String)> {
    let line = |pool: &PoolFacts| ("POOL", format!("{}: {pool}", pool.pool));
    datastore.pools.iter().map(line).collect()
}
