//! Pools that are made, left unfinished and completed. The monitors are a stand-in, which keeps pools and answers as those of Ceph do
//! (`OSDMonitor.cc`). With real ones the same is tried by `tests/tests/ceph_new_pools.rs`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;

use vmseal_api::compression::Compression;
use vmseal_api::failure_domain::FailureDomain;
use vmseal_api::new_pools::NewPools;
use vmseal_api::redundancy::Layout;

use super::*;
use crate::create::create_by;

/// How many racks the cluster has, each with a host with an OSD.
const RACKS: i64 = 6;

/// What becomes of a command that fails.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// It is refused.
    Refused,
    /// The user may not give it.
    NoRight,
    /// Another request makes the pool `gold` just before.
    Overtaken,
    /// It is carried out, and its answer is lost.
    AnswerLost,
}

/// A pool of names and headers, and one of data.
type Names<'a> = (&'a str, Option<&'a str>);

type Pools = BTreeMap<String, Value>;

/// What the monitors keep.
struct Monitors {
    /// As `osd dump` has them.
    pools: RefCell<Pools>,
    /// How many objects each holds; none is 0.
    objects: RefCell<BTreeMap<String, u64>>,
    profiles: RefCell<BTreeMap<String, Vec<String>>>,
    /// The flags that new pools have.
    flags: Cell<&'static str>,
    /// As `osd crush rule dump` has them.
    rules: RefCell<Vec<Value>>,
    /// The number of the rule that pools of copies have if none is named, -1 for the first one; and whether the user may read it.
    default_rule: Cell<(i64, bool)>,
    /// How many commands were given that change something.
    changes: Cell<usize>,
    /// Which of them fails.
    fault: Cell<Option<(usize, Fault)>>,
}

fn failed(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn text<'a>(of: &'a Value, field: &str) -> &'a str {
    of[field].as_str().unwrap_or_default()
}

fn number(of: &str) -> io::Result<u64> {
    of.parse().map_err(|_| failed(libc::EINVAL))
}

impl Monitors {
    fn new() -> Self {
        Self::with_rules(&[rule(0, "replicated_rule", REPLICATED, "host")])
    }

    fn with_rules(rules: &[Value]) -> Self {
        Self {
            pools: RefCell::default(),
            objects: RefCell::default(),
            profiles: RefCell::default(),
            flags: Cell::new("hashpspool"),
            rules: RefCell::new(rules.to_vec()),
            default_rule: Cell::new((-1, true)),
            changes: Cell::new(0),
            fault: Cell::new(None),
        }
    }

    /// Where a command fails.
    fn failing(step: usize, fault: Fault) -> Self {
        let it = Self::new();
        it.fault.set(Some((step, fault)));
        it
    }

    fn create(&self, pools: Names<'_>, asked: NewPools) -> Result<(), CreateError> {
        create_by(&|command: &Value| self.answer(command), pools, asked)
    }

    /// Why pools are not made.
    fn refusal(&self, pools: Names<'_>, asked: NewPools) -> String {
        self.create(pools, asked).unwrap_err().to_string()
    }

    /// A pool that an administrator has made.
    fn add(&self, name: &str, kind: u64, flags: &str) {
        let profile = if kind == ERASURE_CODED { "others" } else { "" };
        let pool = json!({
            "pool": 100, "pool_name": name, "type": kind, "size": 3, "min_size": 2,
            "crush_rule": 0, "erasure_code_profile": profile, "flags_names": flags,
            "options": {}, "application_metadata": {},
        });
        self.pools.borrow_mut().insert(name.to_owned(), pool);
    }

    fn pools(&self) -> Pools {
        self.pools.borrow().clone()
    }

