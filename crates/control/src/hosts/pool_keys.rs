//! The keys (cephx) of pools of Ceph that the server holds: from the inventory, where they are wrapped, to the agents that mount the
//! pools, sealed to each.
//!
//! ```text
//!  authority's private key, datastore ── HKDF ──> wrapping key ── AES-KWP ──> inventory
//!                                                              agent's key box ── HPKE ──> agent's memory
//! ```

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::host::version::POOL_KEYS;
use vmseal_api::host::{HostAgent, HostDescription, PoolKey, Remount, SealedKey, pool_key_info};
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::derive::{datastore_wrapping_key, pool_key_fingerprint};
use vmseal_secret::sealed_box::BoxError;
use vmseal_secret::{SecretBytes, sealed_box, wrap};
use zeroize::Zeroizing;

use super::{is_silence, keys};
use crate::store::datastore_keys::Kept;
use crate::store::datastores::{Datastore, OnHost};
use crate::store::events::NewEvent;
use crate::store::{Store, datastore_keys, datastores};

/// The private key of the authority in the data directory.
const AUTHORITY: &str = "ca.key";

fn wrapping_key(data_dir: &Path, datastore: DatastoreId) -> Result<SecretBytes, Problem> {
    let path = data_dir.join(AUTHORITY);
    let text = std::fs::read(&path).map(Zeroizing::new).map_err(|error| {
        let detail = format!("{}, which keys of pools are wrapped by: {error}", path.display());
        Problem::new(ErrorCode::Internal, detail)
    })?;
    let der = PrivatePkcs8KeyDer::from_pem_slice(&text).map_err(|error| {
        let detail = format!("{} is damaged: {error}", path.display());
        Problem::new(ErrorCode::Internal, detail)
    })?;
    let mut der = Zeroizing::new(der.secret_pkcs8_der().to_vec());
    let authority = SecretBytes::from_wiped(&mut der).map_err(|error| crate::internal(&error))?;
    datastore_wrapping_key(&authority, *datastore.0.as_bytes())
        .map_err(|error| crate::internal(&error))
}

/// The key of a datastore as the inventory has it.
///
/// # Errors
/// The authority's key cannot be read.
pub(crate) fn wrapped(
    data_dir: &Path,
    datastore: DatastoreId,
    key: &SecretBytes,
) -> Result<Kept, Problem> {
    let wrapped = wrap::wrap(&wrapping_key(data_dir, datastore)?, key);
    let wrapped = wrapped.map_err(|error| crate::internal(&error))?;
    Ok(Kept { wrapped: STANDARD.encode(wrapped), fingerprint: Some(fingerprint(key)?) })
}

/// Which key it is, for people.
fn fingerprint(key: &SecretBytes) -> Result<String, Problem> {
    pool_key_fingerprint(key).map_err(|error| crate::internal(&error))
}

/// The key of a datastore that the server holds.
///
/// # Errors
/// `wrong-state`: it holds none, or cannot open it any more.
pub(crate) async fn held(
    store: &Store,
    data_dir: &Path,
    datastore: &Datastore,
) -> Result<SecretBytes, Problem> {
    let again = |why: &str| {
        let name = &datastore.name;
        let detail = format!(
            "the server {why} the key of datastore '{name}': give it (vmseal datastore set {name} --key-file FILE)"
        );
        Problem::new(ErrorCode::WrongState, detail)
    };
    let kept = datastore_keys::get(&mut *store.read().await?, datastore.id).await?;
    let kept = kept.ok_or_else(|| again("does not hold"))?;
    let wrapping = wrapping_key(data_dir, datastore.id)?;
    let wrapped = STANDARD.decode(&kept.wrapped).map_err(|_| again("cannot read"))?;
    let key = wrap::unwrap(&wrapping, &wrapped).map_err(|_| again("cannot open"))?;
    if kept.fingerprint.is_none() {
        let (id, fingerprint) = (datastore.id, fingerprint(&key)?);
        let mut write = store.write().await?;
        datastore_keys::set_fingerprint(&mut write, id, &kept.wrapped, &fingerprint).await?;
        write.commit().await?;
    }
    Ok(key)
}

