//! The keys of pools of Ceph that the server holds: given with a datastore, changed later, forgotten by hosts that do not have it
//! any more.

use vmseal_api::datastore::SetDatastoreKey;
use vmseal_api::host::version::{POOL_KEYS, POOL_WAYS, TRY_POOL_KEYS};
use vmseal_api::host::{DatastoreLocation, PoolKey};
use vmseal_api::id::HostId;
use vmseal_api::model::Plan;
use vmseal_api::passphrase::{SealedPassphrase, of_datastore};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddDatastore;
use vmseal_secret::SecretBytes;
use vmseal_secret::cephx::CephxKey;

use super::caller::{Caller, Privilege};
use super::passphrases::open_passphrase;
use super::{Outcome, Services};
use crate::hosts::{is_silence, pool_keys};
use crate::store::datastore_keys;
use crate::store::datastores::{self, OnHost};
use crate::store::events::NewEvent;

/// How many hosts try a new key. The client's request times out after a minute. A host whose cluster does not answer takes 13 seconds: ten for
/// the answer, three until the process of the trial has ended.
const TRIALS_MAX: usize = 3;

/// Opens a key that was sealed for a datastore, which is called so in the request.
pub(super) fn open(
    services: &Services,
    called: &str,
    sealed: &SealedPassphrase,
) -> Result<SecretBytes, Problem> {
    let sent = open_passphrase(services, &of_datastore(called), sealed, "key")?;
    let invalid = |why: String| Problem::invalid("key.sealed", why);
    let key = CephxKey::bare(sent.expose()).map_err(|error| invalid(error.to_string()))?;
    key.to_secret().map_err(|error| crate::internal(&error))
}

/// Checks that a new datastore has a key as it is to have one: a pool in a keyring on its host, or with the server; a directory has none.
pub(super) fn check(request: &AddDatastore) -> Result<(), Problem> {
    let Some(pool) = request.location.pool() else {
        return match request.key {
            Some(_) => Err(Problem::invalid("key", "only a pool of Ceph has a key")),
            None => Ok(()),
        };
    };
    match (&pool.keyring, &request.key) {
        (Some(_), None) | (None, Some(_)) => Ok(()),
        (Some(_), Some(_)) => {
            let what = "the location names a keyring on the host as well: give one of the two";
            Err(Problem::invalid("key", what))
        }
        (None, None) => {
            let what = "name a keyring on the host, or give the key itself";
            Err(Problem::invalid("location.pool.keyring", what))
        }
    }
}

/// The key that a new datastore comes with, which the server is to hold. The request was [checked](check).
pub(super) fn of_request(
    services: &Services,
    request: &AddDatastore,
) -> Result<Option<SecretBytes>, Problem> {
    request.key.as_ref().map(|key| open(services, &request.name, key)).transpose()
}

/// Gives a host that is about to have a datastore the key of its pool, which nothing else there is mounted with.
pub(super) async fn give(
    services: &Services,
    datastore: &str,
    on: &OnHost,
    key: &SecretBytes,
) -> Result<(), Problem> {
    if let Some(known) = at_place(services, on).await? {
        let detail = format!(
            "host '{}' has datastore '{}' at {}: give another --path",
            on.host_name,
            known.name,
            on.location.path().display()
        );
        return Err(Problem::new(ErrorCode::AlreadyExists, detail));
    }
    let agent = services.hosts.connected(on.host)?;
    pool_keys::give(&services.store, &*agent, datastore, on, key).await
}

/// The datastore that a host has at this place, if it has one.
async fn at_place(
    services: &Services,
    on: &OnHost,
) -> Result<Option<datastores::Datastore>, Problem> {
    let here = datastores::of_host(&mut *services.store.read().await?, on.host).await?;
    let is_there = |known: &datastores::Datastore| {
        known.on(on.host).is_some_and(|it| it.location.path() == on.location.path())
    };
    Ok(here.into_iter().find(is_there))
}

/// Has a host that is about to have a datastore forget a pool that it had at this place before: it may not have answered when that was
/// removed.
pub(super) async fn forget_former(services: &Services, on: &OnHost) -> Result<(), Problem> {
    if at_place(services, on).await?.is_none() {
        forget(services, on.host, &on.location).await;
    }
    Ok(())
}