    fn answer(&self, command: &Value) -> io::Result<Vec<u8>> {
        let told = match text(command, "prefix") {
            "osd dump" => json!({ "pools": self.pools().into_values().collect::<Vec<_>>() }),
            "osd crush rule dump" => Value::from(self.rules.borrow().clone()),
            "osd tree" => tree(),
            "df" => self.df(),
            "config get" => self.config(command)?,
            _ => return self.change(command).map(|()| Vec::new()),
        };
        Ok(told.to_string().into_bytes())
    }

    fn config(&self, command: &Value) -> io::Result<Value> {
        assert_eq!(text(command, "key"), "osd_pool_default_crush_rule");
        match self.default_rule.get() {
            (default, true) => Ok(default.into()),
            (_, false) => Err(failed(libc::EACCES)),
        }
    }

    fn df(&self) -> Value {
        let objects = self.objects.borrow();
        let of = |name: &String| json!({ "objects": objects.get(name).copied().unwrap_or(0) });
        let pools = self.pools();
        let pools = pools.keys().map(|name| json!({ "name": name, "stats": of(name) }));
        json!({ "pools": pools.collect::<Vec<_>>() })
    }

    fn change(&self, command: &Value) -> io::Result<()> {
        let step = self.changes.get();
        self.changes.set(step + 1);
        match self.fault.get().filter(|(at, _)| *at == step) {
            None => self.carry_out(command),
            Some((_, Fault::Refused)) => Err(failed(libc::ERANGE)),
            Some((_, Fault::NoRight)) => Err(failed(libc::EACCES)),
            Some((_, Fault::Overtaken)) => {
                self.add("gold", REPLICATED, "hashpspool");
                self.carry_out(command)
            }
            Some((_, Fault::AnswerLost)) => {
                self.carry_out(command)?;
                Err(failed(libc::ETIMEDOUT))
            }
        }
    }

    fn carry_out(&self, command: &Value) -> io::Result<()> {
        let of = |field| text(command, field);
        match of("prefix") {
            "osd crush rule create-replicated" => {
                self.add_rule(of("name"), REPLICATED, of("type"));
            }
            "osd crush rule create-erasure" => {
                let domain = self.part(of("profile"), "crush-failure-domain")?;
                self.add_rule(of("name"), ERASURE_CODED, &domain);
            }
            "osd erasure-code-profile set" => self.set_profile(of("name"), &command["profile"])?,
            "osd pool create" => self.create_pool(command)?,
            "osd pool set" => self.with_pool(of("pool"), |it| set(it, of("var"), of("val")))?,
            "osd pool application enable" => self.with_pool(of("pool"), |it| {
                it["application_metadata"][of("app")] = json!({});
                Ok(())
            })?,
            "osd pool rename" => self.rename(of("srcpool"), of("destpool"))?,
            other => panic!("the monitors are asked for '{other}'"),
        }
        Ok(())
    }

    /// One that is there stays.
    fn add_rule(&self, name: &str, kind: u64, domain: &str) {
        let mut rules = self.rules.borrow_mut();
        if rules.iter().any(|rule| rule["rule_name"] == name) {
            return;
        }
        let is_free = |id: &u64| rules.iter().all(|rule| rule["rule_id"] != *id);
        let id = (0..).find(is_free).unwrap();
        rules.push(rule(id, name, kind, domain));
    }

    /// The rule of a pool that names one, or none.
    fn rule_of(&self, name: Option<&str>, kind: u64) -> io::Result<Value> {
        let (rules, (default, _)) = (self.rules.borrow(), self.default_rule.get());
        let rule = match name {
            Some(name) => rules.iter().find(|rule| rule["rule_name"] == name),
            None if default < 0 => rules.iter().find(|rule| rule["type"] == kind),
            None => rules.iter().find(|rule| rule["rule_id"] == default),
        };
        let rule = rule.ok_or_else(|| failed(libc::ENOENT))?;
        match rule["type"] == kind {
            true => Ok(rule["rule_id"].clone()),
            false => Err(failed(libc::EINVAL)),
        }
    }

