//! The descriptors of a VM on its datastores: written again in the background when what they say has changed, or when
//! the key is there that authenticates them. A datastore that does not answer holds up nothing. A descriptor that names the
//! key of the disks stays as it is where the VM is registered with another one: that is a notice.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use vmseal_api::host::{DatastoreSpec, Notice, NoticeCode, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::Owner;
use crate::keys;
use crate::storage::descriptor;
use crate::storage::facts::from_api;
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::opening::header_problem;

/// How long a VM that is unregistered waits for its descriptors: a datastore that answers takes less.
const DESCRIBED_TIMEOUT: Duration = Duration::from_secs(5);

impl Owner {
    /// Waits until no descriptor is being written: another host may get the VM, and writes its own from then on.
    pub(super) async fn until_described(&mut self) -> Result<(), Problem> {
        let Some(describing) = &mut self.describing else { return Ok(()) };
        if timeout(DESCRIBED_TIMEOUT, describing).await.is_err() {
            let what = format!(
                "the descriptors of VM '{}' are still being written: a datastore does not answer",
                self.spec.name
            );
            return Err(Problem::new(ErrorCode::TimedOut, what));
        }
        self.describing = None;
        Ok(())
    }

    /// Begins to write the descriptors, after those that are being written. Without the key of a VM that has one, it
    /// waits for that.
    pub(super) fn describe(&mut self) {
        if self.spec.key.is_some() && self.kek.is_none() {
            return;
        }
        let Ok(kek) = self.clone_kek() else { return };
        // What the next start is to have is what the inventory has.
        let spec = self.next.as_ref().unwrap_or(&self.spec).clone();
        let places = descriptor::places_of(&spec);
        let before: Option<JoinHandle<()>> = self.describing.take();
        let tell = self.tell_other_key.clone();
        self.describing = Some(tokio::spawn(async move {
            if let Some(before) = before {
                // What it wrote is older.
                let _ = before.await;
            }
            let write = move || {
                let (mut other_key, mut unread): (Option<String>, bool) = (None, false);
                for place in places.values() {
                    let Err(problem) = describe_at(place, &spec, kek.as_ref()) else { continue };
                    if problem.code == ErrorCode::KeyMismatch {
                        other_key = other_key.or(Some(problem.detail));
                    } else {
                        unread = true;
                        tracing::warn!(vm = %spec.vm, %problem, "its descriptor is not up to date");
                    }
                }
                let told = tell.borrow().clone();
                // A datastore that cannot be read does not say that the contradiction is over.
                let is_known = other_key.is_some() || !unread;
                if is_known && told != other_key {
                    if let Some(why) = &other_key {
                        tracing::warn!(vm = %spec.vm, why, "its descriptor is left as it is");
                    }
                    tell.send_replace(other_key);
                }
            };
            let _ = spawn_blocking(write).await;
        }));
    }
}

impl Owner {
    /// What an operator should know of its key.
    pub(super) fn notice_of_key(&self) -> Option<Notice> {
        let why = self.other_key.borrow().clone()?;
        let detail = format!("its descriptor is left as it is: {why}");
        Some(Notice { code: NoticeCode::KeyDiffers, disk: None, detail })
    }

    /// Tries again to write the descriptors that were left as they are: the headers may have changed since. Not while they are being
    /// written: each attempt has the key, and would wait for all before it where a datastore does not answer.
    pub(super) fn describe_if_left(&mut self) {
        let left = self.other_key.borrow().is_some();
        let writes = self.describing.as_ref().is_some_and(|describing| !describing.is_finished());
        if left && !writes {
            self.describe();
        }
    }
}

/// Writes the descriptor of a VM on one datastore. Blocks.
fn describe_at(
    place: &DatastoreSpec,
    spec: &VmSpec,
    kek: Option<&SecretBytes>,
) -> Result<(), Problem> {
    let home = Home::of(place, spec.vm)?;
    check_key(&home, spec, kek)?;
    home.describe_again(spec, place, kek)
}

/// Refuses a descriptor in the name of a key that does not open the disks, unless that key authenticates the descriptor
/// that is there. An inventory that was restored from an older backup has the key that the VM had then, and what is
/// found on a datastore may be anybody's: the descriptor stays as it was found.
fn check_key(home: &Home, spec: &VmSpec, kek: Option<&SecretBytes>) -> Result<(), Problem> {
    let there = home.descriptor().filter(|there| there.vm == spec.vm);
    if let (Some(there), Some(key), Some(kek)) = (&there, &spec.key, kek)
        && descriptor::is_authentic(there, key, kek)?
    {
        return Ok(());
    }
    let described = there.iter().flat_map(|there| &there.disks).filter(|disk| disk.encrypted);
    for disk in described {
        home.check_named_key(spec, disk.disk)?;
    }
    for disk in spec.disks().filter(|disk| disk.encrypted) {
        home.check_named_key(spec, disk.disk)?;
        let pinned = disk.facts.as_ref().and_then(|facts| from_api(disk, facts));
        if let (Some(pinned), Some(key), Some(kek)) = (pinned, &spec.key, kek)
            && let Some(image) = opened(&home.image(disk.disk))?
        {
            vmseal_luks::open(&image, &pinned, kek, &keys::context(spec.vm, key))
                .map_err(|error| header_problem(&disk.name, &error))?;
        }
    }
    Ok(())
}

