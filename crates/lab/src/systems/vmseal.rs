//! vmseal itself: a `vmseal-filter` process, started by hand as its agent would start it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use vmseal_api::filter::{
    BackendSpec, CRYPT_SECTOR, DiskConfig, FilterConfig, FilterSpec, FrontEndSpec, Handle, Holes,
    VERSION,
};
use vmseal_api::id::{DiskId, VmId};

use super::{Place, Program, Server, System, SystemError};

/// Where an encrypted disk's data begins: LUKS2's default, so that alignment is as in real disks.
const DATA_OFFSET: u64 = 16 << 20;
/// An AES-256-XTS key.
const KEY_LENGTH: usize = 64;

/// A `vmseal-filter` on a raw file.
#[derive(Clone, Debug)]
pub struct Vmseal {
    /// vmseal-filter.
    pub filter: Program,
    /// With encryption, under a key of the disk's own.
    pub encrypted: bool,
}

impl Vmseal {
    fn configuration(&self, place: &Place) -> FilterConfig {
        let offset = if self.encrypted { DATA_OFFSET } else { 0 };
        let crypt = FilterSpec::Crypt { key: Handle::Path(key_path(place)), holes: Holes::Zero };
        FilterConfig {
            version: VERSION,
            vm: VmId::new(),
            control: Handle::Path(place.directory.join("control")),
            control_uid: None,
            request_id: None,
            log_levels: None,
            disks: vec![DiskConfig {
                disk: DiskId::new(),
                size: place.size / u64::from(CRYPT_SECTOR) * u64::from(CRYPT_SECTOR),
                serial: "laboratory".to_owned(),
                read_only: false,
                chain: self.encrypted.then_some(crypt).into_iter().collect(),
                backend: BackendSpec::File {
                    file: Handle::Path(place.disk()),
                    offset,
                    direct: Default::default(),
                    keeps_room: false,
                },
                front_end: Some(FrontEndSpec::VhostUserBlk {
                    socket: Handle::Path(place.socket()),
                    peer_uid: None,
                    queues: 1,
                }),
                beside: None,
                import: None,
                export: None,
            }],
        }
    }
}

impl System for Vmseal {
    fn id(&self) -> &'static str {
        if self.encrypted { "vmseal-encrypted" } else { "vmseal-plain" }
    }

    fn encrypts(&self) -> bool {
        self.encrypted
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        if self.encrypted {
            let path = key_path(place);
            make_key(&path).map_err(|source| SystemError::File { path, source })?;
        }
        place.make_disk(place.size + if self.encrypted { DATA_OFFSET } else { 0 })
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        let path = place.directory.join("filter.json");
        let failed = |source| SystemError::File { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(&self.configuration(place))
            .map_err(|error| failed(error.into()))?;
        fs::write(&path, text).map_err(failed)?;
        let mut command = self.filter.command();
        command.arg("--config").arg(&path);
        Server::start(self.id(), &self.filter, command, core, place.socket())
    }
}

fn key_path(place: &Place) -> PathBuf {
    place.directory.join("key")
}

/// A key that protects nothing but a test's pattern and goes with the directory, so that a file may
/// hold it.
fn make_key(path: &Path) -> io::Result<()> {
    let mut key = [0; KEY_LENGTH];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(&key)
}
