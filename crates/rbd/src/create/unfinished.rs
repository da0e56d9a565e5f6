//! A pool that is being made. The command that makes it gives it a name that only vmseal gives: a pool of such a name is vmseal's work, and
//! nobody uses it yet. The last command gives it the name that was asked for: a pool that has that name is finished.

use serde_json::{Value, json};
use vmseal_api::new_pools::UNFINISHED_SUFFIX;

use super::{Ask, CreateError, Difference, OVERWRITES, ask};
use crate::pools::{ERASURE_CODED, REPLICATED, failure_domain};

/// How OSDs compress a pool, and the value that has none say so.
pub(super) const COMPRESSION: &str = "compression_mode";
const NO_MODE: &str = "unset";

/// What pools of images are for, as Ceph has it: it warns of a pool that is for nothing.
const APPLICATION: &str = "rbd";

/// A pool as it is to be.
pub(super) struct Wanted<'a> {
    pub(super) name: &'a str,
    /// What is made before, unless it is there: a rule, a profile.
    pub(super) needs: Vec<Value>,
    /// What `osd pool create` is told. The pool keeps it.
    pub(super) how: Value,
    /// What its copies or chunks are kept apart on.
    pub(super) domain: &'a str,
    /// What is set then, in this order: with `size` Ceph sets `min_size` as well.
    pub(super) settings: Vec<(&'static str, String)>,
}

/// What of a pool is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Missing,
    /// A former request has not come to its end.
    Unfinished,
    /// It has the name that the request gives. vmseal or an administrator may have made it.
    Finished,
}

/// Refuses a name that pools have while they are made.
pub(super) fn check_name(pool: &str) -> Result<(), CreateError> {
    match pool.ends_with(UNFINISHED_SUFFIX) {
        true => Err(CreateError::Reserved { pool: pool.to_owned(), suffix: UNFINISHED_SUFFIX }),
        false => Ok(()),
    }
}

/// What of a pool is there. Nothing is changed.
///
/// # Errors
/// [`CreateError::Unusable`], [`CreateError::OtherWork`], [`CreateError::Holds`]; the monitors'.
pub(super) fn state(
    monitors: &Ask<'_>,
    (dump, rules): (&Value, &Value),
    wanted: &Wanted<'_>,
) -> Result<State, CreateError> {
    let (name, unfinished) = (wanted.name, name_of(wanted.name));
    let left = pool_in(dump, &unfinished);
    if let Some(found) = pool_in(dump, name) {
        check_usable(found, wanted)?;
        if left.is_some() {
            tracing::warn!(
                pool = unfinished,
                "it was left unfinished, and there is a pool '{name}': remove it (ceph osd pool rm)"
            );
        }
        return Ok(State::Finished);
    }
    let Some(found) = left else { return Ok(State::Missing) };
    if let Some(difference) = other_work(found, rules, wanted) {
        return Err(CreateError::OtherWork { pool: unfinished, difference });
    }
    match objects(&ask(monitors, &json!({ "prefix": "df" }))?, &unfinished) {
        0 => Ok(State::Unfinished),
        objects => Err(CreateError::Holds { pool: unfinished, objects }),
    }
}

/// Makes a pool, or completes it. Each step may be done again.
///
/// # Errors
/// The monitors', within [`CreateError::Incomplete`] where the pool is known to be there and not to be finished.
pub(super) fn make(
    monitors: &Ask<'_>,
    wanted: &Wanted<'_>,
    state: State,
    groups: u32,
) -> Result<(), CreateError> {
    let unfinished = name_of(wanted.name);
    for command in &wanted.needs {
        ask(monitors, command)?;
    }
    if state == State::Missing {
        let mut command =
            json!({ "prefix": "osd pool create", "pool": unfinished, "pg_num": groups });
        if let (Some(command), Some(how)) = (command.as_object_mut(), wanted.how.as_object()) {
            command.extend(how.clone());
        }
        ask(monitors, &command)?;
    }
    complete(monitors, wanted, &unfinished, state).map_err(|why| match why {
        // If that was the last command, the pool may be finished.
        CreateError::NoAnswer { .. } | CreateError::Overtaken { .. } => why,
        _ => CreateError::Incomplete { pool: unfinished, why: Box::new(why) },
    })?;
    let is_completed = state == State::Unfinished;
    tracing::info!(pool = wanted.name, is_completed, "a pool is made");
    Ok(())
}

