//! Makes the pools of a new datastore, where the user may do that.
//!
//! ```text
//!  mirroring        one pool of FAILURES + 1 copies
//!  erasure coding   a pool of FAILURES + 1 copies for names and headers, and one of k + FAILURES chunks for data
//! ```
//! Each goes on with what is left after that many failures, as it was asked to (`min_size`). Copies and chunks are kept apart on what the
//! cluster's usual rule says, or what was asked for. OSDs compress the pool of data, if that was asked for. What is there stays as it is.
//!
//! A monitor makes a pool by one command, and sets it up by others. Until a pool has what was asked for, it has a name that only vmseal
//! gives:
//! ```text
//!  nothing ──osd pool create──> NAME.vmseal-unfinished ──set, application enable, rename──> NAME
//!                                   │             ^
//!                                   │             └──the same request──┐
//!                                   └──a step refused, process dead────┘
//! ```

mod unfinished;

use std::collections::BTreeSet;
use std::io;

use serde_json::{Value, json};
use vmseal_api::new_pools::NewPools;
use vmseal_api::redundancy::Layout;

use self::unfinished::{COMPRESSION, State, Wanted};
use crate::cluster::Cluster;
use crate::pools::{REPLICATED, failure_domain};

/// Placement groups that a pool has at first; the cluster adds others as it fills (`pg_autoscale_mode`).
const GROUPS: u32 = 32;

/// How many data chunks a pool has if nobody says how many: with one coding chunk so few that three failure domains are enough, and with more
/// coding chunks as many as vSphere's RAID 6.
const DATA_CHUNKS_BESIDE_ONE: u32 = 2;
const DATA_CHUNKS_BESIDE_MORE: u32 = 4;

/// The option with the number of the rule that pools of copies have unless told otherwise.
const DEFAULT_RULE: &str = "osd_pool_default_crush_rule";

/// Without it, only whole objects of an erasure-coded pool can be written.
const OVERWRITES: &str = "allow_ec_overwrites";

/// Asks a monitor: the command, and its answer.
type Ask<'a> = dyn Fn(&Value) -> io::Result<Vec<u8>> + 'a;

/// A setting of a pool that is there, and what was asked for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is {has}, not {wanted}")]
pub struct Difference {
    /// What Ceph calls it.
    pub setting: &'static str,
    /// What the pool has.
    pub has: String,
    /// What was asked for.
    pub wanted: String,
}

