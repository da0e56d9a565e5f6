//! What is said of pools that were there before `datastore add --create`. They stay as they are, and may have less than new ones would.

use vmseal_api::compression::Compression;
use vmseal_api::model::{Datastore, Policy};
use vmseal_api::new_pools::NewPools;
use vmseal_api::redundancy::{PoolFacts, PoolLayout, Redundancy};
use vmseal_api::request::AddDatastore;

/// The warnings after a datastore was added whose pools were asked for, by numbers or for a policy. `policy` is that one, where it could be
/// read.
pub fn warnings(
    datastore: &Datastore,
    request: &AddDatastore,
    policy: Option<&Policy>,
) -> Vec<String> {
    let create = request.location.pool().and_then(|pool| pool.create);
    let asked = match &request.create_for_policy {
        Some(_) => policy.map(|it| (format!("policy '{}' requires", it.name), it.redundancy)),
        None => create.map(NewPools::redundancy).map(|it| ("--create asks".to_owned(), it)),
    };
    let mut warnings = Vec::new();
    if let Some((by, redundancy)) = asked {
        warnings.extend(lacking(datastore, &by, redundancy));
        let failures = u32::from(redundancy.failures);
        warnings.extend(datastore.pools.iter().filter_map(|pool| settings(pool, failures)));
    }
    let mode = create.and_then(|create| create.compression);
    warnings.extend(mode.and_then(|mode| otherwise_compressed(datastore, mode)));
    warnings
}

/// That pools have less than was asked for, and by what.
fn lacking(datastore: &Datastore, by: &str, redundancy: Redundancy) -> Option<String> {
    let (pools, datastore) = (&datastore.pools, &datastore.name);
    if pools.is_empty() {
        return Some(format!(
            "it is not known yet whether datastore '{datastore}' is as {by}: its cluster has not described its pools. See vmseal datastore show {datastore}"
        ));
    }
    let why = redundancy.lacking(pools)?;
    Some(format!(
        "datastore '{datastore}' is not as {by}: {why}. Pools that were there already stay as they are"
    ))
}

/// The settings by which a pool has less than was asked for, and the commands that change them. No command is told for what else it lacks:
/// its kind and its chunks cannot be changed, and another rule moves all that it holds.
fn settings(pool: &PoolFacts, failures: u32) -> Option<String> {
    let (size, wanted_size, min_size) = match pool.layout {
        PoolLayout::Mirroring { copies, copies_min } => {
            (copies, copies.max(failures + 1), copies_min)
        }
        PoolLayout::ErasureCoding { data, coding, parts_min } if coding >= failures => {
            (data + coding, data + coding, parts_min)
        }
        PoolLayout::ErasureCoding { .. } => return None,
    };
    let wanted_min = min_size.min(wanted_size.saturating_sub(failures));
    let name = &pool.pool;
    let (mut told, mut commands) = (Vec::new(), Vec::new());
    if size < wanted_size {
        told.push(format!("size {size}, not {wanted_size}"));
        commands.push(format!("ceph osd pool set {name} size {wanted_size}"));
    }
    if min_size > wanted_min {
        told.push(format!("min_size {min_size}, not {wanted_min}"));
    }
    if told.is_empty() {
        return None;
    }
    // Ceph sets it anew with the size.
    commands.push(format!("ceph osd pool set {name} min_size {wanted_min}"));
    let (told, commands) = (told.join(", and "), commands.join("; "));
    Some(format!("pool '{name}' has {told}. To change it: {commands}"))
}

