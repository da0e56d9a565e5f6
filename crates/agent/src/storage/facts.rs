//! What the inventory pins of a disk, and the same as crate luks has it.

use vmseal_api::datastore::HeaderRole;
use vmseal_api::hardware::Firmware;
use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_luks::{Facts, Role};

/// Facts as the inventory keeps them.
#[must_use]
pub fn to_api(facts: &Facts) -> DiskFacts {
    DiskFacts::Luks2 {
        version: facts.version,
        cipher: facts.cipher.clone(),
        key_bits: facts.key_bits,
        sector_size: facts.sector_size,
        data_offset: facts.data_offset,
    }
}

/// What the header of a VM's disk is to say that it is for.
pub(crate) fn role_of(spec: &VmSpec, disk: &DiskSpec) -> Role {
    match disk.role {
        DiskRole::Data => Role::Data,
        DiskRole::CloudInit => Role::CloudInit,
        DiskRole::UefiVariables if spec.hardware.firmware == Firmware::UefiSecureBoot => {
            Role::SecureBootVariables
        }
        DiskRole::UefiVariables => Role::UefiVariables,
        DiskRole::Tpm => Role::Tpm,
    }
}

/// The same as servers are told it.
pub(crate) fn told_role(role: Role) -> HeaderRole {
    match role {
        Role::Data => HeaderRole::Data,
        Role::CloudInit => HeaderRole::CloudInit,
        Role::UefiVariables => HeaderRole::UefiVariables,
        Role::SecureBootVariables => HeaderRole::SecureBootVariables,
        Role::Tpm => HeaderRole::Tpm,
    }
}

/// The pinned facts in the type of crate luks; none for a raw disk.
pub(crate) fn from_api(disk: &DiskSpec, facts: &DiskFacts) -> Option<Facts> {
    of_disk(disk.disk, disk.size, facts)
}

/// The same of a disk of this size that is described elsewhere.
pub(crate) fn of_disk(disk: DiskId, size: u64, facts: &DiskFacts) -> Option<Facts> {
    match facts {
        DiskFacts::Raw => None,
        DiskFacts::Luks2 { version, cipher, key_bits, sector_size, data_offset } => Some(Facts {
            version: *version,
            disk: disk.0,
            size,
            data_offset: *data_offset,
            sector_size: *sector_size,
            key_bits: *key_bits,
            cipher: cipher.clone(),
        }),
    }
}