impl Difference {
    fn new(setting: &'static str, has: &str, wanted: &str) -> Self {
        Self { setting, has: has.to_owned(), wanted: wanted.to_owned() }
    }
}

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
    /// A field is outside its limits, or contradicts another one.
    #[error("{field} {what}")]
    Invalid {
        /// Which field of the pool.
        field: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// Too few OSDs, hosts or racks.
    #[error(
        "{what} must each be in another {domain}: that takes {needed} {domain}s, and the cluster has {there}. Ask for fewer, or for another failure domain"
    )]
    TooSmall {
        /// The copies, or the chunks.
        what: String,
        /// How many.
        needed: u32,
        /// Of what.
        domain: String,
        /// How many there are.
        there: usize,
    },
    /// A name that pools have while they are made.
    #[error(
        "no pool is made with the name '{pool}': '{suffix}' is for pools that are not finished. Choose another name"
    )]
    Reserved {
        /// The name.
        pool: String,
        /// What it ends with.
        suffix: &'static str,
    },
    /// A pool that somebody has made, and that takes no images.
    #[error(
        "the pool '{pool}' is there already, and cannot be used: {difference}. Pools that are there are not changed. {advice}"
    )]
    Unusable {
        /// Its name.
        pool: String,
        /// What it has.
        difference: Difference,
        /// What to do.
        advice: String,
    },
    /// A former request has begun to make the pool for other options.
    #[error(
        "the pool '{pool}' was left unfinished by a request with other options: {difference}, which cannot be changed. Give the options of that request, or remove the pool (ceph osd pool rm {pool} {pool} --yes-i-really-really-mean-it) and ask again"
    )]
    OtherWork {
        /// What it is called until it is finished.
        pool: String,
        /// What it was made with.
        difference: Difference,
    },
    /// A pool has the name of one that is not finished, and somebody uses it.
    #[error(
        "the pool '{pool}' has the name of one that is not finished, and holds objects ({objects}): it is not changed. Give it another name (ceph osd pool rename {pool} NAME) and ask again"
    )]
    Holds {
        /// Its name.
        pool: String,
        /// How many objects.
        objects: u64,
    },
    /// The pool is there, and is not set up.
    #[error(
        "{why}. The pool '{pool}' is there and not finished: when that is mended, ask again with the same options"
    )]
    Incomplete {
        /// What it is called until it is finished.
        pool: String,
        /// What has failed.
        why: Box<CreateError>,
    },
    /// There was no pool of the name when this request began, and there is one when it ends.
    #[error(
        "another request has made the pool '{pool}' meanwhile, and '{unfinished}' is left over: remove that one (ceph osd pool rm {unfinished} {unfinished} --yes-i-really-really-mean-it) and ask again"
    )]
    Overtaken {
        /// The pool that is there.
        pool: String,
        /// The one that this request has set up.
        unfinished: String,
    },
    /// The user may not (`EACCES`).
    #[error(
        "the user may not make pools ('{command}'). Name a user that may, such as client.admin, with its keyring, or make the pool with ceph osd pool create"
    )]
    Forbidden {
        /// What it may not do.
        command: String,
    },
    /// `EPERM`, which has several reasons.
    #[error(
        "the monitors have answered '{command}' for '{object}' with EPERM: a flag of the pool forbids it (ceph osd pool set {object} nosizechange false), a profile of this name has other values (ceph osd erasure-code-profile get {object}), or the user lacks the right"
    )]
    NotPermitted {
        /// What they were asked for.
        command: String,
        /// The pool, the profile or the rule.
        object: String,
    },
    /// Nobody knows what was done.
    #[error(
        "the monitors have not answered '{command}' in time, and it may have been done: ask again with the same options"
    )]
    NoAnswer {
        /// What they were asked for.
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

/// Makes the pools that are not there, and completes those that a former request has left unfinished.
///
/// # Errors
/// [`CreateError`]. What was made before it stays, and the same request goes on with it.
pub fn create(
    cluster: &Cluster,
    pool: &str,
    data_pool: Option<&str>,
    asked: NewPools,
) -> Result<(), CreateError> {
    create_by(&|command: &Value| cluster.command(&command.to_string()), (pool, data_pool), asked)
}

fn create_by(
    monitors: &Ask<'_>,
    (pool, data_pool): (&str, Option<&str>),
    asked: NewPools,
) -> Result<(), CreateError> {
    let data_pool = checked(asked, data_pool)?;
    for name in [Some(pool), data_pool].into_iter().flatten() {
        unfinished::check_name(name)?;
    }
    let dump = ask(monitors, &json!({ "prefix": "osd dump" }))?;
    let rules = ask(monitors, &json!({ "prefix": "osd crush rule dump" }))?;
    let usual = usual_rule(monitors, &rules)?;
    let usual_domain = usual.and_then(|it| failure_domain(&rules, it["rule_id"].as_u64()?));
    let domain = asked.failure_domain.map(|domain| domain.name().to_owned());
    let domain = domain.or_else(|| usual_domain.clone()).unwrap_or_else(|| "host".to_owned());
    let there = domains(&ask(monitors, &json!({ "prefix": "osd tree" }))?, &domain);
    require_domains(asked, &domain, there)?;
    let rule = match usual.filter(|_| usual_domain.as_ref() == Some(&domain)) {
        Some(usual) => Rule { name: usual["rule_name"].clone(), made_by: None },
        None => new_rule(usual, &domain),
    };
    let mut pools = vec![pool_of_copies(pool, asked, (domain.as_str(), rule), data_pool.is_none())];
    pools.extend(data_pool.map(|data| pool_of_chunks(data, asked, &domain)));
    // All are looked at before one is made.
    let states = pools.iter().map(|it| unfinished::state(monitors, (&dump, &rules), it));
    let states = states.collect::<Result<Vec<_>, _>>()?;
    for (wanted, state) in pools.iter().zip(states) {
        if state != State::Finished {
            unfinished::make(monitors, wanted, state, GROUPS)?;
        }
    }
    Ok(())
}

/// Checks what can be checked without the cluster. Returns the pool of data, where that is another one.
fn checked(asked: NewPools, data_pool: Option<&str>) -> Result<Option<&str>, CreateError> {
    if asked.failures == 0 {
        return Err(CreateError::NoRedundancy);
    }
    asked.check().map_err(|(field, what)| CreateError::Invalid { field, what })?;
    match (asked.layout == Some(Layout::ErasureCoding), data_pool) {
        (true, None) => Err(CreateError::NoDataPool),
        (false, Some(_)) => Err(CreateError::DataPool),
        (_, named) => Ok(named),
    }
}

/// How many data chunks erasure coding gets (k).
fn data_chunks(asked: NewPools) -> u32 {
    let usual = if asked.failures == 1 { DATA_CHUNKS_BESIDE_ONE } else { DATA_CHUNKS_BESIDE_MORE };
    asked.data_chunks.unwrap_or(usual)
}

/// The rule that pools of copies have unless told otherwise: the cluster's default, if this user may read which one that is, or else the
/// first one for copies, which is number 0 unless somebody has removed that. A monitor that is not told a rule also goes by its own file,
/// which this process cannot read: it would make a pool with a rule that the next request does not expect.
fn usual_rule<'a>(monitors: &Ask<'_>, rules: &'a Value) -> Result<Option<&'a Value>, CreateError> {
    let get = json!({ "prefix": "config get", "who": "mon", "key": DEFAULT_RULE });
    let default = match ask(monitors, &get) {
        Err(error @ CreateError::NoAnswer { .. }) => return Err(error),
        told => told.unwrap_or_default(),
    };
    let rules = rules.as_array().into_iter().flatten();
    let of_copies: Vec<&Value> = rules.filter(|rule| rule["type"] == REPLICATED).collect();
    let by_default = of_copies.iter().find(|rule| rule["rule_id"] == default);
    let first = of_copies.iter().min_by_key(|rule| rule["rule_id"].as_u64());
    Ok(by_default.or(first).copied())
}

/// What keeps copies apart.
struct Rule {
    name: Value,
    /// The command that makes it; none where it is there.
    made_by: Option<Value>,
}

/// A pool of copies, and whether it has the data as well.
fn pool_of_copies<'a>(
    name: &'a str,
    asked: NewPools,
    (domain, rule): (&'a str, Rule),
    has_data: bool,
) -> Wanted<'a> {
    let how = json!({ "pool_type": "replicated", "rule": rule.name });
    let settings = settings_of_copies(asked, has_data);
    Wanted { name, needs: rule.made_by.into_iter().collect(), how, domain, settings }
}

