//! The memory that a snapshot keeps, or that of a suspended VM, on its way between hosts that have different keys of the VM, as those of two control planes do.
//!
//! ```text
//!  source: opened with the VM's key there, sealed anew under the session ─► destination: its header is put under the VM's key here,
//!                                                                           then all of it is written
//! ```
//! No frame changes at the destination: the file's key, which the source has made for this way alone, is wrapped again. The header is
//! changed before anything is written, so no file of either host is ever under another key than the VM's there.

use std::io::Read;

use vmseal_api::host::VmSpec;
use vmseal_api::id::{DiskId, MigrationId, VmId};
use vmseal_api::problem::Problem;
use vmseal_seal::file::{FileError, HEADER_LEN, Header, Kind};
use vmseal_seal::slot::VmKey;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::KeyContext;

use crate::storage::builder::internal;
use crate::storage::home::Beside;
use crate::storage::sealed::vm_key;

/// What both hosts of such a session have in common.
pub struct MemoryTransit {
    session: SecretBytes,
    migration: MigrationId,
}

/// What the key of the VM's own memory is bound to: no snapshot's id.
const OWN: &str = "vm";

/// What the key of a memory is bound to on its way.
#[must_use]
pub fn name(which: &Beside) -> String {
    match which {
        Beside::SnapshotMemory(snapshot) => snapshot.to_string(),
        Beside::Memory => OWN.to_owned(),
        // None is sent.
        Beside::Core(name) => format!("core {name}"),
    }
}

/// The same of what the TPM keeps that has this disk ([`crate::storage::sent_tpm`]).
#[must_use]
pub fn name_of_tpm(disk: DiskId) -> String {
    format!("tpm {disk}")
}

/// Which memory it is, for people.
fn said(which: &Beside) -> String {
    match which {
        Beside::SnapshotMemory(snapshot) => format!("the memory of snapshot {snapshot}"),
        Beside::Memory | Beside::Core(_) => "the memory of the suspended VM".to_owned(),
    }
}

impl MemoryTransit {
    /// That of a session with this key.
    #[must_use]
    pub fn new(session: SecretBytes, migration: MigrationId) -> Self {
        Self { session, migration }
    }

    /// What a memory is sealed under on its way: the key of the session, bound to the VM, the migration and the snapshot as a VM's key
    /// is to its provider and its id there. `name` is what [`name`] says of it, or [`name_of_tpm`].
    #[must_use]
    pub fn key<'a>(&'a self, vm: VmId, name: &'a str) -> VmKey<'a> {
        let (vm, provider) = (*vm.0.as_bytes(), *self.migration.0.as_bytes());
        VmKey { kek: &self.session, context: KeyContext { vm, provider, key_id: name } }
    }

    /// Reads the header of a memory that has come; it is returned as it opens with the VM's key here, and with no other.
    ///
    /// # Errors
    /// `internal`: it is not this memory as this session sends it; `locked`; those of the stream.
    pub fn arrived(
        &self,
        spec: &VmSpec,
        kek: &SecretBytes,
        which: &Beside,
        from: &mut impl Read,
    ) -> Result<[u8; HEADER_LEN], Problem> {
        let refused = |error: FileError| {
            internal(format!("what came as {} is not taken: {error}", said(which)))
        };
        let mut header = Header::read(from).map_err(refused)?;
        let identity = header.identity();
        if identity.vm != spec.vm.0 || identity.kind != Kind::Memory {
            let what = format!("what came as {} is another file", said(which));
            return Err(internal(what));
        }
        let key = vm_key(spec, Some(kek))?;
        let key = key.ok_or_else(|| internal("the memory of a VM without a key needs no other"))?;
        let name = name(which);
        header.add_key(&self.key(spec.vm, &name), &key).map_err(refused)?;
        header.keep_only(&key).map_err(refused)?;
        Ok(header.encode())
    }
}
