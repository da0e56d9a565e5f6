//! `vmseal datastore remount`: one host after the other, each by a request of its own.

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::datastore::DatastoreHost;
use vmseal_api::model::{Datastore, Plan};

use super::datastore_way;
use crate::arguments::Output;
use crate::print::plan;
use crate::stream::say;

/// Why no host mounts the pool anew, and how one does all the same: it may have another version of `vmseal-rbd`, or another right, by now.
const NONE_DUE: &str = "each host uses the key that the server holds, and gets to the pool as it is to (--host HOST has one mount it anew all the same)";

/// Has the hosts mount the pool anew that are to; the datastore afterwards, unless it was only a dry run, which is shown.
pub async fn run(
    server: &ServerClient,
    output: Output,
    (name, host): (&str, Option<&str>),
    dry_run: bool,
) -> anyhow::Result<Option<Datastore>> {
    let path = format!("datastores/{name}");
    let mut datastore: Datastore = server.get(&path).await?;
    let hosts = match host {
        Some(host) => vec![host.to_owned()],
        None => due(&datastore),
    };
    let of_host = |host: &str| format!("{path}/hosts/{host}/remount");
    if dry_run {
        let mut all = nothing(&datastore);
        for host in &hosts {
            let planned: Plan = server.try_post(&of_host(host), &()).await?;
            all.steps.extend(planned.steps);
            all.warnings.extend(planned.warnings);
        }
        if all.steps.is_empty() {
            all.steps.push(format!("do nothing: {NONE_DUE}"));
        }
        plan::show(output, &all)?;
        return Ok(None);
    }
    if hosts.is_empty() {
        say(format!("nothing is done: {NONE_DUE}"));
    }
    for host in &hosts {
        let asked = server.post::<Datastore>(&of_host(host), &()).await;
        datastore =
            asked.with_context(|| format!("the pool is not mounted anew on host '{host}'"))?;
        say(format!("host '{host}' has mounted the pool anew"));
    }
    Ok(Some(datastore))
}

/// The hosts whose mounts are not known to use the key that the server holds, or may be by a former way; all where it holds none.
fn due(datastore: &Datastore) -> Vec<String> {
    let is_current = |on: &&DatastoreHost| {
        on.mounted_key.as_ref().is_some_and(|it| it.current)
            && match &on.mounted {
                Some(mounted) => mounted.current,
                None => !datastore_way::may_be_former(on),
            }
    };
    let due = datastore.hosts.iter().filter(|on| !is_current(on));
    due.map(|on| on.host.clone()).collect()
}

fn nothing(datastore: &Datastore) -> Plan {
    let (kind, target) = ("datastore.remount".to_owned(), datastore.name.clone());
    Plan { kind, target, ..Plan::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vmseal_api::datastore::{DatastoreLocation, Messenger, MountedWay};

    use super::*;
    use crate::commands::datastore::details;
    use crate::commands::datastore_key::of_hosts;

    #[test]
    fn hosts_with_another_key_are_due_and_what_each_uses_is_said() {
        let on = |host: &str, mounted: Option<(&str, bool)>| {
            let pool = json!({ "monitors": "v2:10.0.0.1:3300", "user": "client.a", "pool": "vms" });
            let mounted =
                mounted.map(|(key, current)| json!({ "fingerprint": key, "current": current }));
            let location = json!({ "kind": "rbd", "path": "/ceph", "pool": pool });
            json!({ "host": host, "location": location, "mounted_key": mounted })
        };
        let hosts =
            [on("a", Some(("22222222", true))), on("b", Some(("11111111", false))), on("c", None)];
        let id = "01890a5d-ac96-774b-bcce-b302099a8057";
        let datastore = json!({ "id": id, "name": "ceph", "hosts": hosts, "key": "22222222" });
        let mut datastore: Datastore = serde_json::from_value(datastore).unwrap();
        assert_eq!(due(&datastore), ["b", "c"]);
        let mut mounted_otherwise = datastore.clone();
        let (messenger, cluster) = (Messenger::Crc, "fsid".to_owned());
        let way = MountedWay { messenger, cluster, current: false, between_osds: None };
        mounted_otherwise.hosts[0].mounted = Some(way);
        assert_eq!(due(&mounted_otherwise), ["a", "b", "c"]);
        // One that was mounted by an earlier version does not say it.
        let mut changed = datastore.clone();
        let DatastoreLocation::Rbd { pool, .. } = &mut changed.hosts[0].location else {
            unreachable!()
        };
        pool.changed = Some("2026-01-01T00:00:00Z".parse().unwrap());
        assert_eq!(due(&changed), ["a", "b", "c"]);
        let said: Vec<String> = of_hosts(&datastore).into_iter().map(|(_, line)| line).collect();
        assert_eq!(said[0], "host 'a': 22222222 (current)");
        assert!(said[1].starts_with("host 'b': 11111111, a former one, until"), "{said:?}");
        assert_eq!(said[2], "host 'c': it has not said which");
        assert!(details(&datastore)[0].1.ends_with("held by the server, 22222222"));

        // The server does not know what is in keyrings.
        datastore.key = None;
        for on in &mut datastore.hosts {
            let DatastoreLocation::Rbd { pool, .. } = &mut on.location else { unreachable!() };
            pool.keyring = Some("/etc/ceph/keyring".into());
        }
        let said: Vec<String> = details(&datastore).into_iter().map(|(_, line)| line).collect();
        let keyrings = ["host 'a': 22222222, of its keyring", "host 'b': 11111111, of its keyring"];
        assert_eq!(said[0], "client.a: /etc/ceph/keyring");
        assert_eq!(said[1..3], keyrings);
        assert_eq!(said[3], "host 'c': it has not said which");
    }
}