/// A pool of chunks.
fn pool_of_chunks<'a>(name: &'a str, asked: NewPools, domain: &'a str) -> Wanted<'a> {
    let profile = profile(asked, domain);
    let of_profile = profile["name"].clone();
    // Ceph would make a rule with the name that the pool has then.
    let rule = json!({
        "prefix": "osd crush rule create-erasure", "name": of_profile, "profile": of_profile,
    });
    let how =
        json!({ "pool_type": "erasure", "erasure_code_profile": of_profile, "rule": of_profile });
    let settings = settings_of_chunks(asked);
    Wanted { name, needs: vec![profile, rule], how, domain, settings }
}

/// What a pool of copies gets, in this order; whether it has the data as well.
fn settings_of_copies(asked: NewPools, has_data: bool) -> Vec<(&'static str, String)> {
    let copies = u32::from(asked.failures) + 1;
    let mut settings = vec![("size", copies.to_string()), ("min_size", "1".to_owned())];
    settings.extend(compression(asked).filter(|_| has_data));
    settings
}

/// What a pool of chunks gets, in this order.
fn settings_of_chunks(asked: NewPools) -> Vec<(&'static str, String)> {
    let overwrites = (OVERWRITES, "true".to_owned());
    let mut settings = vec![overwrites, ("min_size", data_chunks(asked).to_string())];
    settings.extend(compression(asked));
    settings
}

/// How OSDs are to compress a pool of data; none leaves it to the cluster.
fn compression(asked: NewPools) -> Option<(&'static str, String)> {
    asked.compression.map(|mode| (COMPRESSION, mode.name().to_owned()))
}

