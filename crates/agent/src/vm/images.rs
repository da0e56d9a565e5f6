//! Identifies the files of a running VM's disks by device and inode, so that a guest is never served another
//! file than its own, even if names change.
//!
//! The lock of an image protects the file, not its name: after `cp image x; mv x image` the filter has a file
//! without a name. The next filter would open the copy, and the guest's disk would silently be reset to the
//! time of the copy. So the first filter's files are recorded in the VM's run directory, each later filter
//! must open the same, and the names are checked periodically.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::statfs::{FUSE_SUPER_MAGIC, fstatfs};
use serde::{Deserialize, Serialize};
use vmseal_api::host::{DiskSpec, Notice, NoticeCode, VmSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::internal;
use crate::process::run_dir::ProcessDir;
use crate::storage::home::Home;
use crate::timed;
use vmseal_api::atomic_file::{self, PRIVATE};

/// The version of the record.
const VERSION: u32 = 1;

/// Of a file whose device is another one each time it is mounted.
const ANY_DEVICE: u64 = 0;

/// The record of a VM's images.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    images: Vec<Image>,
}

/// A disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Image {
    disk: DiskId,
    device: u64,
    inode: u64,
}

impl Image {
    /// Whether that is this file.
    fn is(&self, device: u64, inode: u64) -> bool {
        inode == self.inode && [device, ANY_DEVICE].contains(&self.device)
    }

    fn of(disk: DiskId, file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        // A pool of Ceph is another device each time it is mounted, and its inodes are never used again.
        let mounted_again = fstatfs(file)?.filesystem_type() == FUSE_SUPER_MAGIC;
        let device = if mounted_again { ANY_DEVICE } else { metadata.dev() };
        Ok(Self { disk, device, inode: metadata.ino() })
    }
}

/// The record; none when there is none.
fn read(directory: &ProcessDir) -> Result<Option<Vec<Image>>, Problem> {
    let path = directory.images();
    let unreadable = |error: &dyn std::fmt::Display| {
        internal(format!("{}, the record of the disks' files: {error}", path.display()))
    };
    match std::fs::read(&path) {
        Ok(text) => {
            let record: Record =
                serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
            Ok(Some(record.images))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(&error)),
    }
}

