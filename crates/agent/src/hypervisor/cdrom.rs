//! The CD-ROM drive: the file that is in it, as QEMU gets it at its start and while the guest runs.
//!
//! QEMU gets the file as a descriptor that is open for reading alone, in a set of descriptors of its own. What QEMU calls
//! the medium has the number of that set, so that both can be removed when the medium is taken out.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::qmp::{Qmp, QmpError};

/// How QEMU's monitor knows the drive.
pub const DRIVE: &str = "cdrom";

/// The number of the set of descriptors of the medium that QEMU starts with; the console's log has the first.
const FIRST_SET: i64 = 2;

/// The first words of the names of media, before the numbers of their sets.
const MEDIUM: &str = "medium-";

/// How long a guest may take to open the drive that it has locked, before it is opened without the guest.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);

/// The pause between looks.
const RELEASE_INTERVAL: Duration = Duration::from_millis(100);

/// The options of a drive that QEMU starts with. `boot` is its place in the boot order, as QEMU reads it.
#[must_use]
pub fn options(medium: Option<&File>, boot: &str) -> Vec<[String; 2]> {
    let mut options = Vec::new();
    let mut drive = String::new();
    if let Some(medium) = medium {
        let fd = medium.as_raw_fd();
        let node = node(FIRST_SET);
        options.push(["-add-fd".to_owned(), format!("fd={fd},set={FIRST_SET}")]);
        let file = format!("file.driver=file,file.filename=/dev/fdset/{FIRST_SET}");
        let block = format!("driver=raw,node-name={node},read-only=on,{file}");
        options.push(["-blockdev".to_owned(), block]);
        drive = format!(",drive={node}");
    }
    options.push(["-device".to_owned(), format!("ide-cd,bus=ide.0,id={DRIVE}{drive}{boot}")]);
    options
}

/// Takes out what is in the drive, and puts in another medium, if there is one. May be repeated.
///
/// # Errors
/// QEMU's.
pub async fn change(qmp: &Qmp, medium: Option<&File>) -> Result<(), QmpError> {
    take_out(qmp).await?;
    if let Some(medium) = medium {
        let answer = qmp.add_descriptor(medium.as_fd()).await?;
        let set = answer["fdset-id"].as_i64().ok_or_else(|| {
            QmpError::Protocol("its answer to 'add-fd' has no number of a set".to_owned())
        })?;
        let put_in = put_in(qmp, set).await;
        if put_in.is_err() {
            forget(qmp, set).await;
        }
        put_in?;
    }
    qmp.execute("blockdev-close-tray", json!({"id": DRIVE})).await.map(drop)
}

async fn put_in(qmp: &Qmp, set: i64) -> Result<(), QmpError> {
    let block = json!({
        "driver": "raw",
        "node-name": node(set),
        "read-only": true,
        "file": {"driver": "file", "filename": format!("/dev/fdset/{set}")},
    });
    qmp.execute("blockdev-add", block).await?;
    qmp.execute("blockdev-insert-medium", json!({"id": DRIVE, "node-name": node(set)}))
        .await
        .map(drop)
}

/// Opens the drive, and takes out what is in it. A guest that has locked it is asked first.
async fn take_out(qmp: &Qmp) -> Result<(), QmpError> {
    let open =
        |force: bool| qmp.execute("blockdev-open-tray", json!({"id": DRIVE, "force": force}));
    match open(false).await {
        Ok(_) | Err(QmpError::Refused { .. }) => {}
        Err(error) => return Err(error),
    }
    let give_up = Instant::now() + RELEASE_TIMEOUT;
    while !is_open(qmp).await? && Instant::now() < give_up {
        sleep(RELEASE_INTERVAL).await;
    }
    open(true).await?;
    qmp.execute("blockdev-remove-medium", json!({"id": DRIVE})).await?;
    // Also what an agent has left that ended in the middle.
    for set in media(qmp).await? {
        forget(qmp, set).await;
    }
    Ok(())
}

/// Removes a medium that is in no drive, and its descriptor.
async fn forget(qmp: &Qmp, set: i64) {
    for (command, arguments) in
        [("blockdev-del", json!({"node-name": node(set)})), ("remove-fd", json!({"fdset-id": set}))]
    {
        if let Err(error) = qmp.execute(command, arguments).await {
            tracing::debug!(%error, set, "a medium of a CD-ROM drive is not QEMU's");
        }
    }
}

fn node(set: i64) -> String {
    format!("{MEDIUM}{set}")
}

/// The numbers of the sets of all media that QEMU has.
async fn media(qmp: &Qmp) -> Result<Vec<i64>, QmpError> {
    let listed = qmp.execute("query-named-block-nodes", json!({"flat": true})).await?;
    let names = listed.as_array().into_iter().flatten();
    let names = names.filter_map(|it| it["node-name"].as_str()?.strip_prefix(MEDIUM));
    Ok(names.filter_map(|set| set.parse().ok()).collect())
}

/// Whether the drive is open.
async fn is_open(qmp: &Qmp) -> Result<bool, QmpError> {
    let listed = qmp.execute("query-block", Value::Null).await?;
    open_in(&listed).ok_or_else(|| {
        QmpError::Protocol("its answer to 'query-block' does not have the CD-ROM drive".to_owned())
    })
}

fn open_in(listed: &Value) -> Option<bool> {
    // A drive that QEMU has made by itself is known by its path among QEMU's objects.
    let of_drive = |it: &&Value| {
        it["qdev"].as_str().is_some_and(|name| name.rsplit('/').next() == Some(DRIVE))
    };
    let drive = listed.as_array()?.iter().find(of_drive)?;
    Some(drive["tray_open"].as_bool().unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drive_is_found_among_others() {
        let listed = |name: &str| {
            json!([
                {"device": "", "qdev": "/machine/peripheral-anon/device[0]", "tray_open": true},
                {"device": "", "qdev": name, "tray_open": false},
            ])
        };
        for name in ["cdrom", "/machine/peripheral/cdrom"] {
            assert_eq!(open_in(&listed(name)), Some(false));
        }
        assert_eq!(open_in(&listed("other")), None);
    }
}