/// Refuses pools with more copies or chunks than failure domains: the cluster has `there` of them.
fn require_domains(asked: NewPools, domain: &str, there: usize) -> Result<(), CreateError> {
    let failures = u32::from(asked.failures);
    let (needed, what) = match asked.layout {
        Some(Layout::ErasureCoding) => {
            let data = data_chunks(asked);
            let all = data + failures;
            (all, format!("{all} chunks (k={data} m={failures})"))
        }
        None | Some(Layout::Mirroring) => (failures + 1, format!("{} copies", failures + 1)),
    };
    if there < needed as usize {
        let domain = domain.to_owned();
        return Err(CreateError::TooSmall { what, needed, domain, there });
    }
    Ok(())
}

/// Makes the profile of an erasure-coded pool. Its name says all that it has, so one that is there is the same.
fn profile(asked: NewPools, domain: &str) -> Value {
    let (chunks, failures) = (data_chunks(asked), asked.failures);
    let values =
        [format!("k={chunks}"), format!("m={failures}"), format!("crush-failure-domain={domain}")];
    json!({
        "prefix": "osd erasure-code-profile set",
        "name": format!("vmseal-{chunks}-{failures}-{domain}"),
        "profile": values,
    })
}

/// The rule that keeps copies apart on something else than the usual one does, on the same OSDs. One that is there stays.
fn new_rule(usual: Option<&Value>, domain: &str) -> Rule {
    let steps = usual.and_then(|rule| rule["steps"].as_array()).into_iter().flatten();
    let mut taken = steps.filter(|step| step["op"] == "take");
    let taken = taken.find_map(|step| step["item_name"].as_str()).unwrap_or("default");
    // Of a class of OSDs: `default~ssd`.
    let (root, class) = taken.split_once('~').map_or((taken, None), |(it, of)| (it, Some(of)));
    let name = Value::from(format!("vmseal-{domain}"));
    let mut make = json!({
        "prefix": "osd crush rule create-replicated", "name": name, "root": root, "type": domain,
    });
    if let Some(class) = class {
        make["class"] = class.into();
    }
    Rule { name, made_by: Some(make) }
}

/// Asks a monitor; returns its answer, or nothing where it has none.
fn ask(monitors: &Ask<'_>, command: &Value) -> Result<Value, CreateError> {
    let mut command = command.clone();
    command["format"] = "json".into();
    let answer = monitors(&command).map_err(|error| not_done(&command, error))?;
    Ok(serde_json::from_slice(&answer).unwrap_or_default())
}

