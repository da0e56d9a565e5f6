//! What images in pools of Ceph say of themselves to those who have nothing but Ceph's tools: which disk of which VM each is, and which
//! keys open it. `vmseal-rbd` keeps it as metadata of the image (`rbd image-meta list POOL/IMAGE`).
//!
//! It is copied from the header whenever that changes, and whenever the disk is opened to be written: so it also becomes right where a
//! process died between the two. The header counts; nothing here reads what was noted but to compare it. A note that cannot be made is no
//! error.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use vmseal_api::datastore::ImageContent;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, DiskFacts};
use vmseal_api::id::{DiskId, ProviderId, VmId};
use vmseal_api::rbd::{DISK_ATTRIBUTE, FORMAT_ATTRIBUTE, KEK_ATTRIBUTE, NOTE_MAX, VM_ATTRIBUTE};

/// What stands for the keys of a disk in the clear.
const NO_KEY: &str = "none";

/// An image that is open to be written, and what it is.
pub struct Noted<'a> {
    /// Where it is. In a directory nothing is noted.
    pub here: &'a DatastoreSpec,
    /// The VM.
    pub vm: VmId,
    /// The disk.
    pub disk: DiskId,
    /// Whether it has a header. What a guest writes to a disk in the clear is not taken for one.
    pub encrypted: bool,
}

impl Noted<'_> {
    /// Has the image say what it is. Blocks.
    pub fn note(&self, file: &File) {
        if !matches!(self.here.location, DatastoreLocation::Rbd { .. }) {
            return;
        }
        if let Err(error) = self.try_note(file) {
            // A vmseal-rbd of an earlier version, too, and a disk that is too short to be an image.
            tracing::debug!(vm = %self.vm, disk = %self.disk, %error, "an image does not say which keys open it");
        }
    }

    fn try_note(&self, file: &File) -> io::Result<()> {
        let keys = self.keys(file)?;
        // It is written last: where it is right the others are.
        if said(file)?.as_ref() == Some(&keys) {
            return Ok(());
        }
        let (vm, disk) = (self.vm.to_string(), self.disk.to_string());
        let format = if self.encrypted { "luks2" } else { "raw" };
        for (name, value) in [
            (VM_ATTRIBUTE, vm.as_str()),
            (DISK_ATTRIBUTE, disk.as_str()),
            (FORMAT_ATTRIBUTE, format),
            (KEK_ATTRIBUTE, keys.as_str()),
        ] {
            rustix::fs::fsetxattr(file, name, value.as_bytes(), XattrFlags::empty())?;
        }
        Ok(())
    }

    /// The keys that its header names for this disk.
    fn keys(&self, file: &File) -> io::Result<String> {
        if !self.encrypted {
            return Ok(NO_KEY.to_owned());
        }
        let (references, _) =
            vmseal_luks::inspect(file).map_err(|error| io::Error::other(error.to_string()))?;
        let own = references.iter().filter(|it| (it.vm, it.disk) == (self.vm.0, self.disk.0));
        let keys = list(own.map(|it| (ProviderId(it.provider), it.key_id.as_str())));
        keys.ok_or_else(|| io::Error::other("its header names no key, or one with a strange id"))
    }
}

/// Whether an image with these facts has a header.
#[must_use]
pub fn is_encrypted(facts: &DiskFacts) -> bool {
    *facts != DiskFacts::Raw
}

/// Keys as they are noted; none where there are none, or they cannot be noted.
fn list<'a>(keys: impl Iterator<Item = (ProviderId, &'a str)>) -> Option<String> {
    let keys: Vec<_> = keys.map(|(provider, key_id)| format!("{provider}/{key_id}")).collect();
    let text = keys.join(",");
    let fits = !text.is_empty() && text.len() <= NOTE_MAX && !text.chars().any(char::is_control);
    fits.then_some(text)
}

/// The keys that an image says open it.
fn said(file: &File) -> io::Result<Option<String>> {
    let mut value = vec![0_u8; NOTE_MAX];
    read(rustix::fs::fgetxattr(file, KEK_ATTRIBUTE, &mut value[..]), &value)
}

fn read(got: rustix::io::Result<usize>, value: &[u8]) -> io::Result<Option<String>> {
    match got {
        Ok(length) => Ok(Some(String::from_utf8_lossy(&value[..length]).into_owned())),
        Err(Errno::NODATA) => Ok(None),
        // vmseal writes no such note.
        Err(Errno::RANGE) => Ok(Some(format!("more than {NOTE_MAX} bytes"))),
        Err(error) => Err(error.into()),
    }
}

