//! Changing the keys that open a VM's disks and sealed files, and marking those disks whose data keys others get. Only the headers
//! are written, in an order that survives a power cut at any point (crate luks). All encrypted disks of the VM are opened before
//! the first is written: one that is missing, damaged or in use fails the change before anything is written. Those of a VM that is
//! off are locked; those of a guest are locked by the processes that serve it, which read headers only at their start.
//!
//! ```text
//!             add(new)                registered with the new one           drop_others
//!   one key ───────────► two keys ─────────────────────────────► two keys ─────────────► one key
//! ```

use std::fs::File;

use vmseal_api::host::{DiskSpec, KeyReference, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_luks::{Facts, HeaderError};
use vmseal_seal::slot::VmKey;
use vmseal_secret::SecretBytes;

use crate::keys;
use crate::rules;
use crate::storage::facts;
use crate::storage::home::Home;
use crate::storage::image_notes::Noted;
use crate::storage::locked::Access;
use crate::storage::open;
use crate::storage::opening;
use crate::storage::replica::ReplicaHeader;
use crate::storage::sealed_keys::SealedKeys;

/// A disk whose header may be changed.
struct DiskHeader<'a> {
    replica: Option<ReplicaHeader>,
    disk: &'a DiskSpec,
    facts: Facts,
    /// The image, its lock held by this process or by one that serves it to the guest.
    file: File,
}

impl DiskHeader<'_> {
    /// Has an image in a pool say which keys open it now.
    fn note(&self, spec: &VmSpec) {
        let (here, disk) = (&self.disk.datastore, self.disk.disk);
        Noted { here, vm: spec.vm, disk, encrypted: true }.note(&self.file);
    }
}

/// The encrypted disks and sealed files of a VM, all of which open with its registered key.
pub struct DiskKeys<'a> {
    spec: &'a VmSpec,
    registered: &'a KeyReference,
    kek: &'a SecretBytes,
    headers: Vec<DiskHeader<'a>>,
    sealed: Vec<SealedKeys>,
}

