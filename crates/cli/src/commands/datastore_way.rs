//! What `datastore set` changes beside a key alone, above all how hosts get to a pool of Ceph, and which host uses that already.

use std::path::Path;

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::datastore::{BetweenOsds, DatastoreHost, RbdPool, SetDatastore};
use vmseal_api::model::{Datastore, RekeyedDatastore};

use super::datastore_key;
use crate::arguments::Output;
use crate::print::plan;
use crate::stream::say;

/// Changes what is given, and with a file its user's key, which the server holds; the datastore afterwards, unless it was only a dry run,
/// which is shown.
pub async fn set(
    server: &ServerClient,
    output: Output,
    (name, change, key_file): (&str, SetDatastore, Option<&Path>),
    dry_run: bool,
) -> anyhow::Result<Option<Datastore>> {
    let path = format!("datastores/{name}");
    let key = match key_file {
        Some(file) => {
            let user = user_of(server, &path, &change).await?;
            Some(datastore_key::sealed(server, file, &user, name).await?)
        }
        None => None,
    };
    let request = SetDatastore { key, ..change };
    if dry_run {
        plan::show(output, &server.try_patch(&path, &request).await?)?;
        return Ok(None);
    }
    let changed: RekeyedDatastore = server.patch(&path, &request).await?;
    for warning in &changed.warnings {
        say(format!("warning: {warning}"));
    }
    Ok(Some(changed.datastore))
}

/// Whose key is read: the new user's, else that of the datastore.
async fn user_of(
    server: &ServerClient,
    path: &str,
    change: &SetDatastore,
) -> anyhow::Result<String> {
    if let Some(user) = &change.user {
        return Ok(user.clone());
    }
    let datastore: Datastore = server.get(path).await?;
    let user = datastore.hosts.iter().find_map(|on| on.location.pool()).map(|it| it.user.clone());
    user.with_context(|| format!("datastore '{}' is no pool of Ceph", datastore.name))
}

/// Whether a mount of which it is not said by which way it is may be by a former one: what serves it is of an earlier version, or the host was
/// not asked yet.
pub fn may_be_former(on: &DatastoreHost) -> bool {
    on.mounted.is_none() && on.location.pool().is_some_and(|pool| pool.changed.is_some())
}

/// The way to the pool, and the hosts that have it mounted by another one.
pub fn of_hosts(datastore: &Datastore) -> Vec<(&'static str, String)> {
    let way = |pool: &RbdPool| {
        let RbdPool { user, monitors, messenger, .. } = pool;
        ("WAY", format!("{user} by {monitors} with messenger '{}'", messenger.name()))
    };
    let pools = datastore.hosts.iter().filter_map(|on| on.location.pool());
    let mut lines: Vec<_> = pools.map(way).collect();
    lines.dedup();
    let name = &datastore.name;
    let former = |on: &DatastoreHost| {
        if may_be_former(on) {
            let host = &on.host;
            let line = format!(
                "host '{host}': it has not said by which one it has the pool mounted. A vmseal-rbd of an earlier version does not say it: vmseal datastore remount {name} --host {host}; guests wait for a second or two then"
            );
            return Some(("WAY", line));
        }
        let mounted = on.mounted.as_ref().filter(|it| !it.current)?;
        let (host, messenger) = (&on.host, mounted.messenger.name());
        let line = format!(
            "host '{host}': mounted by a former one, with messenger '{messenger}', until vmseal datastore remount {name} --host {host}; guests wait for a second or two then"
        );
        Some(("WAY", line))
    };
    lines.extend(datastore.hosts.iter().filter_map(former));
    lines
}

/// How data goes between the OSDs of the cluster. Hosts that mounted the pool before this was changed may still say what was: the weaker
/// answer is shown.
pub fn between_osds(datastore: &Datastore) -> Option<(&'static str, String)> {
    let mounted = datastore.hosts.iter().filter_map(|on| on.mounted.as_ref());
    let told: Vec<_> = mounted.filter_map(|it| it.between_osds).collect();
    let weaker = told.iter().find(|it| **it == BetweenOsds::MayBeClear).or(told.first())?;
    Some(("OSDS", weaker.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn hosts_that_have_a_pool_mounted_by_a_former_way_are_named() {
        let on = |host: &str, mounted: Option<(&str, bool)>| {
            let pool = json!({ "monitors": "v2:10.0.0.1:3300", "user": "client.a", "pool": "vms" });
            let mounted = mounted.map(|(messenger, current)| {
                json!({ "messenger": messenger, "cluster": "fsid", "current": current })
            });
            let location = json!({ "kind": "rbd", "path": "/ceph", "pool": pool });
            json!({ "host": host, "location": location, "mounted": mounted })
        };
        let hosts = [on("a", Some(("secure", true))), on("b", Some(("crc", false))), on("c", None)];
        let id = "01890a5d-ac96-774b-bcce-b302099a8057";
        let mut datastore = json!({ "id": id, "name": "ceph", "hosts": hosts });
        let said = of_hosts(&serde_json::from_value(datastore.clone()).unwrap());
        let said: Vec<String> = said.into_iter().map(|(_, line)| line).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert_eq!(said[0], "client.a by v2:10.0.0.1:3300 with messenger 'secure'");
        assert!(said[1].starts_with("host 'b': mounted by a former one, with messenger 'crc'"));
        assert!(said[1].contains("vmseal datastore remount ceph --host b"), "{said:?}");

        datastore["hosts"][2]["location"]["pool"]["changed"] = json!("2026-01-01T00:00:00Z");
        let said = of_hosts(&serde_json::from_value(datastore).unwrap());
        let line = said.into_iter().map(|(_, line)| line).find(|it| it.contains("'c'")).unwrap();
        assert!(line.contains("has not said by which one"), "{line}");
    }

    #[test]
    fn of_hosts_that_disagree_about_the_osds_the_weaker_one_counts() {
        let said = |told: &[Option<&str>]| {
            let on = |told: &Option<&str>| {
                let mounted = json!({
                    "messenger": "secure", "cluster": "fsid", "current": true, "between_osds": told,
                });
                let pool =
                    json!({ "monitors": "v2:10.0.0.1:3300", "user": "client.a", "pool": "vms" });
                let location = json!({ "kind": "rbd", "path": "/ceph", "pool": pool });
                json!({ "host": "a", "location": location, "mounted": mounted })
            };
            let hosts: Vec<_> = told.iter().map(on).collect();
            let id = "01890a5d-ac96-774b-bcce-b302099a8057";
            let datastore = json!({ "id": id, "name": "ceph", "hosts": hosts });
            between_osds(&serde_json::from_value(datastore).unwrap()).map(|(_, line)| line)
        };
        let secure = said(&[None, Some("secure")]).unwrap();
        assert!(secure.contains("are to be encrypted"), "{secure}");
        let clear = said(&[Some("secure"), Some("may_be_clear")]).unwrap();
        assert!(clear.contains("may be in the clear"), "{clear}");
        assert_eq!(said(&[None]), None, "an earlier version does not say it");
    }
}
