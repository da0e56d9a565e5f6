//! Datastores.

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::datastore::{RbdPool, SetDatastore};
use vmseal_api::host::DatastoreLocation;
use vmseal_api::model::{Datastore, Policy};
use vmseal_api::redundancy::PoolFacts;
use vmseal_api::request::{AddDatastore, ShareDatastore};

use super::{adopt, datastore_key, datastore_remount, datastore_way, existing_pools, list};
use crate::arguments::{self, Output};
use crate::print::{self, plan, scan};
use crate::stream::say;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Datastore,
) -> anyhow::Result<()> {
    match verb {
        arguments::Datastore::List(how) => list::run(server, output, &how, "datastores").await,
        arguments::Datastore::Show(of) => {
            list::one::<Datastore>(server, output, &of, "datastores", details).await
        }
        arguments::Datastore::Add { name, host, path, pool, existing, dry_run } => {
            let (key_file, user) = (pool.key_file.clone(), pool.user.clone());
            let osd_encryption = pool.osd_encryption;
            let create_for_policy = pool.create_for_policy.clone();
            let dir = path.clone().map(|path| DatastoreLocation::Dir { path });
            let location = pool.location(&name, path).or(dir);
            let location = location.context("give --path or --pool")?;
            let key = match key_file {
                Some(file) => Some(datastore_key::sealed(server, &file, &user, &name).await?),
                None => None,
            };
            let request = AddDatastore {
                name,
                host,
                location,
                existing,
                key,
                osd_encryption,
                create_for_policy,
            };
            add(server, output, &request, dry_run.dry_run).await
        }
        arguments::Datastore::Set {
            name,
            monitors,
            user,
            messenger,
            keyring,
            key_file,
            force,
            osd_encryption,
            dry_run,
        } => {
            let key = None;
            let way = SetDatastore { osd_encryption, monitors, user, messenger, keyring, key };
            if way != SetDatastore::default() {
                let way = (name.as_str(), way, key_file.as_deref());
                let now = datastore_way::set(server, output, way, dry_run.dry_run).await?;
                return now.map_or(Ok(()), |it| print::one(output, &it, &details(&it)));
            }
            let key_file = key_file.context("say what to change")?;
            let key = (name.as_str(), key_file.as_path(), force);
            datastore_key::set(server, output, key, dry_run.dry_run).await
        }
        arguments::Datastore::Remount { name, host, dry_run } => {
            let which = (name.as_str(), host.as_deref());
            let now = datastore_remount::run(server, output, which, dry_run.dry_run).await?;
            now.map_or(Ok(()), |it| print::one(output, &it, &details(&it)))
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

/// Adds a datastore, or plans it, and warns of what its new pools risk or lack.
async fn add(
    server: &ServerClient,
    output: Output,
    request: &AddDatastore,
    dry_run: bool,
) -> anyhow::Result<()> {
    if dry_run {
        return plan::show(output, &server.try_post("datastores", request).await?);
    }
    let by_numbers = request.location.pool().is_some_and(|pool| pool.create.is_some());
    // Only a plan says what new pools risk.
    if by_numbers || request.create_for_policy.is_some() {
        plan::warn(&server.try_post("datastores", request).await?);
    }
    let datastore: Datastore = server.post("datastores", request).await?;
    let policy = match &request.create_for_policy {
        // The datastore is added: that the policy cannot be read now is no failure of that.
        Some(policy) => server.get::<Policy>(&format!("policies/{policy}")).await.ok(),
        None => None,
    };
    for what in existing_pools::warnings(&datastore, request, policy.as_ref()) {
        say(format!("warning: {what}"));
    }
    print::one(output, &datastore, &[])
}

/// Where the key of each pool's user is, which one each host uses, how hosts get to the pool, how the cluster keeps what is stored in each
/// pool, that it lacks room, whether its OSDs are encrypted, and how data goes between them.
pub fn details(datastore: &Datastore) -> Vec<(&'static str, String)> {
    let key = |pool: &RbdPool| match (&pool.keyring, &datastore.key) {
        (Some(keyring), _) => format!("{}: {}", pool.user, keyring.display()),
        (None, Some(key)) => format!("{}: held by the server, {key}", pool.user),
        (None, None) => format!("{}: held by the server", pool.user),
    };
    let pools = datastore.hosts.iter().filter_map(|on| on.location.pool());
    let mut lines: Vec<_> = pools.map(|pool| ("KEY", key(pool))).collect();
    lines.dedup();
    lines.extend(datastore_key::of_hosts(datastore));
    lines.extend(datastore_way::of_hosts(datastore));
    let line = |pool: &PoolFacts| ("POOL", format!("{}: {pool}", pool.pool));
    lines.extend(datastore.pools.iter().map(line));
    let lacks = datastore.pools.iter().filter_map(PoolFacts::lack_of_room);
    lines.extend(lacks.map(|lack| ("POOL", lack)));
    lines.extend(datastore.osd_encryption.map(|facts| ("OSDS", facts.to_string())));
    lines.extend(datastore_way::between_osds(datastore));
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pool_that_lacks_room_is_shown_with_what_may_be_done() {
        let pool = json!({ "monitors": "v2:10.0.0.1:3300", "user": "client.a", "pool": "vms" });
        let location = json!({ "kind": "rbd", "path": "/ceph", "pool": pool });
        let hosts = [json!({ "host": "a", "location": location })];
        let id = "01890a5d-ac96-774b-bcce-b302099a8057";
        let said = |fullness: Option<&str>| {
            let layout = json!({ "is": "mirroring", "copies": 3, "copies_min": 2 });
            let facts = json!({
                "pool": "vms", "layout": layout, "failure_domain": "host", "fullness": fullness,
            });
            let datastore = json!({ "id": id, "name": "ceph", "hosts": hosts, "pools": [facts] });
            let said = details(&serde_json::from_value(datastore).unwrap()).into_iter();
            said.filter(|(title, _)| *title == "POOL").map(|(_, line)| line).collect::<Vec<_>>()
        };
        assert_eq!(said(None).len(), 1, "it has room");
        let lines = said(Some("quota_used_up"));
        assert!(lines[0].starts_with("vms: mirroring, 3 copies"), "{lines:?}");
        assert!(lines[1].starts_with("pool 'vms' is full: its quota is used up"), "{lines:?}");
    }
}