    /// The same is taken again, another one is not.
    fn set_profile(&self, name: &str, profile: &Value) -> io::Result<()> {
        let parts = profile.as_array().into_iter().flatten().filter_map(Value::as_str);
        let parts: Vec<_> = parts.map(str::to_owned).collect();
        let mut profiles = self.profiles.borrow_mut();
        match *profiles.entry(name.to_owned()).or_insert_with(|| parts.clone()) == parts {
            true => Ok(()),
            false => Err(failed(libc::EPERM)),
        }
    }

    /// A part of a profile.
    fn part(&self, profile: &str, part: &str) -> io::Result<String> {
        let profiles = self.profiles.borrow();
        let mut parts = profiles.get(profile).into_iter().flatten();
        let part = parts.find_map(|it| it.strip_prefix(part)?.strip_prefix('='));
        part.map(str::to_owned).ok_or_else(|| failed(libc::ENOENT))
    }

    /// One that is there and of the same kind is taken for the one that is asked for.
    fn create_pool(&self, command: &Value) -> io::Result<()> {
        let (name, profile) = (text(command, "pool"), text(command, "erasure_code_profile"));
        let kind = match text(command, "pool_type") {
            "erasure" => ERASURE_CODED,
            _ => REPLICATED,
        };
        if let Some(there) = self.pools().get(name) {
            let is_same = there["type"] == kind;
            return if is_same { Ok(()) } else { Err(failed(libc::EINVAL)) };
        }
        let (size, min_size) = match kind {
            ERASURE_CODED => {
                let (k, m) = (self.part(profile, "k")?, self.part(profile, "m")?);
                (number(&k)? + number(&m)?, number(&k)? + 1)
            }
            _ => (3, 2),
        };
        let rule = self.rule_of(command["rule"].as_str(), kind)?;
        let mut pools = self.pools.borrow_mut();
        let pool = json!({
            "pool": pools.len() + 1, "pool_name": name, "type": kind, "size": size,
            "min_size": min_size, "crush_rule": rule, "erasure_code_profile": profile,
            "flags_names": self.flags.get(), "options": {}, "application_metadata": {},
        });
        pools.insert(name.to_owned(), pool);
        Ok(())
    }

    fn with_pool(
        &self,
        name: &str,
        what: impl FnOnce(&mut Value) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut pools = self.pools.borrow_mut();
        what(pools.get_mut(name).ok_or_else(|| failed(libc::ENOENT))?)
    }

    /// Where only the new name is there, that is taken for done.
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut pools = self.pools.borrow_mut();
        match (pools.contains_key(from), pools.contains_key(to)) {
            (true, true) => return Err(failed(libc::EEXIST)),
            (false, false) => return Err(failed(libc::ENOENT)),
            (false, true) => return Ok(()),
            (true, false) => {}
        }
        if let Some(mut pool) = pools.remove(from) {
            pool["pool_name"] = to.into();
            pools.insert(to.to_owned(), pool);
        }
        Ok(())
    }
}

/// Sets a variable of a pool.
fn set(pool: &mut Value, variable: &str, value: &str) -> io::Result<()> {
    match variable {
        "size" => {
            if text(pool, "flags_names").contains("nosizechange") {
                return Err(failed(libc::EPERM));
            }
            let size = number(value)?;
            pool["size"] = size.into();
            // Whatever it was.
            pool["min_size"] = (size - size / 2).into();
        }
        "min_size" => {
            let min_size = number(value)?;
            if !(1..=pool["size"].as_u64().unwrap()).contains(&min_size) {
                return Err(failed(libc::EINVAL));
            }
            pool["min_size"] = min_size.into();
        }
        "allow_ec_overwrites" => {
            if pool["type"] != ERASURE_CODED {
                return Err(failed(libc::EINVAL));
            }
            pool["flags_names"] = "hashpspool,ec_overwrites".into();
        }
        "compression_mode" => {
            let options = pool["options"].as_object_mut().unwrap();
            match value {
                "unset" => options.remove(variable),
                mode => options.insert(variable.to_owned(), mode.into()),
            };
        }
        other => panic!("the monitors are to set '{other}'"),
    }
    Ok(())
}