fn complete(
    monitors: &Ask<'_>,
    wanted: &Wanted<'_>,
    unfinished: &str,
    state: State,
) -> Result<(), CreateError> {
    let mut settings = wanted.settings.clone();
    // The former request may have asked for a mode.
    let says_mode = settings.iter().any(|(variable, _)| *variable == COMPRESSION);
    if state == State::Unfinished && !says_mode {
        settings.push((COMPRESSION, NO_MODE.to_owned()));
    }
    for (variable, value) in settings {
        let prefix = "osd pool set";
        let set = json!({ "prefix": prefix, "pool": unfinished, "var": variable, "val": value });
        ask(monitors, &set)?;
    }
    // What `rbd pool init` does.
    let prefix = "osd pool application enable";
    ask(monitors, &json!({ "prefix": prefix, "pool": unfinished, "app": APPLICATION }))?;
    let prefix = "osd pool rename";
    let rename = json!({ "prefix": prefix, "srcpool": unfinished, "destpool": wanted.name });
    match ask(monitors, &rename) {
        Err(CreateError::Refused { error, .. }) if error.raw_os_error() == Some(libc::EEXIST) => {
            let (pool, unfinished) = (wanted.name.to_owned(), unfinished.to_owned());
            Err(CreateError::Overtaken { pool, unfinished })
        }
        renamed => renamed.map(drop),
    }
}

/// What a pool is called while it is made.
fn name_of(pool: &str) -> String {
    format!("{pool}{UNFINISHED_SUFFIX}")
}

/// A pool, as `osd dump` describes it.
fn pool_in<'a>(dump: &'a Value, name: &str) -> Option<&'a Value> {
    dump["pools"].as_array()?.iter().find(|pool| pool["pool_name"] == name)
}

/// What kind of pool is asked for.
fn kind_asked<'a>(wanted: &'a Wanted<'_>) -> &'a str {
    wanted.how["pool_type"].as_str().unwrap_or_default()
}

/// What kind of pool it is, as `osd pool create` has it.
fn kind(pool: &Value) -> &'static str {
    match pool["type"].as_u64() {
        Some(REPLICATED) => "replicated",
        Some(ERASURE_CODED) => "erasure",
        _ => "unknown",
    }
}

/// Refuses a pool that somebody has made, where it takes no images as it is. Others are used as they are.
fn check_usable(found: &Value, wanted: &Wanted<'_>) -> Result<(), CreateError> {
    let pool = wanted.name;
    if let Some((difference, advice)) = unusable(found, wanted) {
        return Err(CreateError::Unusable { pool: pool.to_owned(), difference, advice });
    }
    if found["application_metadata"].get(APPLICATION).is_none() {
        tracing::warn!(
            pool,
            "it is there without the application '{APPLICATION}', and the cluster warns of that: ceph osd pool application enable {pool} {APPLICATION}"
        );
    }
    Ok(())
}

/// Why a pool takes no images, and what to do; none if it does.
fn unusable(found: &Value, wanted: &Wanted<'_>) -> Option<(Difference, String)> {
    let (pool, has, asked) = (wanted.name, kind(found), kind_asked(wanted));
    if asked == "replicated" && has != asked {
        let advice = "Only a replicated pool has names and headers of images: name another one";
        return Some((Difference::new("pool_type", has, asked), advice.to_owned()));
    }
    let flags = found["flags_names"].as_str().unwrap_or_default();
    if has == "erasure" && !flags.split(',').any(|flag| flag == "ec_overwrites") {
        let advice = format!("Change it: ceph osd pool set {pool} {OVERWRITES} true");
        return Some((Difference::new(OVERWRITES, "false", "true"), advice));
    }
    None
}

/// What cannot be changed of a pool that is not finished, and is not as it was asked for: it was made for other options.
fn other_work(found: &Value, rules: &Value, wanted: &Wanted<'_>) -> Option<Difference> {
    let profile = "erasure_code_profile";
    let text = |of: &Value| of[profile].as_str().unwrap_or_default().to_owned();
    let domain = found["crush_rule"].as_u64().and_then(|rule| failure_domain(rules, rule));
    let domain = domain.unwrap_or_else(|| "unknown".to_owned());
    [
        Difference::new("pool_type", kind(found), kind_asked(wanted)),
        Difference::new(profile, &text(found), &text(&wanted.how)),
        Difference::new("the failure domain", &domain, wanted.domain),
    ]
    .into_iter()
    .find(|it| it.has != it.wanted)
}

/// How many objects a pool holds, as `df` says; none that the monitors do not have figures of yet.
fn objects(df: &Value, name: &str) -> u64 {
    let mut pools = df["pools"].as_array().into_iter().flatten();
    let pool = pools.find(|pool| pool["name"] == name);
    pool.and_then(|pool| pool["stats"]["objects"].as_u64()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