/// Checks that the files that were opened for a VM are those that it was started with; the first ones are
/// recorded.
///
/// # Errors
/// `damaged` where one is another file; those of reading and writing the record.
pub fn check(directory: &ProcessDir, opened: &[(&DiskSpec, &File)]) -> Result<(), Problem> {
    let images = opened.iter().map(|(disk, file)| Image::of(disk.disk, file));
    let images = images.collect::<io::Result<Vec<_>>>().map_err(internal)?;
    let Some(known) = read(directory)? else {
        return write(directory, images);
    };
    let mut known = known;
    let before = known.len();
    for (image, (disk, _)) in images.iter().zip(opened) {
        let was = known.iter().find(|known| known.disk == image.disk);
        if was.is_some_and(|was| was != image) {
            let what = format!(
                "disk '{}' is not served: its image was replaced by another file while the VM ran",
                disk.name
            );
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        if was.is_none() {
            // It was plugged in while the VM runs.
            known.push(*image);
        }
    }
    if known.len() == before { Ok(()) } else { write(directory, known) }
}

/// Records that a disk has another file from now on: its copy has taken its place.
///
/// # Errors
/// Those of reading and writing the record.
pub fn replace(directory: &ProcessDir, disk: DiskId, file: &File) -> Result<(), Problem> {
    let image = Image::of(disk, file).map_err(internal)?;
    let Some(mut known) = read(directory)? else { return Ok(()) };
    match known.iter_mut().find(|known| known.disk == disk) {
        Some(known) if *known == image => return Ok(()),
        Some(known) => *known = image,
        None => known.push(image),
    }
    write(directory, known)
}

fn write(directory: &ProcessDir, images: Vec<Image>) -> Result<(), Problem> {
    serde_json::to_vec(&Record { version: VERSION, images })
        .map_err(io::Error::from)
        .and_then(|json| atomic_file::write(&directory.images(), &json, PRIVATE))
        .map_err(internal)
}

/// The disks of a running VM whose images' names lead to other files or to none. Disks on datastores that do
/// not answer are not reported.
pub async fn exchanged(spec: &VmSpec, directory: &ProcessDir) -> Vec<Notice> {
    let known = match read(directory) {
        Ok(known) => known.unwrap_or_default(),
        Err(problem) => {
            tracing::warn!(vm = %spec.vm, %problem, "cannot determine whether images were replaced");
            return Vec::new();
        }
    };
    let mut notices = Vec::new();
    for disk in spec.disks() {
        let Some(&image) = known.iter().find(|known| known.disk == disk.disk) else { continue };
        let path = disk.datastore.location.path();
        let (vm, of) = (spec.vm, disk.clone());
        if let Ok(Some(detail)) = timed::quick_call(path, move || compare(vm, &of, image)).await {
            let code = NoticeCode::ImageExchanged;
            notices.push(Notice { code, disk: Some(disk.disk), detail });
        }
    }
    notices
}

/// The notice about an image whose name does not lead to it.
fn compare(vm: VmId, disk: &DiskSpec, image: Image) -> Result<Option<String>, Problem> {
    let path = Home::of(&disk.datastore, vm)?.image(disk.disk);
    let found = match path.symlink_metadata() {
        Ok(found) if image.is(found.dev(), found.ino()) => return Ok(None),
        Ok(found) => format!("is another file (inode {})", found.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => "is not there".to_owned(),
        Err(error) => return Err(internal(error)),
    };
    Ok(Some(notice_text(disk, &path, &found, image.inode)))
}

fn notice_text(disk: &DiskSpec, path: &Path, found: &str, inode: u64) -> String {
    let (name, path) = (&disk.name, path.display());
    format!(
        "disk '{name}': {path} {found}, and not the file that the VM was started with (inode {inode}). The running guest continues with its own file, which may have no name any more and is then lost when the VM stops; no other file is served to it. Put the original file back under its name; if it has no name, copy the disk out before the VM stops (vmseal disk expose). When the VM starts again it uses the file that is there then"
    )
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreSpec, Device};
    use vmseal_api::id::DatastoreId;

    use vmseal_api::host::DatastoreLocation;

    use super::*;
    use crate::process::run_dir::RunDir;

    struct Bench {
        directory: tempfile::TempDir,
        spec: VmSpec,
        run: ProcessDir,
    }

    /// A VM with a disk, whose directory is there.
    async fn bench() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        std::fs::create_dir(&path).unwrap();
        let location = DatastoreLocation::Dir { path };
        let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
        crate::storage::datastore::probe(&datastore).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices = vec![Device::Disk(DiskSpec {
            disk: DiskId::new(),
            name: "d".to_owned(),
            datastore,
            size: 4096,
            encrypted: false,
            allocation: Default::default(),
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        })];
        let run = RunDir::open(&directory.path().join("run")).unwrap().vm(spec.vm);
        run.renew().await.unwrap();
        Bench { directory, spec, run }
    }

    #[tokio::test]
    async fn a_file_in_the_place_of_an_image_is_refused_and_reported() {
        let Bench { directory, spec, run } = bench().await;
        let disk = spec.disk_at(0).unwrap();
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        let path = home.image(disk.disk);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "one").unwrap();
        let open = || File::open(&path).unwrap();
        assert!(exchanged(&spec, &run).await.is_empty(), "nothing is on record");
        // The second check is that of the next filter.
        for _ in 0..2 {
            check(&run, &[(disk, &open())]).unwrap();
            assert!(exchanged(&spec, &run).await.is_empty());
        }
        let (away, copy) = (directory.path().join("away"), directory.path().join("store/copy"));
        std::fs::copy(&path, &copy).unwrap();
        std::fs::rename(&path, &away).unwrap();
        let notice_text = exchanged(&spec, &run).await;
        assert!(notice_text[0].detail.contains("is not there"), "{notice_text:?}");
        std::fs::rename(&copy, &path).unwrap();
        let notice_text = exchanged(&spec, &run).await;
        assert_eq!((notice_text.len(), notice_text[0].code), (1, NoticeCode::ImageExchanged));
        assert!(
            notice_text[0].detail.contains("another file")
                && notice_text[0].detail.contains("disk 'd'")
        );
        let refused = check(&run, &[(disk, &open())]).unwrap_err();
        assert!(refused.code == ErrorCode::Damaged && refused.detail.contains("replaced"));
        std::fs::rename(&away, &path).unwrap();
        check(&run, &[(disk, &open())]).unwrap();
        // With an unreadable record nothing is served either.
        std::fs::write(run.images(), "{").unwrap();
        assert!(check(&run, &[(disk, &open())]).is_err());
    }
}
