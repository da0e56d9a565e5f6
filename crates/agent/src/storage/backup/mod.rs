//! Backups of VMs in directories of this host (docs/formats/backup.md): the disks as they are, encrypted or not.
//!
//! ```text
//!  create   .<backup id>.unfinished/: image or overlay of each disk, its sums, what a TPM keeps ─► manifest.json ─► flushed │ commit: <backup id>/
//!  verify   files of the chain ─► a filter ─► sums, header ─► compared, opened; what a TPM kept ─► swtpm
//!  restore  files of the chain ─► a filter ─► <disk id>.restoring, compared, opened │ commit: <disk id>.raw, <disk id>.tpm/
//! ```
//! Somebody else may have written to the directory. So a confined filter reads images and overlays, and the agent reads only
//! manifests, sums and headers.

mod chain;
mod create;
mod directory;
mod manifest;
mod restore;
mod tpm;
mod verify;

pub use self::create::Creating;
pub use self::directory::{Backups, commit, discard, in_memory, read};
pub use self::manifest::manifest_of;
pub use self::restore::{Restoring, discard_restored, use_restored};
pub use self::tpm::TpmToKeep;
pub use self::verify::Verifying;
