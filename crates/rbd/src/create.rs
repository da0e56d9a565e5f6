//! Makes the pools of a new datastore, where the user may do that.
//!
//! ```text
//!  mirroring        one pool of FAILURES + 1 copies
//!  erasure coding   a pool of FAILURES + 1 copies for names and headers, and one of k + FAILURES parts for data
//! ```
//! Each goes on with what is left after that many failures, as it was asked to (`min_size`). Copies and parts are kept apart on what the
//! cluster's usual rule says, or what was asked for. What is there stays as it is.

use std::collections::BTreeSet;
use std::io;

use serde_json::{Value, json};
use vmseal_api::new_pools::NewPools;
use vmseal_api::redundancy::Layout;

use crate::cluster::Cluster;
use crate::pools::failure_domain;

/// Placement groups that a pool has at first; the cluster adds others as it fills (`pg_autoscale_mode`).
const GROUPS: u32 = 32;

/// The parts of data where one is computed from them, which three domains can take, and where more are: those of vSphere's RAID 6.
const PARTS_BESIDE_ONE: u32 = 2;
const PARTS_BESIDE_MORE: u32 = 4;

/// The rule that replicated pools have unless told otherwise.
const USUAL_RULE: u64 = 0;

/// Why pools were not made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A pool that outlives nothing.
    #[error("pools are made to outlive at least one failure: say --create 1 or more")]
    NoRedundancy,
    /// There is no name for the pool of data.
    #[error("erasure-coded data has a pool of its own: name it with --data-pool")]
    NoDataPool,
    /// There is a name for one that is not to be.
    #[error(
        "a mirrored pool has its data itself: leave --data-pool away, or ask for erasure-coding"
    )]
    DataPool,
    /// Too few OSDs, hosts or racks.
    #[error("that takes {needed} {domain}s, and the cluster has {there}")]
    TooSmall {
        /// How many.
        needed: u32,
        /// Of what.
        domain: String,
        /// How many there are.
        there: usize,
    },
    /// The user may not.
    #[error(
        "the user may not make pools ('{command}'). Name a user that may, such as client.admin, with its keyring, or make the pool with ceph osd pool create"
    )]
    Forbidden {
        /// What it may not do.
        command: String,
    },
    /// The monitors.
    #[error("the monitors have refused '{command}': {error}")]
    Refused {
        /// What they were asked for.
        command: String,
        /// Why not.
        error: io::Error,
    },
}

/// Makes the pools that are not there.
///
/// # Errors
/// [`CreateError`]. What was made before it stays; asked again, the rest is made.
pub fn create(
    cluster: &Cluster,
    pool: &str,
    data_pool: Option<&str>,
    asked: NewPools,
) -> Result<(), CreateError> {
    let failures = u32::from(asked.failures);
    if failures == 0 {
        return Err(CreateError::NoRedundancy);
    }
    let coded = asked.layout == Some(Layout::ErasureCoding);
    let data_pool = match (coded, data_pool) {
        (true, None) => return Err(CreateError::NoDataPool),
        (false, Some(_)) => return Err(CreateError::DataPool),
        (_, named) => named,
    };
    let dump = ask(cluster, &json!({ "prefix": "osd dump" }))?;
    let is_there = |name: &str| {
        let mut pools = dump["pools"].as_array().into_iter().flatten();
        pools.any(|pool| pool["pool_name"] == name)
    };
    let rules = ask(cluster, &json!({ "prefix": "osd crush rule dump" }))?;
    let usual = failure_domain(&rules, USUAL_RULE).unwrap_or_else(|| "host".to_owned());
    let domain =
        asked.failure_domain.map_or_else(|| usual.clone(), |domain| domain.name().to_owned());
    let parts = if failures == 1 { PARTS_BESIDE_ONE } else { PARTS_BESIDE_MORE };
    let needed = if coded { parts + failures } else { failures + 1 };
    let there = domains(&ask(cluster, &json!({ "prefix": "osd tree" }))?, &domain);
    if there < needed as usize {
        return Err(CreateError::TooSmall { needed, domain, there });
    }
    if !is_there(pool) {
        let mut how = json!({ "pool_type": "replicated" });
        if domain != usual {
            let rule = rule(&rules, &domain);
            ask(cluster, &rule)?;
            how["rule"] = rule["name"].clone();
        }
        make(cluster, pool, &how)?;
        set(cluster, pool, "size", &(failures + 1).to_string())?;
        set(cluster, pool, "min_size", "1")?;
        enable(cluster, pool)?;
    }
    if let Some(data) = data_pool.filter(|data| !is_there(data)) {
        let profile = format!("vmseal-{parts}-{failures}-{domain}");
        let values = [
            format!("k={parts}"),
            format!("m={failures}"),
            format!("crush-failure-domain={domain}"),
        ];
        let prefix = "osd erasure-code-profile set";
        ask(cluster, &json!({ "prefix": prefix, "name": profile, "profile": values }))?;
        make(cluster, data, &json!({ "pool_type": "erasure", "erasure_code_profile": profile }))?;
        // Without it only whole objects can be written.
        set(cluster, data, "allow_ec_overwrites", "true")?;
        set(cluster, data, "min_size", &parts.to_string())?;
        enable(cluster, data)?;
    }
    Ok(())
}

