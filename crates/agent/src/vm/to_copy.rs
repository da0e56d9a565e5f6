//! The disks of a guest that another host gets copies of, as they are when it is sent. See [`super::migration`].

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};
use vmseal_api::filter::Holes;
use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, MigrationId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::migration::{SentBefore, unexpected, unwrap_dek};
use super::{Shared, internal};
use crate::filter::{self, Control, CopyPlace};
use crate::storage::home::Home;
use crate::storage::layers::{self, LayerId, Tree};
use crate::storage::memory_transit::MemoryTransit;
use crate::storage::sent_memory;

/// What is to be copied.
pub struct ToCopy {
    pub shared: Arc<Shared>,
    pub spec: VmSpec,
    pub kek: Option<SecretBytes>,
    /// What the other host tells the keys of the copies under.
    pub told_under: Option<SecretBytes>,
    /// What the memory of snapshots is sealed under on its way, where the other host has another key of the VM.
    pub transit: Option<Arc<MemoryTransit>>,
    /// Of the guest's filter.
    pub control: Control,
    /// In the order of their connections.
    pub disks: Vec<Departing>,
}

impl ToCopy {
    /// Their ids, and what goes before each; none where nothing does.
    pub fn told(&self) -> (Vec<DiskId>, Vec<SentBefore>) {
        let ids = self.disks.iter().map(|departing| departing.disk.disk).collect();
        let before: Vec<_> = self.disks.iter().map(Departing::before).collect();
        (ids, if self.has_before() { before } else { Vec::new() })
    }

    /// Whether anything goes before them.
    pub fn has_before(&self) -> bool {
        self.disks.iter().any(|departing| !departing.before().is_nothing())
    }
}

/// What a filter is told of the copy of a disk, which has this key at the other host, behind this socket. `same_below`: only what the
/// disk's own layer has is copied.
pub(super) fn copy_of(
    what: &ToCopy,
    migration: MigrationId,
    of: &Departing,
    key: Option<&str>,
    (socket, same_below): (UnixStream, bool),
) -> Result<filter::Mirror, Problem> {
    let key = match (key, &what.told_under) {
        (Some(key), Some(secret)) => {
            let dek = unwrap_dek(secret, migration, of.disk.disk, key)?;
            Some((dek.to_memfd().map_err(internal)?, Holes::Zero))
        }
        (None, _) if !of.disk.encrypted => None,
        _ => return Err(unexpected()),
    };
    let to = CopyPlace::OtherHost { socket, same_below };
    Ok(filter::Mirror { to, key, map: map()?, pace: CopyPace::default(), cache: None })
}

/// A disk that is copied, and what goes before it.
pub struct Departing {
    pub disk: DiskSpec,
    pub facts: DiskFacts,
    pub(super) before: SentBefore,
    /// Its layers that nobody writes, in the order in which they are told.
    pub(super) layers: Vec<LayerId>,
}

impl Departing {
    /// Looks what goes before a disk. Blocks.
    ///
    /// # Errors
    /// Those of the note of its layers.
    pub fn of(spec: &VmSpec, (disk, facts): (DiskSpec, DiskFacts)) -> Result<Self, Problem> {
        let layers = layers::read(&Home::of(&disk.datastore, spec.vm)?, disk.disk)?;
        let (tree, (memories, own_memory)) =
            (Tree::of(&layers)?, sent_memory::beside(spec, &disk)?);
        let before = SentBefore { memories, own_memory, tpm: false, tree };
        Ok(Self { disk, facts, before, layers: layers.unwritten() })
    }

    /// The same of a VM that does not run: what its TPM keeps comes with no memory of a guest, and goes before the disk that has its key.
    #[must_use]
    pub fn at_rest(self) -> Self {
        let tpm = self.disk.role == DiskRole::Tpm;
        Self { before: SentBefore { tpm, ..self.before }, ..self }
    }

    /// Whether it has layers.
    pub fn has_layers(&self) -> bool {
        self.before.tree.is_some()
    }

    /// As the other host is told.
    pub fn before(&self) -> SentBefore {
        self.before.clone()
    }
}

/// The map of what a copy lacks. It is lost with the filter, and the migration with that.
fn map() -> Result<File, Problem> {
    let map = memfd_create(c"map of a copy", MFdFlags::MFD_CLOEXEC).map_err(internal)?;
    Ok(File::from(map))
}