impl<'a> DiskKeys<'a> {
    /// Opens all of them. Blocks.
    ///
    /// # Errors
    /// As [`open::open`]; `wrong-state` when one has not been made.
    pub fn open(
        spec: &'a VmSpec,
        registered: &'a KeyReference,
        kek: &'a SecretBytes,
        access: Access,
    ) -> Result<Self, Problem> {
        let encrypted = spec.disks().filter(|disk| disk.encrypted);
        let header = |disk: &'a DiskSpec| {
            let unmade = || {
                let what = format!("has not made its disk '{}' yet", disk.name);
                rules::wrong_state(spec, &what)
            };
            let pinned = disk.facts.as_ref().ok_or_else(unmade)?;
            let file = open::open(spec, disk, pinned, Some(kek), access)?.into_own();
            let facts = facts::from_api(disk, pinned).ok_or_else(unmade)?;
            let replica = ReplicaHeader::open(spec, disk, access)?;
            Ok(DiskHeader { replica, disk, facts, file })
        };
        let headers = encrypted.map(header).collect::<Result<_, Problem>>()?;
        let key = VmKey { kek, context: keys::context(spec.vm, registered) };
        // No guest uses these.
        let access = if access == Access::Read { Access::Read } else { Access::Write };
        let sealed = SealedKeys::open_all(spec, &key, access)?;
        Ok(Self { spec, registered, kek, headers, sealed })
    }

    /// Adds another KEK that opens them beside the registered one. Blocks.
    ///
    /// # Errors
    /// `damaged`, `no-space`; all of them still open with the registered one.
    pub fn add(&mut self, other: &KeyReference, kek: &SecretBytes) -> Result<(), Problem> {
        let held = (self.kek, &keys::context(self.spec.vm, self.registered));
        let added = (kek, &keys::context(self.spec.vm, other));
        for header in &mut self.headers {
            let failed = |error| opening::header_problem(&header.disk.name, &error);
            let (known, _) = vmseal_luks::inspect(&header.file).map_err(failed)?;
            let is = |token: &vmseal_luks::KeyReference, key: &KeyReference| {
                token.provider == key.provider.0 && token.key_id == key.key_id
            };
            let left = known.iter().any(|token| !is(token, self.registered) && !is(token, other));
            let (file, facts) = (&mut header.file, &header.facts);
            // An abandoned attempt may have left another key, and there is room for one only.
            if left {
                vmseal_luks::drop_other_keks(file, facts, held.0, held.1).map_err(failed)?;
            }
            vmseal_luks::add_kek(file, facts, held, added).map_err(failed)?;
            header.note(self.spec);
        }
        let registered =
            VmKey { kek: self.kek, context: keys::context(self.spec.vm, self.registered) };
        let added = VmKey { kek, context: keys::context(self.spec.vm, other) };
        self.sealed.iter_mut().try_for_each(|file| file.add(&registered, &added))?;
        self.tell_replicas()
    }

    /// Removes all KEKs but the registered one. Blocks.
    ///
    /// # Errors
    /// As [`DiskKeys::add`].
    pub fn drop_others(&mut self) -> Result<(), Problem> {
        // The descriptor is updated before the key that it names is removed, for readers that have nothing
        // but the datastore.
        for header in &self.headers {
            let here = &header.disk.datastore;
            Home::of(here, self.spec.vm)?.describe(self.spec, here, Some(self.kek))?;
        }
        let context = keys::context(self.spec.vm, self.registered);
        for header in &mut self.headers {
            vmseal_luks::drop_other_keks(&mut header.file, &header.facts, self.kek, &context)
                .map_err(|error| opening::header_problem(&header.disk.name, &error))?;
            header.note(self.spec);
        }
        let registered =
            VmKey { kek: self.kek, context: keys::context(self.spec.vm, self.registered) };
        self.sealed.iter_mut().try_for_each(|file| file.keep_only(&registered))?;
        self.tell_replicas()
    }

    /// Marks those of these disks that are encrypted: others may have their data keys. Blocks.
    ///
    /// # Errors
    /// `in-use` where a disk opens with another key, too; else as [`DiskKeys::add`].
    pub fn mark_shared(&mut self, disks: &[DiskId]) -> Result<(), Problem> {
        let (vm, context) = (self.spec, keys::context(self.spec.vm, self.registered));
        for header in self.headers.iter_mut().filter(|it| disks.contains(&it.disk.disk)) {
            let (name, file) = (&header.disk.name, &mut header.file);
            let marked = vmseal_luks::mark_shared(file, &header.facts, self.kek, &context);
            marked.map_err(|error| match error {
                HeaderError::TwoKeys => {
                    let what = format!(
                        "disk '{name}' of VM '{0}' opens with two keys: a change of its key is under way, or has left one. Wait for it, or repeat it (vmseal vm recrypt {0})",
                        vm.name
                    );
                    Problem::new(ErrorCode::InUse, what)
                }
                error => opening::header_problem(name, &error),
            })?;
        }
        self.tell_replicas()
    }

    /// The caller relies on the replicas opening with the same keys as the disks.
    fn tell_replicas(&self) -> Result<(), Problem> {
        for DiskHeader { replica, disk, facts, file } in &self.headers {
            if let Some(replica) = replica {
                replica.copy((self.spec, Some(self.kek)), disk, file, facts.data_offset)?;
            }
        }
        Ok(())
    }
}