/// An image, without its lock: only its header is read. None when there is none.
fn opened(path: &Path) -> Result<Option<File>, Problem> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, "opened", &error)),
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, Device, DiskSpec, KeyReference};
    use vmseal_api::id::{DatastoreId, DiskId};
    use vmseal_secret::{DEK_LEN, KEK_LEN};

    use super::*;
    use crate::process::run_dir;
    use crate::storage::datastore;
    use crate::storage::facts::to_api;

    /// An encrypted disk under this key.
    fn make(home: &Home, spec: &VmSpec, disk: DiskId, kek: &SecretBytes, key: &KeyReference) {
        let open = File::options().read(true).write(true).create(true).truncate(true).clone();
        let mut file = open.open(home.image(disk)).unwrap();
        file.set_len(vmseal_luks::DATA_OFFSET + (1 << 20)).unwrap();
        let dek = SecretBytes::random(DEK_LEN).unwrap();
        let identity = vmseal_luks::Identity {
            disk: disk.0,
            holes: vmseal_luks::Holes::Zero,
            shared: false,
            role: Default::default(),
        };
        let context = keys::context(spec.vm, key);
        vmseal_luks::create(&mut file, 1 << 20, &dek, kek, &context, identity).unwrap();
    }

    #[test]
    fn a_key_that_the_disks_do_not_name_replaces_none_in_a_descriptor() {
        let directory = tempfile::tempdir().unwrap();
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        let mut spec = run_dir::tests::spec();
        spec.devices = vec![Device::Disk(run_dir::tests::disk("system", &place))];
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let [old, new] = ["old", "new"].map(|id| keys::reference_of(&kek, spec.vm, id));
        let [older, newer] =
            [&old, &new].map(|key| VmSpec { key: Some(key.clone()), ..spec.clone() });
        let home = Home::of(&place, spec.vm).unwrap();
        let named = || home.descriptor().unwrap().key;
        home.describe(&newer, &place, Some(&kek)).unwrap();
        let disk = spec.disk_at(0).unwrap().disk;
        make(&home, &spec, disk, &kek, &new);
        let refused = describe_at(&place, &older, Some(&kek)).unwrap_err();
        assert_eq!((refused.code, named()), (ErrorCode::KeyMismatch, Some(new.clone())));
        // Nor by a disk that is begun under it.
        let mut more = older.clone();
        let added = DiskSpec {
            disk: DiskId::new(),
            name: "more".to_owned(),
            ..older.disk_at(0).unwrap().clone()
        };
        more.devices.push(Device::Disk(added.clone()));
        let length = vmseal_luks::DATA_OFFSET + added.size;
        let refused = home.begin(&more, &added, length).unwrap_err();
        assert_eq!((refused.code, named()), (ErrorCode::KeyMismatch, Some(new.clone())));
        assert!(home.descriptor().unwrap().mac.is_some());
        // What else has changed is written.
        let renamed = VmSpec { name: "other".to_owned(), ..newer };
        describe_at(&place, &renamed, Some(&kek)).unwrap();
        assert_eq!(home.descriptor().unwrap().name, "other");
        let mut made = renamed;
        for disk in made.disks_mut() {
            disk.facts = Some(to_api(&vmseal_luks::Facts::new(disk.disk.0, 1 << 20).unwrap()));
        }
        // What somebody else wrote is authenticated only by a key that opens the disks.
        let forged = || {
            let mut forged = home.descriptor().unwrap();
            forged.mac = None;
            let path = directory.path().join(spec.vm.to_string()).join("vm.json");
            std::fs::write(path, serde_json::to_vec(&forged).unwrap()).unwrap();
        };
        forged();
        let another = SecretBytes::random(KEK_LEN).unwrap();
        make(&home, &made, disk, &another, &new);
        describe_at(&place, &made, Some(&kek)).unwrap_err();
        assert_eq!(home.descriptor().unwrap().mac, None);
        make(&home, &made, disk, &kek, &new);
        describe_at(&place, &made, Some(&kek)).unwrap();
        assert!(home.descriptor().unwrap().mac.is_some());
        // A recryption is in the headers first.
        make(&home, &spec, disk, &kek, &old);
        describe_at(&place, &older, Some(&kek)).unwrap();
        assert_eq!(named(), Some(old));
    }
}
