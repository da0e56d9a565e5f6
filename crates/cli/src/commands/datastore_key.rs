//! The key of a pool's user that the server is to hold: read here, and sealed for the server.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::datastore::{DatastoreHost, SetDatastoreKey};
use vmseal_api::model::{About, Datastore, RekeyedDatastore};
use vmseal_api::passphrase::{SealedPassphrase, of_datastore};
use vmseal_secret::SecretBytes;
use vmseal_secret::cephx::CephxKey;

use crate::arguments::Output;
use crate::passphrase;
use crate::print::{self, plan};
use crate::stream::say;

/// The key of `user` in a file, sealed for the datastore that the request calls `name`.
pub async fn sealed(
    server: &ServerClient,
    file: &Path,
    user: &str,
    name: &str,
) -> anyhow::Result<SealedPassphrase> {
    let key = read(file, user)?;
    let about: About = server.get("about").await?;
    passphrase::seal(&key, &of_datastore(name), &about.passphrase_box)
}

/// Changes the key that the server holds, or has the server hold it in place of a file on each host.
pub async fn set(
    server: &ServerClient,
    output: Output,
    (name, file, force): (&str, &Path, bool),
    dry_run: bool,
) -> anyhow::Result<()> {
    let path = format!("datastores/{name}");
    let datastore: Datastore = server.get(&path).await?;
    let user = datastore.hosts.iter().find_map(|on| on.location.pool()).map(|pool| &pool.user);
    let user = user.with_context(|| format!("datastore '{name}' is no pool of Ceph"))?;
    let request = SetDatastoreKey { key: sealed(server, file, user, name).await?, force };
    let path = format!("{path}/key");
    if dry_run {
        return plan::show(output, &server.try_put(&path, &request).await?);
    }
    let rekeyed: RekeyedDatastore = server.put(&path, &request).await?;
    for warning in &rekeyed.warnings {
        say(format!("warning: {warning}"));
    }
    let datastore = rekeyed.datastore;
    print::one(output, &datastore, &from_when(&datastore))
}

/// Whether the server holds the key that a host mounts a pool with.
fn is_held(on: &DatastoreHost) -> bool {
    on.location.pool().is_some_and(|it| it.keyring.is_none())
}

/// Which key each host's mount uses, of those that the server has given, or of the keyring on the host.
pub fn of_hosts(datastore: &Datastore) -> Vec<(&'static str, String)> {
    let said = |on: &DatastoreHost| {
        let host = &on.host;
        let uses = match &on.mounted_key {
            Some(key) if !is_held(on) => format!("{}, of its keyring", key.fingerprint),
            Some(key) if key.current => format!("{} (current)", key.fingerprint),
            Some(key) => format!(
                "{}, a former one, until the pool is mounted anew there (vmseal datastore remount)",
                key.fingerprint
            ),
            None => "it has not said which".to_owned(),
        };
        ("KEY", format!("host '{host}': {uses}"))
    };
    datastore.hosts.iter().filter(|on| on.location.pool().is_some()).map(said).collect()
}

/// From when on each host uses the new key, where it has the pool mounted with another one.
fn from_when(datastore: &Datastore) -> Vec<(&'static str, String)> {
    let name = &datastore.name;
    let said = |on: &DatastoreHost| {
        let (host, path) = (&on.host, on.location.path().display());
        let what = format!(
            "host '{host}' mounts the pool with the new key from now on. If it is mounted at {path} already, it stays so with the former key until vmseal datastore remount {name} --host {host}; guests wait for a second or two then"
        );
        ("NEW KEY", what)
    };
    let is_current = |on: &DatastoreHost| on.mounted_key.as_ref().is_some_and(|key| key.current);
    datastore.hosts.iter().filter(|on| is_held(on) && !is_current(on)).map(said).collect()
}

/// The key in a keyring, or by itself; `-` is standard input.
fn read(file: &Path, user: &str) -> anyhow::Result<SecretBytes> {
    let read = if file == Path::new("-") {
        CephxKey::read_of(io::stdin(), user)
    } else {
        File::open(file).and_then(|open| CephxKey::read_of(open, user))
    };
    let key = read.with_context(|| format!("the key file {}", file.display()))?;
    Ok(key.to_secret()?)
}