/// Whether the headers of all encrypted disks of a VM name a key, so that it can become the VM's while its guest uses them. No
/// header is unlocked. Blocks.
///
/// # Errors
/// Those of opening an image, or of a header that is damaged.
pub fn all_name(spec: &VmSpec, key: &KeyReference) -> Result<bool, Problem> {
    for disk in spec.disks().filter(|disk| disk.encrypted) {
        let Some(file) = Home::of(&disk.datastore, spec.vm)?.open_beside_guest(disk.disk)? else {
            return Ok(false);
        };
        let named = vmseal_luks::inspect(&file)
            .map_err(|error| opening::header_problem(&disk.name, &error))?;
        if !named.0.iter().any(|it| it.provider == key.provider.0 && it.key_id == key.key_id) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device};
    use vmseal_api::id::DatastoreId;
    use vmseal_api::replica::ReplicaPlace;
    use vmseal_luks::{Holes, Identity};
    use vmseal_secret::{DEK_LEN, KEK_LEN};

    use super::*;
    use crate::process::run_dir;
    use crate::storage::datastore;
    use crate::storage::replica;

    /// All that comes before the data of a disk.
    const HEAD: usize = vmseal_luks::DATA_OFFSET as usize;

    /// A VM with three encrypted disks on two datastores, and its key.
    struct Bench {
        directory: tempfile::TempDir,
        spec: VmSpec,
        kek: SecretBytes,
    }

    impl Bench {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let kek = SecretBytes::random(KEK_LEN).unwrap();
            let mut spec = run_dir::tests::spec();
            spec.key = Some(keys::reference_of(&kek, spec.vm, "old"));
            let places = ["one", "two"].map(|name| {
                let path = directory.path().join(name);
                std::fs::create_dir(&path).unwrap();
                let location = DatastoreLocation::Dir { path };
                let place = DatastoreSpec { datastore: DatastoreId::new(), location };
                datastore::probe(&place).unwrap();
                place
            });
            let disk =
                |place: usize| run_dir::tests::disk(&format!("disk{place}"), &places[place % 2]);
            spec.devices = (0..3).map(disk).map(Device::Disk).collect();
            let mut this = Self { directory, spec, kek };
            (0..3).for_each(|index| this.make(index));
            this
        }

        fn make(&mut self, index: usize) {
            let disk = self.spec.disk_at(index).unwrap();
            let home = Home::of(&disk.datastore, self.spec.vm).unwrap();
            let length = vmseal_luks::DATA_OFFSET + disk.size;
            let mut file = home.begin(&self.spec, disk, length).unwrap();
            let dek = SecretBytes::random(DEK_LEN).unwrap();
            let context = keys::context(self.spec.vm, self.spec.key.as_ref().unwrap());
            let identity = Identity {
                disk: disk.disk.0,
                holes: Holes::Zero,
                shared: false,
                role: Default::default(),
            };
            let (size, kek) = (disk.size, &self.kek);
            let made = vmseal_luks::create(&mut file, size, &dek, kek, &context, identity);
            home.finish(disk.disk, &file).unwrap();
            self.spec.disk_at_mut(index).unwrap().facts = Some(facts::to_api(&made.unwrap()));
        }

        fn image(&self, index: usize) -> std::path::PathBuf {
            let disk = self.spec.disk_at(index).unwrap();
            Home::of(&disk.datastore, self.spec.vm).unwrap().image(disk.disk)
        }

        fn heads(&self) -> Vec<Vec<u8>> {
            let heads = (0..2).map(|index| std::fs::read(self.image(index)).unwrap());
            heads.map(|image| image[..HEAD].to_vec()).collect()
        }

        fn open(&self) -> Result<DiskKeys<'_>, Problem> {
            self.open_with(Access::Write)
        }

        fn open_with(&self, access: Access) -> Result<DiskKeys<'_>, Problem> {
            DiskKeys::open(&self.spec, self.spec.key.as_ref().unwrap(), &self.kek, access)
        }

        fn new_key(&self, id: &str) -> (KeyReference, SecretBytes) {
            let kek = SecretBytes::random(KEK_LEN).unwrap();
            (keys::reference_of(&kek, self.spec.vm, id), kek)
        }

        /// Registers the VM with another key.
        fn switch(
            &mut self,
            (key, kek): (KeyReference, SecretBytes),
        ) -> (KeyReference, SecretBytes) {
            let old = self.spec.key.replace(key).unwrap();
            (old, std::mem::replace(&mut self.kek, kek))
        }
    }

    #[test]
    fn all_disks_change_their_key_and_the_datastores_name_it() {
        let mut bench = Bench::new();
        let new = bench.new_key("new");
        bench.open().unwrap().add(&new.0, &new.1).unwrap();
        bench.open().unwrap();
        let old = bench.switch(new);
        bench.open().unwrap().drop_others().unwrap();
        bench.open().unwrap();
        for index in 0..3 {
            let folder = bench.image(index);
            let named = std::fs::read_dir(folder.parent().unwrap()).unwrap();
            let text =
                named.filter_map(|entry| std::fs::read_to_string(entry.unwrap().path()).ok());
            let text: String = text.filter(|text| text.len() < 1 << 16).collect();
            assert!(text.contains("\"new\"") && !text.contains("\"old\""), "{text}");
        }
        let new = bench.switch(old);
        assert_eq!(bench.open().err().unwrap().code, ErrorCode::KeyMismatch);
        bench.switch(new);
        bench.open().unwrap();
    }

    #[tokio::test]
    async fn a_replica_opens_with_the_keys_of_its_disk_before_they_count() {
        let mut bench = Bench::new();
        let datastore = bench.spec.disk_at(1).unwrap().datastore.clone();
        bench.spec.disk_at_mut(0).unwrap().replica =
            Some(ReplicaPlace { datastore, bytes_per_second: 1 << 20 });
        let (vm, disk) = (bench.spec.vm, bench.spec.disk_at(0).unwrap().clone());
        let home = |place: &DatastoreSpec| Home::of(place, vm).unwrap();
        let there = home(&bench.spec.disk_at(1).unwrap().datastore);
        let image = home(&disk.datastore).open(disk.disk).unwrap().unwrap();
        let made = replica::for_writer(&bench.spec, &disk, &image, vmseal_luks::DATA_OFFSET).await;
        drop((made.unwrap().unwrap(), image));
        let is_equal = |bench: &Bench| {
            let head = |path| std::fs::read(path).unwrap()[..HEAD].to_vec();
            head(there.replica(disk.disk)) == head(bench.image(0))
        };
        let before = std::fs::read(bench.image(0)).unwrap();
        let new = bench.new_key("new");
        bench.open().unwrap().add(&new.0, &new.1).unwrap();
        let after = std::fs::read(bench.image(0)).unwrap();
        assert!(is_equal(&bench) && after != before);
        bench.switch(new);
        // If the replica is in use, nothing is changed.
        let held = there.open_replica(disk.disk, Access::Write).unwrap();
        assert_eq!(bench.open().err().unwrap().code, ErrorCode::InUse);
        assert!(std::fs::read(bench.image(0)).unwrap() == after);
        drop(held);
        bench.open().unwrap().drop_others().unwrap();
        assert!(is_equal(&bench), "the key that was dropped opens the replica");
        // The filter of a guest has both.
        let image = home(&disk.datastore).open(disk.disk).unwrap();
        let held = (image, there.open_replica(disk.disk, Access::Write).unwrap());
        let newer = bench.new_key("newer");
        bench.open_with(Access::BesideGuest).unwrap().add(&newer.0, &newer.1).unwrap();
        assert!(is_equal(&bench) && std::fs::read(bench.image(0)).unwrap() != after);
        drop(held);
        std::fs::remove_file(there.replica(disk.disk)).unwrap();
        let refused = bench.open_with(Access::BesideGuest).err().unwrap();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    }

    /// The last disk is gone, in use, damaged, not made, or on a datastore that is not mounted: no other is
    /// changed.
    #[test]
    fn one_disk_that_cannot_be_opened_leaves_all_as_they_were() {
        type Spoil = fn(&mut Bench) -> Option<File>;
        let cases: [(&str, ErrorCode, Spoil); 5] = [
            ("gone", ErrorCode::NotFound, |bench| {
                std::fs::remove_file(bench.image(2)).unwrap();
                None
            }),
            ("in use", ErrorCode::InUse, |bench| {
                let disk = bench.spec.disk_at(2).unwrap();
                Home::of(&disk.datastore, bench.spec.vm).unwrap().open(disk.disk).unwrap()
            }),
            ("damaged", ErrorCode::Damaged, |bench| {
                let file = File::options().write(true).open(bench.image(2)).unwrap();
                file.set_len(4096).unwrap();
                None
            }),
            ("not made", ErrorCode::WrongState, |bench| {
                bench.spec.disk_at_mut(2).unwrap().facts = None;
                None
            }),
            ("not mounted", ErrorCode::WrongState, |bench| {
                let place = bench.directory.path();
                std::fs::rename(place.join("two"), place.join("elsewhere")).unwrap();
                std::fs::create_dir(place.join("two")).unwrap();
                // Disks on it cannot be examined; the others come first.
                bench.spec.devices.swap(1, 2);
                None
            }),
        ];
        for (what, code, spoil) in cases {
            let mut bench = Bench::new();
            let first = bench.image(0);
            let before = std::fs::read(&first).unwrap();
            let both = (what != "not mounted").then(|| bench.heads());
            let held = spoil(&mut bench);
            let refused = bench.open().err().unwrap_or_else(|| panic!("{what}: opened"));
            assert_eq!(refused.code, code, "{what}: {refused}");
            drop(held);
            assert_eq!(std::fs::read(&first).unwrap(), before, "{what}");
            assert!(both.is_none_or(|both| both == bench.heads()), "{what}");
        }
    }
}