/// That a pool of data has another compression than the one that was asked for.
fn otherwise_compressed(datastore: &Datastore, asked: Compression) -> Option<String> {
    let data = datastore.pools.last()?;
    let has = data.compression.as_deref().unwrap_or(Compression::None.name());
    let (pool, asked) = (&data.pool, asked.name());
    (has != asked).then(|| {
        format!(
            "pool '{pool}' was there already and keeps its compression_mode ({has}, not {asked}). To change it: ceph osd pool set {pool} compression_mode {asked}"
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const ID: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

    fn datastore(pools: &[(&str, Value)]) -> Datastore {
        let facts = |(pool, layout): &(&str, Value)| json!({ "pool": pool, "layout": layout, "failure_domain": "host" });
        let pools: Vec<_> = pools.iter().map(facts).collect();
        let datastore = json!({ "id": ID, "name": "ceph", "hosts": [], "pools": pools });
        serde_json::from_value(datastore).unwrap()
    }

    fn copies(size: u32, min_size: u32) -> Value {
        json!({ "is": "mirroring", "copies": size, "copies_min": min_size })
    }

    fn chunks(coding: u32, min_size: u32) -> Value {
        json!({ "is": "erasure_coding", "data": 4, "coding": coding, "parts_min": min_size })
    }

    fn policy(failures: u8) -> Policy {
        let redundancy = json!({ "failures": failures });
        let policy =
            json!({ "id": ID, "name": "gold", "encryption": true, "redundancy": redundancy });
        serde_json::from_value(policy).unwrap()
    }

    fn request(create: Option<Value>, policy: Option<&str>) -> AddDatastore {
        let mut pool = json!({ "monitors": "v2:10.0.0.1:3300", "user": "client.a", "pool": "vms" });
        if let Some(create) = create {
            pool["create"] = create;
        }
        let location = json!({ "kind": "rbd", "path": "/ceph", "pool": pool });
        let mut request = json!({ "name": "ceph", "host": "h1", "location": location });
        if let Some(policy) = policy {
            request["create_for_policy"] = policy.into();
        }
        serde_json::from_value(request).unwrap()
    }

    #[test]
    fn pools_that_have_less_than_a_policy_requires_are_told() {
        let asked = request(None, Some("gold"));
        let mirrored = datastore(&[("vms", copies(3, 2))]);
        assert_eq!(warnings(&mirrored, &asked, Some(&policy(1))), [""; 0]);
        assert_eq!(warnings(&mirrored, &asked, None), [""; 0], "the policy is gone");
        let told = warnings(&mirrored, &asked, Some(&policy(2)));
        let begins = "datastore 'ceph' is not as policy 'gold' requires: pool 'vms' has";
        assert!(told.len() == 2 && told[0].starts_with(begins), "{told:?}");
        assert_eq!(
            told[1],
            "pool 'vms' has min_size 2, not 1. To change it: ceph osd pool set vms min_size 1"
        );
        let told = warnings(&datastore(&[]), &asked, Some(&policy(2)));
        assert!(
            told[0].contains("not known yet") && told[0].contains("datastore show ceph"),
            "{told:?}"
        );
    }

    #[test]
    fn pools_that_have_less_than_numbers_ask_for_are_told_with_the_commands() {
        let asked = request(Some(json!({ "failures": 2, "layout": "erasure_coding" })), None);
        let told = |names: Value, data: Value| {
            warnings(&datastore(&[("names", names), ("data", data)]), &asked, None)
        };
        assert_eq!(told(copies(3, 1), chunks(2, 4)), [""; 0]);
        assert_eq!(told(copies(4, 2), chunks(3, 5)), [""; 0], "they have more");
        let said = told(copies(2, 2), chunks(2, 5));
        assert!(said[0].starts_with("datastore 'ceph' is not as --create asks"), "{said:?}");
        let commands = "ceph osd pool set names size 3; ceph osd pool set names min_size 1";
        let names = format!(
            "pool 'names' has size 2, not 3, and min_size 2, not 1. To change it: {commands}"
        );
        let data =
            "pool 'data' has min_size 5, not 4. To change it: ceph osd pool set data min_size 4";
        assert_eq!(said[1..], [names.as_str(), data]);
        // With another size Ceph changes what was right.
        let said = told(copies(2, 1), chunks(2, 4));
        let names = format!("pool 'names' has size 2, not 3. To change it: {commands}");
        assert_eq!(said[1..], [names]);
        // Chunks cannot be changed.
        assert_eq!(told(copies(3, 1), chunks(1, 5)).len(), 1);
    }

    #[test]
    fn another_compression_than_was_asked_for_is_told_with_the_command() {
        let with = |mode: &str| {
            let create = json!({ "failures": 1, "compression": mode });
            warnings(&datastore(&[("vms", copies(2, 1))]), &request(Some(create), None), None)
        };
        assert_eq!(with("none"), [""; 0]);
        let change =
            "(none, not force). To change it: ceph osd pool set vms compression_mode force";
        let said = with("force");
        assert!(said.len() == 1 && said[0].ends_with(change), "{said:?}");
    }
}