/// A rule, as `osd crush rule dump` has it.
fn rule(id: u64, name: &str, kind: u64, domain: &str) -> Value {
    let steps = json!([
        { "op": "take", "item_name": "default" },
        { "op": "chooseleaf_firstn", "num": 0, "type": domain },
        { "op": "emit" },
    ]);
    json!({ "rule_id": id, "rule_name": name, "type": kind, "steps": steps })
}

/// Racks with a host each, which has an OSD.
fn tree() -> Value {
    let nodes = (0..RACKS).flat_map(|osd| {
        let (host, rack) = (-1 - osd, -1 - RACKS - osd);
        [
            json!({ "id": rack, "type": "rack", "children": [host] }),
            json!({ "id": host, "type": "host", "children": [osd] }),
            json!({ "id": osd, "type": "osd" }),
        ]
    });
    json!({ "nodes": nodes.collect::<Vec<_>>() })
}

const MIRRORED: Names<'static> = ("gold", None);
const CODED: Names<'static> = ("gold", Some("gold-data"));

fn copies(failures: u8) -> NewPools {
    NewPools { failures, ..NewPools::default() }
}

fn chunks(failures: u8) -> NewPools {
    NewPools { layout: Some(Layout::ErasureCoding), ..copies(failures) }
}

fn compressed(asked: NewPools) -> NewPools {
    NewPools { compression: Some(Compression::Force), ..asked }
}

fn in_racks(asked: NewPools) -> NewPools {
    NewPools { failure_domain: Some(FailureDomain::Rack), ..asked }
}

#[test]
fn pools_have_what_was_asked_for() {
    let monitors = Monitors::new();
    monitors.create(CODED, compressed(in_racks(chunks(2)))).unwrap();
    let pools = monitors.pools();
    assert_eq!(pools.keys().collect::<Vec<_>>(), ["gold", "gold-data"]);
    let rules = Value::from(monitors.rules.borrow().clone());
    for (name, size, min_size, flags, options) in [
        ("gold", 3, 1, "hashpspool", json!({})),
        ("gold-data", 6, 4, "hashpspool,ec_overwrites", json!({ "compression_mode": "force" })),
    ] {
        let pool = &pools[name];
        assert_eq!((&pool["size"], &pool["min_size"]), (&json!(size), &json!(min_size)), "{name}");
        assert_eq!((&pool["flags_names"], &pool["options"]), (&json!(flags), &options), "{name}");
        assert_eq!(pool["application_metadata"], json!({ "rbd": {} }), "{name}");
        let rule = pool["crush_rule"].as_u64().unwrap();
        assert_eq!(failure_domain(&rules, rule).as_deref(), Some("rack"), "{name}");
    }
    let steps = monitors.changes.get();
    monitors.create(CODED, compressed(in_racks(chunks(2)))).unwrap();
    assert_eq!((monitors.pools(), monitors.changes.get()), (pools, steps), "they were changed");
}

#[test]
fn a_request_that_fails_at_any_step_is_completed_by_the_same_request() {
    for (names, asked) in [
        (MIRRORED, copies(2)),
        (MIRRORED, compressed(in_racks(copies(1)))),
        (CODED, chunks(1)),
        (CODED, compressed(in_racks(chunks(2)))),
    ] {
        let whole = Monitors::new();
        whole.create(names, asked).unwrap();
        let (whole, steps) = (whole.pools(), whole.changes.get());
        for (step, fault) in
            (0..steps).flat_map(|it| [Fault::Refused, Fault::AnswerLost].map(|how| (it, how)))
        {
            let what = format!("{asked}; step {step}: {fault:?}");
            let monitors = Monitors::failing(step, fault);
            monitors.create(names, asked).expect_err(&what);
            for (name, pool) in monitors.pools() {
                let is_finished = !name.ends_with(UNFINISHED_SUFFIX);
                assert!(!is_finished || whole.get(&name) == Some(&pool), "{what}: {pool}");
            }
            monitors.create(names, asked).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(monitors.pools(), whole, "{what}");
        }
    }
}

