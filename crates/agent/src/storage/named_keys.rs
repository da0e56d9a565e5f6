//! Which keys the headers of a VM's disks name. After the loss of a server, they and the descriptor are all that tells it.

use std::io::ErrorKind;
use std::path::PathBuf;

use vmseal_api::datastore::{Claim, ImageContent};
use vmseal_api::host::VmSpec;
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_error::failed;
use crate::storage::image_content::look;

/// Refuses if the header of one of these images of a disk does not name the VM's key. An image that is not there is passed over, and
/// nothing of the header is authenticated. Blocks.
///
/// # Errors
/// `key-mismatch`; those of the file system.
pub fn check(images: &[PathBuf], spec: &VmSpec, disk: DiskId) -> Result<(), Problem> {
    for path in images {
        let found = match look(path) {
            Ok(Some((_, ImageContent::Vmseal { claims }))) => claims,
            // It has no header that names a key.
            Ok(_) => continue,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(path, "read", &error)),
        };
        let is_key = |claim: &Claim| {
            let key = spec.key.as_ref();
            key.is_some_and(|key| (claim.provider, &claim.key_id) == (key.provider, &key.key_id))
        };
        let own = |claim: &Claim| (claim.vm, claim.disk) == (spec.vm, disk) && is_key(claim);
        if !found.iter().any(own) {
            let what = format!(
                "the header of {} names another key than the VM is registered with: the inventory may be older than the VM's last recryption (vmseal datastore adopt gives it the right key)",
                path.display(),
            );
            return Err(Problem::new(ErrorCode::KeyMismatch, what));
        }
    }
    Ok(())
}