/// Gives the agent of a host the key of a datastore's pool. It is on record before it leaves.
///
/// # Errors
/// The agent's, and the inventory's.
pub(crate) async fn give(
    store: &Store,
    agent: &dyn HostAgent,
    datastore: &str,
    on: &OnHost,
    key: &SecretBytes,
) -> Result<(), Problem> {
    let detail = format!("the key of its pool to host '{}'", on.host_name);
    let sealed = sealed(store, agent, (datastore, &detail), on, key).await?;
    let path = on.location.path().to_owned();
    agent.offer_pool_key(PoolKey { path, key: Some(sealed) }).await
}

/// Has the agent of a host see whether the cluster takes another key of a datastore's pool, or another way to it, and whether it is the
/// `cluster` with this fsid. The host keeps neither, and its mount stays as it is. The key is on record before it leaves.
///
/// # Errors
/// `unreachable` where the cluster refuses it, is another one, or does not answer the host; the agent's, and the inventory's.
pub(crate) async fn have_tried(
    store: &Store,
    agent: &dyn HostAgent,
    datastore: &Datastore,
    on: &OnHost,
    (key, cluster): (Option<&SecretBytes>, Option<&str>),
) -> Result<(), Problem> {
    let detail = format!("a key of its pool, only to be tried, to host '{}'", on.host_name);
    let key = match key {
        Some(key) => Some(sealed(store, agent, (&datastore.name, &detail), on, key).await?),
        None => None,
    };
    let cluster = cluster.map(str::to_owned);
    let remount = Remount { datastore: datastore.spec(on), only_try: true, key, cluster };
    agent.remount_datastore(remount).await.map(drop)
}

/// A key of a datastore's pool, sealed to the agent of a host, with what is on record from now on about that.
async fn sealed(
    store: &Store,
    agent: &dyn HostAgent,
    (datastore, detail): (&str, &str),
    on: &OnHost,
    key: &SecretBytes,
) -> Result<SealedKey, Problem> {
    let path = on.location.path();
    let key_box = agent.describe().await?.key_box;
    let public = keys::public_key(&key_box, &on.host_name)?;
    let sealed =
        sealed_box::seal(&public, &pool_key_info(path), key).map_err(|error| match error {
            BoxError::InfoLength(_) => {
                let what = "is too long for a pool whose key the server holds";
                Problem::invalid("location.path", what)
            }
            error => crate::internal(&error),
        })?;
    let mut write = store.write().await?;
    let kind = "datastore.key-delivered";
    write.event(NewEvent { kind, actor: crate::SELF, target: datastore, detail }).await?;
    write.commit().await?;
    Ok(SealedKey { key_box, sealed: STANDARD.encode(sealed.as_bytes()) })
}

/// Gives the agent of a host all keys of its pools that the server holds. One that it does not get is logged, and its datastore does
/// not answer.
///
/// # Errors
/// The inventory's; the host does not answer.
pub(crate) async fn give_all(
    store: &Store,
    data_dir: &Path,
    agent: &dyn HostAgent,
    (host, description): (HostId, &HostDescription),
) -> Result<(), Problem> {
    let here = datastores::of_host(&mut *store.read().await?, host).await?;
    for datastore in here {
        let Some(on) = datastore.on(host).filter(|on| is_held_for(on)) else { continue };
        if !description.features.iter().any(|feature| feature == POOL_KEYS) {
            tracing::warn!(
                host = on.host_name,
                "its agent takes no keys of pools: upgrade vmseal there"
            );
            return Ok(());
        }
        let given = async {
            let key = held(store, data_dir, &datastore).await?;
            give(store, agent, &datastore.name, on, &key).await
        };
        match given.await {
            Err(problem) if is_silence(&problem) => return Err(problem),
            Err(problem) => {
                tracing::warn!(datastore = datastore.name, host = on.host_name, %problem, "its key is not given");
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Whether the server holds the key of what a host has: a pool whose location names no keyring.
pub(crate) fn is_held_for(on: &OnHost) -> bool {
    on.location.pool().is_some_and(|pool| pool.keyring.is_none())
}