/// Why a command has not succeeded.
fn not_done(asked: &Value, error: io::Error) -> CreateError {
    let text = |field: &str| asked[field].as_str().map(str::to_owned);
    let command = text("prefix").unwrap_or_default();
    match error.raw_os_error() {
        Some(libc::EACCES) => CreateError::Forbidden { command },
        Some(libc::EPERM) => {
            let object = ["pool", "srcpool", "name"].into_iter().find_map(text);
            CreateError::NotPermitted { command, object: object.unwrap_or_default() }
        }
        // What the library says after `rados_mon_op_timeout`.
        Some(libc::ETIMEDOUT) => CreateError::NoAnswer { command },
        _ => CreateError::Refused { command, error },
    }
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
    use vmseal_api::compression::Compression;

    use super::*;

    fn coding(failures: u8, data_chunks: Option<u32>) -> NewPools {
        let layout = Some(Layout::ErasureCoding);
        NewPools { failures, layout, data_chunks, ..NewPools::default() }
    }

    #[test]
    fn the_pool_of_data_is_compressed_as_it_was_asked_for_and_that_of_names_is_not() {
        let told = |settings: Vec<(&'static str, String)>| {
            let told = settings.iter().map(|(variable, value)| format!("{variable}={value}"));
            told.collect::<Vec<_>>().join(" ")
        };
        let mirroring = NewPools { failures: 2, ..NewPools::default() };
        assert_eq!(told(settings_of_copies(mirroring, true)), "size=3 min_size=1");
        let chunks = "allow_ec_overwrites=true min_size=4";
        assert_eq!(told(settings_of_chunks(coding(2, None))), chunks);
        for (mode, name) in [(Compression::Aggressive, "aggressive"), (Compression::None, "none")] {
            let with = |asked: NewPools| NewPools { compression: Some(mode), ..asked };
            let of_data = told(settings_of_copies(with(mirroring), true));
            assert_eq!(of_data, format!("size=3 min_size=1 compression_mode={name}"));
            let of_names = told(settings_of_copies(with(mirroring), false));
            assert_eq!(of_names, "size=3 min_size=1");
            let coded = told(settings_of_chunks(with(coding(2, None))));
            assert_eq!(coded, format!("{chunks} compression_mode={name}"));
        }
    }

    #[test]
    fn an_erasure_coded_pool_has_the_data_chunks_that_were_asked_for() {
        for (asked, name, k, m) in [
            (coding(1, None), "vmseal-2-1-host", "k=2", "m=1"),
            (coding(2, None), "vmseal-4-2-host", "k=4", "m=2"),
            (coding(3, None), "vmseal-4-3-host", "k=4", "m=3"),
            (coding(1, Some(4)), "vmseal-4-1-host", "k=4", "m=1"),
            (coding(2, Some(8)), "vmseal-8-2-host", "k=8", "m=2"),
        ] {
            let made = profile(asked, "host");
            assert_eq!(made["name"], name);
            assert_eq!(made["profile"], json!([k, m, "crush-failure-domain=host"]));
        }
    }

    #[test]
    fn a_cluster_that_is_too_small_is_told_what_is_needed_and_what_is_there() {
        let mirroring = NewPools { failures: 2, ..NewPools::default() };
        for (asked, needed, what) in [
            (mirroring, 3, "3 copies must each be in another rack"),
            (coding(1, None), 3, "3 chunks (k=2 m=1) must each be in another rack"),
            (coding(2, Some(8)), 10, "10 chunks (k=8 m=2) must each be in another rack"),
        ] {
            require_domains(asked, "rack", needed).unwrap();
            let refused = require_domains(asked, "rack", needed - 1).unwrap_err().to_string();
            let there = format!("takes {needed} racks, and the cluster has {}.", needed - 1);
            assert!(refused.starts_with(what) && refused.contains(&there), "{refused}");
        }
    }

    #[test]
    fn pools_that_cannot_be_made_are_refused_before_the_cluster_is_asked() {
        let mirroring = NewPools { failures: 1, ..NewPools::default() };
        assert_eq!(checked(mirroring, None).unwrap(), None);
        assert_eq!(checked(coding(2, Some(8)), Some("ec")).unwrap(), Some("ec"));
        let chunks_of_copies = NewPools { data_chunks: Some(4), ..mirroring };
        for (asked, data_pool, why) in [
            (NewPools::default(), None, "at least one failure"),
            (mirroring, Some("ec"), "leave --data-pool away"),
            (coding(1, None), None, "name it with --data-pool"),
            (coding(1, Some(1)), Some("ec"), "create.data_chunks must be 2 to 32, not 1"),
            (chunks_of_copies, None, "data_chunks is only for erasure coding"),
        ] {
            let refused = checked(asked, data_pool).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn a_rule_of_another_domain_takes_the_osds_of_the_usual_one() {
        let usual = |item: &str| {
            json!({ "rule_id": 0, "steps": [
                { "op": "set_choose_tries", "num": 100 },
                { "op": "take", "item": -1, "item_name": item },
                { "op": "chooseleaf_firstn", "num": 0, "type": "host" }] })
        };
        let made_by = |usual: Option<&Value>, domain: &str| {
            let rule = new_rule(usual, domain);
            let made_by = rule.made_by.unwrap();
            assert_eq!(made_by["name"], rule.name);
            made_by
        };
        let made = made_by(Some(&usual("default")), "rack");
        assert_eq!(made["name"], "vmseal-rack");
        assert_eq!((&made["root"], &made["type"]), (&json!("default"), &json!("rack")));
        assert_eq!(made["class"], Value::Null);
        let made = made_by(Some(&usual("fast~ssd")), "osd");
        assert_eq!((&made["root"], &made["class"]), (&json!("fast"), &json!("ssd")));
        assert_eq!(made_by(None, "osd")["root"], "default");
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