/// Has a host forget the key of a pool that it does not have any more, and by which way it got there. One that does not answer forgets the
/// key when its agent ends, and the way when another pool is to be mounted there.
pub(super) async fn forget(services: &Services, host: HostId, location: &DatastoreLocation) {
    let Some(pool) = location.pool() else { return };
    let view = services.hosts.view(host);
    let has_key = pool.keyring.is_none() && view.has(POOL_KEYS);
    if !has_key && !view.has(POOL_WAYS) {
        return;
    }
    let Ok(agent) = services.hosts.connected(host) else { return };
    let forgotten = PoolKey { path: location.path().to_owned(), key: None };
    if let Err(problem) = agent.offer_pool_key(forgotten).await {
        tracing::warn!(%host, %problem, "it does not forget a pool that it does not have any more");
    }
}

/// What is known of a new key.
enum Trial {
    /// The cluster has taken it, on this host.
    Taken(String),
    /// It is to be kept whatever it is.
    Forced,
    /// The agents that answer are of an earlier version, that of this host and of others.
    NotKnown(String),
}

impl Trial {
    /// For the event.
    fn recorded(&self) -> String {
        match self {
            Self::Taken(host) => format!("tried on host '{host}'"),
            Self::Forced | Self::NotKnown(_) => "untried".to_owned(),
        }
    }

    /// What the caller has to know.
    fn warnings(&self, datastore: &str, dry_run: bool) -> Vec<String> {
        let Self::NotKnown(host) = self else { return Vec::new() };
        let untried =
            format!("the key was not tried: the agent of host '{host}' is of an earlier version");
        // A remount tries the key that the server holds: after a dry run that is the former one.
        vec![match dry_run {
            true => untried,
            false => format!(
                "{untried}. Whether the cluster takes it is said by: vmseal datastore remount {datastore} --dry-run"
            ),
        }]
    }
}

/// Has hosts that are connected see whether the cluster takes a key, one after the other, until one can use it: another one may be unable
/// for reasons of its own.
///
/// # Errors
/// That of the first host which cannot use it, `unreachable` where the cluster refuses it or does not answer; `unreachable` where no host is
/// connected.
async fn have_tried(
    services: &Services,
    datastore: &datastores::Datastore,
    holders: &[&OnHost],
    key: &SecretBytes,
) -> Result<Trial, Problem> {
    let (mut earlier, mut silent, mut refused) = (None, None, None);
    let mut trials = 0;
    for on in holders {
        if trials == TRIALS_MAX {
            break;
        }
        let agent = match services.hosts.connected(on.host) {
            Ok(agent) => agent,
            Err(problem) => {
                silent = Some(problem);
                continue;
            }
        };
        let view = services.hosts.view(on.host);
        if !view.has(TRY_POOL_KEYS) {
            // One that has not been described yet may have it.
            earlier = earlier.or_else(|| view.description.map(|_| on.host_name.clone()));
            continue;
        }
        trials += 1;
        let tried = (Some(key), None);
        match pool_keys::have_tried(&services.store, &*agent, datastore, on, tried).await {
            Ok(()) => return Ok(Trial::Taken(on.host_name.clone())),
            // The host is gone, and not its cluster.
            Err(problem) if is_silence(&problem) && services.hosts.connected(on.host).is_err() => {
                silent = Some(problem);
            }
            Err(problem) => refused = refused.or(Some((on, problem))),
        }
    }
    if let Some((on, problem)) = refused {
        let detail = format!(
            "the key is not kept, as host '{}' cannot use it: {}. Keep it untried with --force",
            on.host_name, problem.detail
        );
        return Err(Problem { detail, ..problem });
    }
    if let Some(host) = earlier {
        return Ok(Trial::NotKnown(host));
    }
    let why = silent.map_or_else(|| "none is connected yet".to_owned(), |problem| problem.detail);
    let detail = format!(
        "the key is not kept, as no host of datastore '{}' can try it: {why}. Keep it untried with --force",
        datastore.name
    );
    Err(Problem::new(ErrorCode::Unreachable, detail))
}