/// Makes the rule that keeps copies apart on something else than the usual one does, on the same OSDs. One that is there stays.
fn rule(rules: &Value, domain: &str) -> Value {
    let usual = rules.as_array().into_iter().flatten().find(|one| one["rule_id"] == USUAL_RULE);
    let steps = usual.and_then(|rule| rule["steps"].as_array()).into_iter().flatten();
    let mut taken = steps.filter(|step| step["op"] == "take");
    let taken = taken.find_map(|step| step["item_name"].as_str()).unwrap_or("default");
    // Of a class of OSDs: `default~ssd`.
    let (root, class) = taken.split_once('~').map_or((taken, None), |(it, of)| (it, Some(of)));
    let mut rule = json!({
        "prefix": "osd crush rule create-replicated",
        "name": format!("vmseal-{domain}"),
        "root": root,
        "type": domain,
    });
    if let Some(class) = class {
        rule["class"] = class.into();
    }
    rule
}

fn make(cluster: &Cluster, pool: &str, how: &Value) -> Result<(), CreateError> {
    let mut command = json!({ "prefix": "osd pool create", "pool": pool, "pg_num": GROUPS });
    if let (Some(command), Some(how)) = (command.as_object_mut(), how.as_object()) {
        command.extend(how.clone());
    }
    ask(cluster, &command)?;
    tracing::info!(pool, "a pool is made");
    Ok(())
}

fn set(cluster: &Cluster, pool: &str, variable: &str, value: &str) -> Result<(), CreateError> {
    let prefix = "osd pool set";
    ask(cluster, &json!({ "prefix": prefix, "pool": pool, "var": variable, "val": value }))
        .map(drop)
}

/// What `rbd pool init` does, and the cluster warns of a pool where it was not done.
fn enable(cluster: &Cluster, pool: &str) -> Result<(), CreateError> {
    ask(cluster, &json!({ "prefix": "osd pool application enable", "pool": pool, "app": "rbd" }))
        .map(drop)
}

/// Asks a monitor; returns its answer, or nothing where it has none.
fn ask(cluster: &Cluster, command: &Value) -> Result<Value, CreateError> {
    let mut command = command.clone();
    command["format"] = "json".into();
    let answer = cluster.command(&command.to_string()).map_err(|error| {
        let command = command["prefix"].as_str().unwrap_or_default().to_owned();
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => CreateError::Forbidden { command },
            _ => CreateError::Refused { command, error },
        }
    })?;
    Ok(serde_json::from_slice(&answer).unwrap_or_default())
}

/// How many there are of what fails as one, with an OSD each.
fn domains(tree: &Value, domain: &str) -> usize {
    let nodes = || tree["nodes"].as_array().into_iter().flatten();
    let osds: BTreeSet<i64> =
        nodes().filter(|it| it["type"] == "osd").filter_map(|it| it["id"].as_i64()).collect();
    if domain == "osd" {
        return osds.len();
    }
    let has_osd = |node: &&Value| {
        let (mut todo, mut seen) = (vec![(*node).clone()], 0);
        while let Some(node) = todo.pop() {
            seen += 1;
            let children = node["children"].as_array().into_iter().flatten();
            for child in children.filter_map(Value::as_i64) {
                if osds.contains(&child) {
                    return true;
                }
                // A tree that is none ends, too.
                if seen <= nodes().count() {
                    todo.extend(nodes().find(|it| it["id"] == child).cloned());
                }
            }
        }
        false
    };
    nodes().filter(|it| it["type"] == domain).filter(has_osd).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_of_another_domain_takes_the_osds_of_the_usual_one() {
        let usual = |item: &str| {
            json!([{ "rule_id": 1 }, { "rule_id": 0, "steps": [
                { "op": "set_choose_tries", "num": 100 },
                { "op": "take", "item": -1, "item_name": item },
                { "op": "chooseleaf_firstn", "num": 0, "type": "host" }] }])
        };
        let made = rule(&usual("default"), "rack");
        assert_eq!(made["name"], "vmseal-rack");
        assert_eq!((&made["root"], &made["type"]), (&json!("default"), &json!("rack")));
        assert_eq!(made["class"], Value::Null);
        let made = rule(&usual("fast~ssd"), "osd");
        assert_eq!((&made["root"], &made["class"]), (&json!("fast"), &json!("ssd")));
        assert_eq!(rule(&Value::Null, "osd")["root"], "default");
    }

    #[test]
    fn what_fails_as_one_is_counted_where_it_has_an_osd() {
        let tree = json!({ "nodes": [
            { "id": -1, "type": "root", "children": [-2, -3] },
            { "id": -2, "type": "rack", "children": [-4, -5] },
            { "id": -3, "type": "rack", "children": [-6] },
            { "id": -4, "type": "host", "children": [0, 1] },
            { "id": -5, "type": "host", "children": [2] },
            { "id": -6, "type": "host", "children": [] },
            { "id": 0, "type": "osd" }, { "id": 1, "type": "osd" }, { "id": 2, "type": "osd" },
        ] });
        for (domain, there) in [("osd", 3), ("host", 2), ("rack", 1), ("row", 0)] {
            assert_eq!(domains(&tree, domain), there, "{domain}");
        }
        let ring = json!({ "nodes": [{ "id": -1, "type": "host", "children": [-1] }] });
        assert_eq!(domains(&ring, "host"), 0);
        assert_eq!(domains(&Value::Null, "osd"), 0);
    }
}
