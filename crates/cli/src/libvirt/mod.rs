//! libvirt domains: read for an import, and printed of a VM.

mod forwards;
mod images;
mod interfaces;
mod machine;
mod networks;
mod node;
mod read;
mod shell;
mod tpm_state;
mod write;

pub use images::Images;
pub use machine::Variables;
pub use networks::Networks;
pub use read::{Disk, Domain, networks_in, read};
pub use tpm_state::TpmState;
pub use write::{Files, domain, domain_of_files, left_out};