/// The name of the rule that a pool has.
fn rule_name_of(monitors: &Monitors, pool: &str) -> String {
    let rule = monitors.pools()[pool]["crush_rule"].clone();
    let rules = monitors.rules.borrow();
    let rule = rules.iter().find(|it| it["rule_id"] == rule).unwrap();
    text(rule, "rule_name").to_owned()
}

#[test]
fn a_pool_is_made_and_completed_with_the_rule_of_the_cluster_whatever_its_number_is() {
    let by_host = rule(0, "replicated_rule", REPLICATED, "host");
    let (coded, by_rack) =
        (rule(1, "coded", ERASURE_CODED, "osd"), rule(3, "racks", REPLICATED, "rack"));
    let without_0 = [coded.clone(), by_rack.clone()];
    let with_0 = [by_host, coded, by_rack];
    for (rules, default, wanted) in [
        (&without_0[..], (-1, true), "racks"),
        (&without_0[..], (-1, false), "racks"),
        (&with_0[..], (-1, true), "replicated_rule"),
        (&with_0[..], (3, true), "racks"),
        // The monitors would take the other one, if none were named.
        (&with_0[..], (3, false), "replicated_rule"),
        // It takes no copies, or is gone.
        (&with_0[..], (1, true), "replicated_rule"),
        (&with_0[..], (7, true), "replicated_rule"),
    ] {
        let monitors = Monitors::with_rules(rules);
        monitors.default_rule.set(default);
        monitors.fault.set(Some((1, Fault::Refused)));
        monitors.create(MIRRORED, copies(1)).unwrap_err();
        assert_eq!(rule_name_of(&monitors, "gold.vmseal-unfinished"), wanted, "{default:?}");
        let again = monitors.create(MIRRORED, copies(1));
        again.unwrap_or_else(|error| panic!("{default:?}: {error}"));
        assert_eq!(rule_name_of(&monitors, "gold"), wanted, "{default:?}");
    }
    let monitors = Monitors::with_rules(&[]);
    monitors.create(MIRRORED, copies(1)).unwrap();
    assert_eq!(rule_name_of(&monitors, "gold"), "vmseal-host");
}

#[test]
fn the_error_of_a_step_names_the_pool_that_is_left_and_what_completes_it() {
    // The first command makes the pool, the second one sets its size.
    let refused = Monitors::failing(0, Fault::Refused).refusal(MIRRORED, copies(1));
    assert!(refused.starts_with("the monitors have refused 'osd pool create'"), "{refused}");
    assert!(!refused.contains("not finished"), "{refused}");
    let refused = Monitors::failing(1, Fault::Refused).refusal(MIRRORED, copies(1));
    assert!(refused.starts_with("the monitors have refused 'osd pool set'"), "{refused}");
    let left = "The pool 'gold.vmseal-unfinished' is there and not finished: when that is mended, ask again";
    assert!(refused.contains(left), "{refused}");
}

#[test]
fn a_command_whose_answer_is_lost_may_have_been_done_and_that_is_said() {
    // The first command makes the pool, the third one sets min_size, the last one gives it its name.
    for (step, command, left) in [
        (0, "osd pool create", "gold.vmseal-unfinished"),
        (2, "osd pool set", "gold.vmseal-unfinished"),
        (4, "osd pool rename", "gold"),
    ] {
        let monitors = Monitors::failing(step, Fault::AnswerLost);
        let told = monitors.refusal(MIRRORED, copies(1));
        assert_eq!(monitors.pools().keys().collect::<Vec<_>>(), [left]);
        let begins = format!("the monitors have not answered '{command}' in time, and it may");
        assert!(
            told.starts_with(&begins) && told.ends_with("ask again with the same options"),
            "{told}"
        );
        assert!(!told.contains("refused") && !told.contains("not finished"), "{told}");
    }
}