/// The hosts of a datastore that the server gives its key.
fn holders<'a>(name: &str, hosts: &'a [OnHost]) -> Result<Vec<&'a OnHost>, Problem> {
    let holders: Vec<_> = hosts.iter().filter(|on| pool_keys::is_held_for(on)).collect();
    if !holders.is_empty() {
        return Ok(holders);
    }
    let place = hosts.iter().find_map(|on| on.location.pool()?.keyring.as_ref());
    let what = match place {
        Some(keyring) => format!(
            "the key of datastore '{name}' is in a file on its hosts by now ({}): try again",
            keyring.display()
        ),
        None => format!("datastore '{name}' is a directory, which has no key"),
    };
    Err(Problem::new(ErrorCode::WrongState, what))
}

/// Changes the key of a datastore that the server holds, once the cluster has taken it. A pool that is mounted stays so, with the former key.
/// Returns what the caller has to know of the key, too.
pub(super) async fn set(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetDatastoreKey,
    dry_run: bool,
) -> Result<Outcome<(datastores::Datastore, Vec<String>)>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    let key = open(services, name, &request.key)?;
    let before = datastores::find(&mut *services.store.read().await?, name).await?;
    let before = before.ok_or_else(|| Problem::not_found("datastore", name))?;
    let holders_before = holders(&before.name, &before.hosts)?;
    let trial = match request.force {
        true => Trial::Forced,
        false => have_tried(services, &before, &holders_before, &key).await?,
    };
    // Hosts may have come and gone during the trial.
    let mut write = services.store.write().await?;
    let found = datastores::find(&mut write, &before.id.to_string()).await?;
    let datastore = found.ok_or_else(|| Problem::not_found("datastore", name))?;
    if datastore.is_elsewhere_than(&before) {
        let detail = format!(
            "how hosts get to datastore '{}' was changed while the key was tried: it is not kept. Try again",
            datastore.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let hosts = datastore.hosts.clone();
    let holders = holders(&datastore.name, &hosts)?;
    let warnings = trial.warnings(&datastore.name, dry_run);
    let wrapped = pool_keys::wrapped(&services.data_dir, datastore.id, &key)?;
    datastore_keys::set(&mut write, datastore.id, &wrapped).await?;
    let (kind, target) = ("datastore.key-set", datastore.name.as_str());
    let names: Vec<_> = holders.iter().map(|on| format!("'{}'", on.host_name)).collect();
    let detail = format!("for hosts {}; {}", names.join(", "), trial.recorded());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    if dry_run {
        let taken = match &trial {
            Trial::Taken(host) => format!(", which the cluster has taken on host '{host}',"),
            Trial::Forced | Trial::NotKnown(_) => String::new(),
        };
        let step = format!(
            "hold this key{taken} in place of the former one, and give it to hosts {}",
            names.join(", ")
        );
        let (kind, target) = ("datastore.set-key".to_owned(), target.to_owned());
        let plan = Plan { kind, target, steps: vec![step], warnings, ..Plan::default() };
        return Ok(Outcome::Planned(plan));
    }
    write.commit().await?;
    let mut refused = None;
    for on in holders {
        // Also one that is not connected: its monitor may have given it the former key just now.
        let agent = services.hosts.agent(on.host)?;
        let given = pool_keys::give(&services.store, &*agent, target, on, &key).await;
        match given {
            // It gets the key when it answers again.
            Err(problem) if is_silence(&problem) && services.hosts.connected(on.host).is_err() => {}
            given => refused = refused.or(given.err().map(|problem| (on, problem))),
        }
    }
    if let Some((on, problem)) = refused {
        let detail = format!(
            "the server holds the new key; host '{}' has not got it: {}. Give it again",
            on.host_name, problem.detail
        );
        return Err(Problem { detail, ..problem });
    }
    let datastore = datastores::Datastore { key: wrapped.fingerprint, ..datastore };
    Ok(Outcome::Done((datastore, warnings)))
}

#[cfg(test)]
pub(super) mod tests;
