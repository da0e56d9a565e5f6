//! What goes before the copied disks of a guest that comes from another host: the memory that snapshots keep, what the TPM of a VM keeps
//! that does not run, and of a disk with layers all files that nobody writes. See [`super::migration`].
//!
//! ```text
//!  for each part: it is made ─► it can be written ─► the source tells its end ─► flushed ─► the next one
//! ```
//! A filter serves one file at a time, with those below it, which are whole by then.

use std::fs::File;
use std::io::{Cursor, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::VmSpec;
use vmseal_api::problem::Problem;

use super::arriving_keys::ArrivingKeys;
use super::arriving_server::Server;
use super::migration::{Link, Message, SentBefore};
use super::{Shared, internal};
use crate::storage::arriving::ArrivingDisk;
use crate::storage::home::{Beside, Home};
use crate::storage::sent_memory;
use crate::storage::sent_tpm;

/// Takes what goes before these disks; each has its active layer afterwards, which is empty.
///
/// # Errors
/// Those of the connection, the files and the filters.
pub async fn take(
    shared: &Arc<Shared>,
    spec: &VmSpec,
    disks: &mut [ArrivingDisk],
    before: &[SentBefore],
    keys: ArrivingKeys<'_>,
    link: &mut Link,
) -> Result<(), Problem> {
    for (place, (disk, before)) in disks.iter_mut().zip(before).enumerate() {
        for memory in before.beside() {
            take_memory(spec, (place, disk), memory, keys, link).await?;
        }
        if before.tpm {
            take_tpm(shared, spec, (place, disk), keys, link).await?;
        }
        let parts = disk.layers.as_ref().map_or(0, |layers| layers.parts());
        for part in 0..parts {
            if part > 0 {
                make_next(disk).await?;
            }
            let server = Server::start(shared, spec, disk).await?;
            let carried = link.carry_part(place, server.connect()?)?;
            link.send(&Message::Part).await?;
            link.carried(place, carried).await?;
            server.end(disk.disk.disk).await?;
        }
        if parts > 0 {
            make_next(disk).await?;
        }
    }
    Ok(())
}

/// Makes the next layer of a disk, which is the one to be written then.
async fn make_next(disk: &mut ArrivingDisk) -> Result<(), Problem> {
    let Some(mut layers) = disk.layers.take() else { return Ok(()) };
    let image = disk.file.try_clone().map_err(internal)?;
    let make = move || {
        let length = image.metadata().map_err(internal)?.len();
        let files: Vec<File> = layers.make_next(length)?;
        Ok::<_, Problem>((layers, files))
    };
    let (layers, files) = spawn_blocking(make).await.map_err(internal)??;
    (disk.layers, disk.above) = (Some(layers), files);
    Ok(())
}

async fn take_memory(
    spec: &VmSpec,
    (place, disk): (usize, &ArrivingDisk),
    memory: Beside,
    keys: ArrivingKeys<'_>,
    link: &mut Link,
) -> Result<(), Problem> {
    let (theirs, ours) = UnixStream::pair().map_err(internal)?;
    let carried = link.carry_part(place, ours)?;
    link.send(&Message::Part).await?;
    let (id, spec, apart) = (disk.disk.disk, spec.clone(), keys.apart()?);
    let datastore = disk.disk.datastore.clone();
    // It ends with the connection, too; then the end of the part does not come.
    let receive = move || {
        let home = Home::of(&datastore, spec.vm)?;
        match apart {
            None => sent_memory::receive(&home, id, &memory, theirs),
            Some((transit, kek)) => {
                let mut theirs = theirs;
                let header = transit.arrived(&spec, &kek, &memory, &mut theirs)?;
                sent_memory::receive(&home, id, &memory, Cursor::new(header).chain(theirs))
            }
        }
    };
    spawn_blocking(receive).await.map_err(internal)??;
    link.carried(place, carried).await
}

async fn take_tpm(
    shared: &Arc<Shared>,
    spec: &VmSpec,
    (place, disk): (usize, &ArrivingDisk),
    keys: ArrivingKeys<'_>,
    link: &mut Link,
) -> Result<(), Problem> {
    let transit = keys.transit.cloned();
    let transit =
        transit.ok_or_else(|| internal("there is nothing that it could be sealed under"))?;
    let (theirs, ours) = UnixStream::pair().map_err(internal)?;
    let carried = link.carry_part(place, ours)?;
    link.send(&Message::Part).await?;
    let of = (spec.vm, disk.disk.disk);
    // It ends with the connection, too.
    let receive = move || sent_tpm::receive(of, &transit, theirs);
    let kept = spawn_blocking(receive).await.map_err(internal)??;
    link.carried(place, carried).await?;
    let builder = shared.builder(shared.run_dir.import(disk.disk.disk));
    sent_tpm::keep(spec.vm, disk, kept, &shared.swtpm, &builder).await
}
