//! What goes before the disks of a guest that is sent to another host, which gets copies of them: the memory that snapshots keep,
//! that of a VM which is suspended, what the TPM of a VM keeps that does not run, and of a disk with layers all files that nobody writes.
//! See [`super::migration`].
//!
//! ```text
//!  for each disk: a memory ─► … ─► the image ─► a layer, those below first ─► …      then the disk, of which the active layer is left
//! ```
//! Each is a part of the disk's connection. A file is read by a filter of its own beside the guest's, decrypted, and encrypted with the
//! key of the copy: what it has itself, and nothing else, as below it the copy shows the same.

use std::os::unix::net::UnixStream;

use tokio::task::spawn_blocking;
use vmseal_api::host::MigrationProgress;
use vmseal_api::id::MigrationId;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::internal;
use super::migration::{Link, Message, PREPARE_TIMEOUT, refused, unexpected};
use super::mirroring::copy_whole;
use super::to_copy::{Departing, ToCopy, copy_of};
use crate::storage::home::Beside;
use crate::storage::opening;
use crate::storage::sent_memory;
use crate::storage::sent_tpm::SendTpm;

/// Sends all of them, if there are any. Returns the keys of the copies, as the other host tells them, when it has the disks served.
///
/// # Errors
/// Those of the connection, the files and the filters; the other host's refusal.
pub async fn send(
    what: &ToCopy,
    migration: MigrationId,
    link: &mut Link,
    tell: impl Fn(MigrationProgress),
) -> Result<Vec<Option<String>>, Problem> {
    if what.has_before() {
        let keys = match link.receive(PREPARE_TIMEOUT).await? {
            Message::Made { keys } => keys,
            Message::Refused { why } => return Err(refused(&why)),
            _ => return Err(unexpected()),
        };
        send_parts(what, migration, &keys, link, tell).await?;
    }
    match link.receive(PREPARE_TIMEOUT).await? {
        Message::Prepared { keys } => Ok(keys),
        Message::Refused { why } => Err(refused(&why)),
        _ => Err(unexpected()),
    }
}

/// Sends them, as the other host asks for one after the other. It has made the disks with these keys.
async fn send_parts(
    what: &ToCopy,
    migration: MigrationId,
    keys: &[Option<String>],
    link: &mut Link,
    tell: impl Fn(MigrationProgress),
) -> Result<(), Problem> {
    if keys.len() != what.disks.len() {
        return Err(unexpected());
    }
    for (place, (disk, key)) in what.disks.iter().zip(keys).enumerate() {
        for memory in disk.before.beside() {
            send_memory(what, (place, disk), memory, link).await?;
        }
        if disk.before.tpm {
            send_tpm(what, (place, disk), link).await?;
        }
        if !disk.has_layers() {
            continue;
        }
        let image = std::iter::once(None);
        for layer in image.chain(disk.layers.iter().copied().map(Some)) {
            next_part(link).await?;
            let (theirs, ours) = UnixStream::pair().map_err(internal)?;
            let part = link.carry_part(place, ours)?;
            let copy = copy_of(what, migration, disk, key.as_deref(), (theirs, layer.is_some()))?;
            let builder = what.shared.builder(what.shared.run_dir.export(disk.disk.disk));
            let (spec, kek) = (what.spec.clone(), clone(what.kek.as_ref())?);
            let (of, facts) = (disk.disk.clone(), disk.facts.clone());
            let open = move || opening::open_layer(&spec, &of, &facts, kek.as_ref(), layer);
            let tell = |remaining, sent| {
                tell(MigrationProgress { remaining, sent, ..Default::default() });
            };
            copy_whole((what.spec.vm, disk.disk.clone()), open, copy, builder, tell).await?;
            link.carried(place, part).await?;
        }
    }
    Ok(())
}

/// Waits until the other host can write the next one.
///
/// # Errors
/// Those of the connection, and the other host's refusal.
pub(super) async fn next_part(link: &mut Link) -> Result<(), Problem> {
    match link.receive(PREPARE_TIMEOUT).await? {
        Message::Part => Ok(()),
        Message::Refused { why } => Err(refused(&why)),
        _ => Err(unexpected()),
    }
}

async fn send_memory(
    what: &ToCopy,
    (place, disk): (usize, &Departing),
    memory: Beside,
    link: &mut Link,
) -> Result<(), Problem> {
    next_part(link).await?;
    let (theirs, ours) = UnixStream::pair().map_err(internal)?;
    let part = link.carry_part(place, ours)?;
    let (spec, kek) = (what.spec.clone(), clone(what.kek.as_ref())?);
    let (disk, transit) = (disk.disk.clone(), what.transit.clone());
    // One that is given up ends with the connection.
    let send = move || {
        let keys = (kek.as_ref(), transit.as_deref());
        sent_memory::send(&spec, &disk, &memory, keys, theirs)
    };
    spawn_blocking(send).await.map_err(internal)??;
    link.carried(place, part).await
}

async fn send_tpm(
    what: &ToCopy,
    (place, disk): (usize, &Departing),
    link: &mut Link,
) -> Result<(), Problem> {
    let transit = what.transit.clone();
    let transit = transit.ok_or_else(|| internal("there is nothing to seal it under"))?;
    next_part(link).await?;
    let (theirs, ours) = UnixStream::pair().map_err(internal)?;
    let part = link.carry_part(place, ours)?;
    let kept = SendTpm {
        spec: what.spec.clone(),
        disk: disk.disk.clone(),
        facts: disk.facts.clone(),
        kek: clone(what.kek.as_ref())?,
        transit,
        swtpm: what.shared.swtpm.clone(),
    };
    let builder = what.shared.builder(what.shared.run_dir.export(disk.disk.disk));
    kept.run(&builder, theirs).await?;
    link.carried(place, part).await
}

fn clone(kek: Option<&SecretBytes>) -> Result<Option<SecretBytes>, Problem> {
    kek.map(SecretBytes::try_clone).transpose().map_err(internal)
}
