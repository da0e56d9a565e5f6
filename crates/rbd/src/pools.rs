//! How a cluster keeps what is stored in its pools, and what room they have, as its monitors describe it.

use std::io;

use serde_json::Value;
use vmseal_api::pool_fullness::PoolFullness;
use vmseal_api::redundancy::{PoolFacts, PoolLayout};

use crate::cluster::Cluster;

/// The kinds of pools, as `osd dump` numbers them (`pg_pool_t`).
pub(crate) const REPLICATED: u64 = 1;
pub(crate) const ERASURE_CODED: u64 = 3;

/// How the cluster keeps what is stored in these pools.
///
/// # Errors
/// The monitors'; `NotFound` for a pool that is not there any more.
pub fn facts(cluster: &Cluster, pools: &[&str]) -> io::Result<Vec<PoolFacts>> {
    let ask =
        |command| -> io::Result<Value> { Ok(serde_json::from_slice(&cluster.command(command)?)?) };
    let dump = ask(r#"{"prefix":"osd dump","format":"json"}"#)?;
    let rules = ask(r#"{"prefix":"osd crush rule dump","format":"json"}"#)?;
    let of = |pool: &&str| {
        of(&dump, &rules, pool).ok_or_else(|| {
            let what = format!("the monitors do not describe the pool '{pool}'");
            io::Error::new(io::ErrorKind::NotFound, what)
        })
    };
    pools.iter().map(of).collect()
}

/// The room of a pool, in bytes: what it holds, and what its OSDs and its quota can take yet.
///
/// # Errors
/// The monitors'; `NotFound` for a pool that is not there any more.
pub fn room(cluster: &Cluster, pool: &str) -> io::Result<(u64, u64)> {
    let answer = cluster.command(r#"{"prefix":"df","detail":"detail","format":"json"}"#)?;
    let answer: Value = serde_json::from_slice(&answer)?;
    room_of(&answer, pool).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// What the monitors' answer says of the room of a pool.
fn room_of(df: &Value, name: &str) -> Option<(u64, u64)> {
    let pool = df["pools"].as_array()?.iter().find(|pool| pool["name"] == name)?;
    let number = |field: &str| pool["stats"][field].as_u64().unwrap_or(0);
    let (stored, free) = (number("stored"), number("max_avail"));
    let left = match number("quota_bytes") {
        // It has none.
        0 => free,
        quota => quota.saturating_sub(stored).min(free),
    };
    Some((stored, left))
}

/// What the monitors' answers say of a pool.
fn of(dump: &Value, rules: &Value, name: &str) -> Option<PoolFacts> {
    let pool = dump["pools"].as_array()?.iter().find(|pool| pool["pool_name"] == name)?;
    let number = |field: &str| pool[field].as_u64().and_then(|number| u32::try_from(number).ok());
    let layout = match pool["type"].as_u64()? {
        REPLICATED => {
            PoolLayout::Mirroring { copies: number("size")?, copies_min: number("min_size")? }
        }
        ERASURE_CODED => {
            let profile = &dump["erasure_code_profiles"][pool["erasure_code_profile"].as_str()?];
            let part = |field: &str| profile[field].as_str()?.parse().ok();
            PoolLayout::ErasureCoding {
                data: part("k")?,
                coding: part("m")?,
                parts_min: number("min_size")?,
            }
        }
        _ => return None,
    };
    let compression = pool["options"]["compression_mode"].as_str();
    let compression = compression.filter(|mode| *mode != "none").map(str::to_owned);
    let failure_domain = failure_domain(rules, pool["crush_rule"].as_u64()?)?;
    let fullness = fullness(dump, pool);
    Some(PoolFacts { pool: name.to_owned(), layout, failure_domain, compression, fullness })
}

/// The mark of a pool that lacks room: a flag of its own, or of the whole cluster.
fn fullness(dump: &Value, pool: &Value) -> Option<PoolFullness> {
    let flags = [&pool["flags_names"], &dump["flags"]].into_iter().filter_map(Value::as_str);
    let flags: Vec<&str> = flags.flat_map(|names| names.split(',')).collect();
    let has = |name: &str| flags.contains(&name);
    // A pool whose quota is used up is marked as full as well.
    if has("full_quota") {
        Some(PoolFullness::QuotaUsedUp)
    } else if has("full") {
        Some(PoolFullness::Full)
    } else if has("nearfull") || has("backfillfull") {
        Some(PoolFullness::NearlyFull)
    } else {
        None
    }
}

/// Where a rule puts each copy in another one.
pub(crate) fn failure_domain(rules: &Value, rule: u64) -> Option<String> {
    let rule = rules.as_array()?.iter().find(|one| one["rule_id"] == rule)?;
    let steps = rule["steps"].as_array()?.iter().rev();
    let mut chosen = steps.filter_map(|step| step["type"].as_str());
    chosen.next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What a cluster of Ceph 16.2 answers, without what is not read.
    const DUMP: &str = r#"{"pools": [
        {"pool": 1, "pool_name": "device_health_metrics", "type": 1, "size": 3, "min_size": 2, "crush_rule": 0, "options": {}},
        {"pool": 2, "pool_name": "vms", "type": 1, "size": 3, "min_size": 2, "crush_rule": 0, "erasure_code_profile": "",
         "options": {"compression_mode": "aggressive"}},
        {"pool": 3, "pool_name": "coded", "type": 3, "size": 3, "min_size": 2, "crush_rule": 1,
         "erasure_code_profile": "coded", "options": {"compression_mode": "none"}}],
        "erasure_code_profiles": {"default": {"k": "2", "m": "2"}, "coded": {"crush-failure-domain": "osd", "k": "2", "m": "1"}}}"#;
    const RULES: &str = r#"[
        {"rule_id": 0, "rule_name": "replicated_rule", "type": 1, "steps": [
            {"op": "take", "item": -1, "item_name": "default"},
            {"op": "chooseleaf_firstn", "num": 0, "type": "host"}, {"op": "emit"}]},
        {"rule_id": 1, "rule_name": "coded", "type": 3, "steps": [
            {"op": "set_chooseleaf_tries", "num": 5}, {"op": "set_choose_tries", "num": 100},
            {"op": "take", "item": -1, "item_name": "default"},
            {"op": "choose_indep", "num": 0, "type": "osd"}, {"op": "emit"}]}]"#;

    fn read(pool: &str) -> Option<PoolFacts> {
        let (dump, rules) =
            (serde_json::from_str(DUMP).unwrap(), serde_json::from_str(RULES).unwrap());
        of(&dump, &rules, pool)
    }

    #[test]
    fn monitors_describe_copies_and_parts() {
        let mirrored = read("vms").unwrap();
        assert_eq!(mirrored.layout, PoolLayout::Mirroring { copies: 3, copies_min: 2 });
        assert_eq!(mirrored.failure_domain, "host");
        assert_eq!(mirrored.compression.as_deref(), Some("aggressive"));
        let coded = read("coded").unwrap();
        assert_eq!(coded.layout, PoolLayout::ErasureCoding { data: 2, coding: 1, parts_min: 2 });
        assert_eq!((coded.failure_domain.as_str(), coded.compression), ("osd", None));
        assert_eq!(read("other"), None);
    }

    #[test]
    fn flags_say_that_a_pool_lacks_room() {
        let told = |flags: &str, of_all: &str| {
            fullness(&json!({ "flags": of_all }), &json!({ "flags_names": flags }))
        };
        let (of_pool, of_all) = ("hashpspool,selfmanaged_snaps", "sortbitwise,recovery_deletes");
        assert_eq!(told(of_pool, of_all), None);
        assert_eq!(told("hashpspool,nearfull", of_all), Some(PoolFullness::NearlyFull));
        assert_eq!(told("hashpspool,backfillfull", of_all), Some(PoolFullness::NearlyFull));
        assert_eq!(told("hashpspool,full", of_all), Some(PoolFullness::Full));
        assert_eq!(told(of_pool, "full,sortbitwise"), Some(PoolFullness::Full));
        let of_quota = "hashpspool,full,selfmanaged_snaps,full_quota";
        assert_eq!(told(of_quota, of_all), Some(PoolFullness::QuotaUsedUp));
        assert_eq!(fullness(&json!({}), &json!({})), None);
    }

    #[test]
    fn the_room_of_a_pool_ends_with_its_quota() {
        // What a cluster of Ceph 16.2 answers, without what is not read.
        let room = |quota: u64| {
            let stats = json!({ "stored": 300, "max_avail": 1000, "quota_bytes": quota });
            room_of(&json!({ "pools": [{ "name": "vms", "id": 2, "stats": stats }] }), "vms")
        };
        assert_eq!(room(0), Some((300, 1000)), "it has none");
        assert_eq!(room(500), Some((300, 200)));
        assert_eq!(room(5000), Some((300, 1000)), "the OSDs have less");
        assert_eq!(room(100), Some((300, 0)), "it was lowered");
        assert_eq!(room_of(&json!({ "pools": [] }), "vms"), None);
    }

    #[test]
    fn what_is_not_as_expected_is_not_guessed() {
        let rules = serde_json::from_str(RULES).unwrap();
        for wrong in [
            r#"{}"#,
            r#"{"pools": [{"pool_name": "vms", "type": 2, "size": 3, "min_size": 2, "crush_rule": 0}]}"#,
            r#"{"pools": [{"pool_name": "vms", "type": 1, "size": 3, "crush_rule": 0}]}"#,
            r#"{"pools": [{"pool_name": "vms", "type": 1, "size": 3, "min_size": 2, "crush_rule": 7}]}"#,
            r#"{"pools": [{"pool_name": "vms", "type": 3, "size": 3, "min_size": 2, "crush_rule": 1, "erasure_code_profile": "x"}]}"#,
        ] {
            assert_eq!(of(&serde_json::from_str(wrong).unwrap(), &rules, "vms"), None, "{wrong}");
        }
    }
}