#[test]
fn a_pool_that_another_request_has_made_meanwhile_is_told_with_what_removes_the_second_one() {
    for step in 0..5 {
        let monitors = Monitors::failing(step, Fault::Overtaken);
        let told = monitors.refusal(MIRRORED, copies(1));
        let left = "gold.vmseal-unfinished";
        assert_eq!(monitors.pools().keys().collect::<Vec<_>>(), ["gold", left]);
        assert!(told.starts_with("another request has made the pool 'gold'"), "{told}");
        let remove = format!("ceph osd pool rm {left} {left} --yes-i-really-really-mean-it");
        assert!(told.contains(&remove) && !told.contains("not finished"), "{told}");
        let there = monitors.pools();
        monitors.create(MIRRORED, copies(1)).unwrap();
        assert_eq!(monitors.pools(), there, "a pool that is there was changed");
    }
}

#[test]
fn a_missing_right_and_what_is_forbidden_to_all_are_told_apart() {
    let told = Monitors::failing(0, Fault::NoRight).refusal(MIRRORED, copies(1));
    let right = "the user may not make pools ('osd pool create'). Name a user that may";
    assert!(told.starts_with(right), "{told}");

    let monitors = Monitors::new();
    monitors.flags.set("hashpspool,nosizechange");
    let told = monitors.refusal(MIRRORED, copies(1));
    let left = "gold.vmseal-unfinished";
    let why = format!("'osd pool set' for '{left}' with EPERM: a flag of the pool forbids it");
    assert!(told.contains(&why) && !told.contains("Name a user"), "{told}");
    let change = format!("ceph osd pool set {left} nosizechange false");
    assert!(told.contains(&change), "{told}");
    assert!(told.contains("when that is mended, ask again"), "{told}");
    let unset = |pool: &mut Value| {
        pool["flags_names"] = "hashpspool".into();
        Ok(())
    };
    monitors.with_pool(left, unset).unwrap();
    monitors.create(MIRRORED, copies(1)).unwrap();

    let monitors = Monitors::new();
    let other = vec!["k=2".to_owned(), "m=1".to_owned(), "crush-failure-domain=osd".to_owned()];
    monitors.profiles.borrow_mut().insert("vmseal-2-1-host".to_owned(), other);
    let told = monitors.refusal(CODED, chunks(1));
    let why = "'osd erasure-code-profile set' for 'vmseal-2-1-host' with EPERM";
    let look = "ceph osd erasure-code-profile get vmseal-2-1-host";
    assert!(told.contains(why) && told.contains(look) && !told.contains("Name a user"), "{told}");
}

#[test]
fn an_unfinished_pool_gets_the_settings_of_the_later_request() {
    // All but the last command, which gives the pool its name: the pool is made, has size, min_size and a mode, and is for images.
    let monitors = Monitors::failing(5, Fault::Refused);
    monitors.create(MIRRORED, compressed(copies(2))).unwrap_err();
    let left = monitors.pools()["gold.vmseal-unfinished"].clone();
    assert_eq!(left["options"], json!({ "compression_mode": "force" }));
    monitors.create(MIRRORED, copies(1)).unwrap();
    let pool = monitors.pools()["gold"].clone();
    assert_eq!((&pool["size"], &pool["min_size"]), (&json!(2), &json!(1)));
    assert_eq!((&pool["options"], &pool["pool"]), (&json!({}), &left["pool"]));
}

