//! Tells `vmseal-rbd` how the images of a VM are cut into objects. It is noted with the VM's home, so that all images that are made there
//! get it: disks, copies of them, replicas, and the layers of snapshots.

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
use vmseal_api::image_layout::ImageLayout;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::rbd::IMAGE_LAYOUT_ATTRIBUTE;

use crate::storage::file_error::failed;

/// Notes how images that are made in a VM's home from now on are cut into objects. In a directory there are none. Blocks.
///
/// # Errors
/// `unsupported` where a `vmseal-rbd` of an earlier version serves the pool; those of the cluster.
pub fn note(
    home: &Path,
    here: &DatastoreSpec,
    layout: Option<&ImageLayout>,
) -> Result<(), Problem> {
    let (Some(layout), DatastoreLocation::Rbd { path, .. }) = (layout, &here.location) else {
        return Ok(());
    };
    let noted = serde_json::to_vec(layout).map_err(io::Error::from).and_then(|text| {
        let set = rustix::fs::setxattr(home, IMAGE_LAYOUT_ATTRIBUTE, &text, XattrFlags::empty());
        set.map_err(io::Error::from)
    });
    let unknown = |error: &io::Error| {
        let number = error.raw_os_error();
        [Errno::OPNOTSUPP, Errno::NOSYS].iter().any(|it| number == Some(it.raw_os_error()))
    };
    match noted {
        // It makes no others.
        Err(error) if unknown(&error) && layout.is_usual() => Ok(()),
        Err(error) if unknown(&error) => {
            let what = format!(
                "the vmseal-rbd that serves {} is of an earlier version, and cuts all images into objects of the usual size: stop the VMs that have disks there and unmount it (umount {}), so that it is started anew",
                path.display(),
                path.display()
            );
            Err(Problem::new(ErrorCode::Unsupported, what))
        }
        Err(error) => Err(failed(home, "told how its images are cut into objects", &error)),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::DatastoreId;

    use super::*;
    use crate::storage::pool;

    fn on(location: DatastoreLocation) -> DatastoreSpec {
        DatastoreSpec { datastore: DatastoreId::new(), location }
    }

    /// What serves no images refuses the attribute: `/proc` does.
    #[test]
    fn what_cannot_be_noted_is_an_error_unless_nothing_is_asked() {
        let (home, path) = (Path::new("/proc"), Path::new("/proc").to_owned());
        let pool = Box::new(pool::tests::pool());
        let ceph = on(DatastoreLocation::Rbd { path: path.clone(), pool });
        let small = ImageLayout { object_size: Some(1 << 20), ..ImageLayout::default() };
        note(home, &ceph, None).unwrap();
        note(home, &on(DatastoreLocation::Dir { path }), Some(&small)).unwrap();
        note(home, &ceph, Some(&small)).unwrap_err();
    }
}
