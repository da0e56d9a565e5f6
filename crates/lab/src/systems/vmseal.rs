//! vmseal itself: a `vmseal-filter` process, started by hand as its agent would start it.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

use vmseal_api::filter::{
    BackendSpec, CRYPT_SECTOR, DiskConfig, FilterConfig, FilterSpec, FrontEndSpec, Handle, Holes,
    VERSION,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_secret::SecretBytes;

use super::{Place, Program, Server, System, SystemError};

/// Where an encrypted disk's data begins: LUKS2's default, so that alignment is as in real disks.
const DATA_OFFSET: u64 = 16 << 20;
/// An AES-256-XTS key.
const KEY_LENGTH: usize = 64;

/// A `vmseal-filter` on a raw file.
#[derive(Debug)]
pub struct Vmseal {
    filter: Program,
    key: Option<OwnedFd>,
}

impl Vmseal {
    /// Without encryption.
    #[must_use]
    pub fn plain(filter: Program) -> Self {
        Self { filter, key: None }
    }

    /// With a key of its own for as long as this value lives.
    ///
    /// # Errors
    /// There is no memory for secrets.
    pub fn encrypted(filter: Program) -> Result<Self, SystemError> {
        let key = SecretBytes::random(KEY_LENGTH)?.to_memfd()?;
        Ok(Self { filter, key: Some(key) })
    }

    fn configuration(&self, place: &Place, key: Option<&OwnedFd>) -> FilterConfig {
        let offset = if self.encrypts() { DATA_OFFSET } else { 0 };
        let crypt = |key: &OwnedFd| FilterSpec::Crypt {
            key: Handle::Fd(key.as_raw_fd()),
            holes: Holes::Zero,
        };
        FilterConfig {
            version: VERSION,
            vm: VmId::new(),
            control: Handle::Path(place.directory.join("control")),
            control_uid: None,
            disks: vec![DiskConfig {
                disk: DiskId::new(),
                size: place.size / u64::from(CRYPT_SECTOR) * u64::from(CRYPT_SECTOR),
                serial: "laboratory".to_owned(),
                read_only: false,
                chain: key.map(crypt).into_iter().collect(),
                backend: BackendSpec::File {
                    file: Handle::Path(place.disk()),
                    offset,
                    direct: Default::default(),
                },
                front_end: Some(FrontEndSpec::VhostUserBlk {
                    listen: Handle::Path(place.socket()),
                    peer_uid: None,
                    queues: 1,
                }),
                import: None,
            }],
        }
    }
}

impl System for Vmseal {
    fn id(&self) -> &'static str {
        if self.encrypts() { "vmseal-encrypted" } else { "vmseal-plain" }
    }

    fn encrypts(&self) -> bool {
        self.key.is_some()
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        place.make_disk(place.size + if self.encrypts() { DATA_OFFSET } else { 0 })
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        // A duplicate that the child inherits; ours is closed on exec.
        let inherited = self.key.as_ref().map(nix::unistd::dup).transpose().map_err(|errno| {
            SystemError::File { path: "the key's descriptor".into(), source: errno.into() }
        })?;
        let path = place.directory.join("filter.json");
        let failed = |source| SystemError::File { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(&self.configuration(place, inherited.as_ref()))
            .map_err(|error| failed(error.into()))?;
        fs::write(&path, text).map_err(failed)?;
        let mut command = self.filter.command();
        command.arg("--config").arg(&path);
        Server::start(self.id(), &self.filter, command, core, place.socket())
    }
}