#[test]
fn an_unfinished_pool_that_was_made_for_something_else_is_named_with_what_to_do() {
    let begun = |names, asked, step| {
        let monitors = Monitors::failing(step, Fault::Refused);
        monitors.create(names, asked).unwrap_err();
        monitors
    };
    for (monitors, names, asked, why) in [
        (
            begun(MIRRORED, copies(1), 1),
            MIRRORED,
            in_racks(copies(1)),
            "'gold.vmseal-unfinished' was left unfinished by a request with other options: the failure domain is host, not rack",
        ),
        (
            begun(MIRRORED, copies(1), 1),
            ("names", Some("gold")),
            chunks(1),
            "'gold.vmseal-unfinished' was left unfinished by a request with other options: pool_type is replicated, not erasure",
        ),
        (
            // Five commands make the pool of names, and three that of data, with its profile and its rule.
            begun(CODED, chunks(2), 8),
            CODED,
            chunks(1),
            "'gold-data.vmseal-unfinished' was left unfinished by a request with other options: erasure_code_profile is vmseal-4-2-host, not vmseal-2-1-host",
        ),
    ] {
        let before = (monitors.pools(), monitors.changes.get());
        let refused = monitors.refusal(names, asked);
        assert!(refused.contains(why), "{refused}");
        let remove = "vmseal-unfinished --yes-i-really-really-mean-it) and ask again";
        assert!(refused.contains(remove), "{refused}");
        assert_eq!((monitors.pools(), monitors.changes.get()), before, "{why}");
    }
}

#[test]
fn a_pool_that_somebody_uses_is_not_changed_whatever_its_name_is() {
    let monitors = Monitors::failing(1, Fault::Refused);
    monitors.create(MIRRORED, copies(1)).unwrap_err();
    let left = "gold.vmseal-unfinished";
    monitors.objects.borrow_mut().insert(left.to_owned(), 7);
    let before = (monitors.pools(), monitors.changes.get());
    let refused = monitors.refusal(MIRRORED, copies(1));
    assert!(refused.contains("holds objects (7)"), "{refused}");
    assert!(refused.contains(&format!("ceph osd pool rename {left} NAME")), "{refused}");
    assert_eq!((monitors.pools(), monitors.changes.get()), before);
    monitors.objects.borrow_mut().clear();
    monitors.create(MIRRORED, copies(1)).unwrap();

    for names in [(left, None), ("gold", Some("data.vmseal-unfinished"))] {
        let asked = if names.1.is_some() { chunks(1) } else { copies(1) };
        let refused = monitors.refusal(names, asked);
        assert!(refused.contains("'.vmseal-unfinished' is for pools that are not"), "{refused}");
    }
}

#[test]
fn pools_that_others_have_made_stay_as_they_are() {
    let monitors = Monitors::new();
    monitors.add("gold", REPLICATED, "hashpspool");
    monitors.add("gold-data", ERASURE_CODED, "hashpspool,ec_overwrites");
    let before = (monitors.pools(), 0);
    monitors.create(CODED, compressed(chunks(2))).unwrap();
    assert_eq!((monitors.pools(), monitors.changes.get()), before);
    // A mirrored one takes data, too.
    monitors.add("gold-data", REPLICATED, "hashpspool");
    monitors.create(CODED, chunks(2)).unwrap();
    assert_eq!(monitors.changes.get(), 0);
}

#[test]
fn a_pool_that_takes_no_images_is_refused_with_what_to_do_and_nothing_is_made() {
    let coded = Monitors::new();
    coded.add("gold", ERASURE_CODED, "hashpspool,ec_overwrites");
    let refused = coded.refusal(MIRRORED, copies(1));
    assert!(
        refused.contains(
            "'gold' is there already, and cannot be used: pool_type is erasure, not replicated"
        ),
        "{refused}"
    );

    let fixed = Monitors::new();
    fixed.add("gold-data", ERASURE_CODED, "hashpspool");
    let refused = fixed.refusal(CODED, chunks(1));
    assert!(refused.contains("allow_ec_overwrites is false, not true"), "{refused}");
    assert!(refused.contains("ceph osd pool set gold-data allow_ec_overwrites true"), "{refused}");
    assert_eq!((coded.changes.get(), fixed.changes.get()), (0, 0));
}