/// What the image there says of its keys, where its header says something else. The text is not trusted: every user of the pool can write
/// it. Blocks.
#[must_use]
pub fn contradiction(at: &Path, content: &ImageContent) -> Option<String> {
    let ImageContent::Vmseal { claims } = content else { return None };
    let keys = list(claims.iter().map(|claim| (claim.provider, claim.key_id.as_str())));
    let mut value = vec![0_u8; NOTE_MAX];
    // In a directory there is none.
    let said = read(rustix::fs::lgetxattr(at, KEK_ATTRIBUTE, &mut value[..]), &value).ok()??;
    (keys.as_ref() != Some(&said)).then(|| said.chars().filter(|it| !it.is_control()).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use vmseal_api::datastore::Claim;
    use vmseal_api::id::DatastoreId;
    use vmseal_luks::Identity;
    use vmseal_secret::{DEK_LEN, KEK_LEN, SecretBytes};

    use super::*;
    use crate::keys;
    use crate::storage::pool;

    fn at(location: DatastoreLocation) -> DatastoreSpec {
        DatastoreSpec { datastore: DatastoreId::new(), location }
    }

    fn in_pool(path: &Path) -> DatastoreSpec {
        at(DatastoreLocation::Rbd { path: path.to_owned(), pool: Box::new(pool::tests::pool()) })
    }

    #[test]
    fn an_image_in_a_pool_says_which_keys_its_header_names() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(vmseal_luks::DATA_OFFSET + (1 << 20)).unwrap();
        let (vm, disk) = (VmId::new(), DiskId::new());
        let (dek, kek) =
            (SecretBytes::random(DEK_LEN).unwrap(), SecretBytes::random(KEK_LEN).unwrap());
        let reference = keys::reference_of(&kek, vm, "key-7");
        let identity = Identity {
            disk: disk.0,
            holes: vmseal_luks::Holes::Zero,
            shared: false,
            role: Default::default(),
        };
        let context = keys::context(vm, &reference);
        vmseal_luks::create(&mut file, 1 << 20, &dek, &kek, &context, identity).unwrap();
        let here = in_pool(directory.path());
        let of = Noted { here: &here, vm, disk, encrypted: true };
        let wanted = format!("{}/key-7", reference.provider);
        assert_eq!(of.keys(&file).unwrap(), wanted);
        // The header of another disk, and a disk in the clear that looks like one.
        assert!(Noted { disk: DiskId::new(), ..of }.keys(&file).is_err());
        let of = Noted { here: &here, vm, disk, encrypted: false };
        assert_eq!(of.keys(&file).unwrap(), NO_KEY);
        let claim = Claim {
            vm,
            disk,
            provider: reference.provider,
            key_id: "key-7".to_owned(),
            role: Default::default(),
        };
        let content = ImageContent::Vmseal { claims: vec![claim] };
        let elsewhere = at(DatastoreLocation::Dir { path: directory.path().to_owned() });
        Noted { here: &elsewhere, vm, disk, encrypted: true }.note(&file);
        if let Ok(noted) = said(&file) {
            assert_eq!(noted, None, "an image in a directory was noted");
            Noted { here: &here, vm, disk, encrypted: true }.note(&file);
            assert_eq!(said(&file).unwrap(), Some(wanted));
            assert_eq!(contradiction(&path, &content), None);
            // Noted as it was before.
            let set = |value: &[u8]| {
                rustix::fs::fsetxattr(&file, KEK_ATTRIBUTE, value, XattrFlags::empty())
            };
            set(b"provider/former").unwrap();
            assert_eq!(contradiction(&path, &content).as_deref(), Some("provider/former"));
            // More than is read here. Not every file system takes so much.
            if set(&[b'k'; NOTE_MAX + 1]).is_ok() {
                assert!(contradiction(&path, &content).is_some());
            }
            Noted { here: &here, vm, disk, encrypted: true }.note(&file);
            assert_eq!(contradiction(&path, &content), None);
        }
        // Without a header nothing is noted, and nothing fails.
        file.write_all_at(&vec![0; vmseal_luks::DATA_OFFSET as usize], 0).unwrap();
        Noted { here: &here, vm, disk, encrypted: true }.note(&file);
    }

    #[test]
    fn keys_that_are_no_text_of_one_line_are_not_noted() {
        let provider = ProviderId::new();
        let of = |ids: &[&str]| list(ids.iter().map(|id| (provider, *id)));
        assert_eq!(of(&["a", "b"]), Some(format!("{provider}/a,{provider}/b")));
        let long = "k".repeat(NOTE_MAX);
        assert_eq!(of(&[]), None);
        for wrong in ["a\nb", long.as_str()] {
            assert_eq!(of(&[wrong]), None);
        }
    }
}
