//! vmseal itself: a `vmseal-filter` process, started like its agent starts it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmseal_api::filter::{
    BackendSpec, BackingSpec, CRYPT_SECTOR, DelaySpec, Direct, DiskConfig, FilterConfig,
    FilterSpec, FrontEndSpec, Handle, Holes, VERSION,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::transfer::ImageFormat;

use super::beside::Beside;
use super::{Acted, DATA_OFFSET, Place, Program, Server, System, SystemError, Transport};

/// The size of each of several disks is a multiple of this, in bytes: whole requests of any load.
const ALIGNMENT: u64 = 1 << 20;
/// An AES-256-XTS key.
const KEY_LENGTH: usize = 64;
/// The number of disks of a system with several; its name contains it.
pub const SEVERAL: usize = 8;

/// A `vmseal-filter` on raw files.
#[derive(Clone, Debug)]
pub struct Vmseal {
    /// vmseal-filter.
    pub filter: Program,
    /// Whether the disks are encrypted, each under its own key.
    pub encrypted: bool,
    /// How its disks are served.
    pub transport: Transport,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// The number of disks, with a queue each.
    pub disks: usize,
    /// Whether its name says how many.
    pub named_by_disks: bool,
    /// Whether its disks are files of a mounted pool and nothing else; its name says so.
    pub by_files: bool,
    /// qemu-img, where the disk has a snapshot: what is written goes to an image above the one that it keeps.
    pub snapshot: Option<Program>,
    /// What is done with it while it is measured.
    pub beside: Option<Beside>,
    /// The latency that is added to the storage, below the encryption, in microseconds.
    pub delay_us: u64,
}

impl Vmseal {
    fn configuration(&self, place: &Place) -> FilterConfig {
        FilterConfig {
            version: VERSION,
            vm: VmId::new(),
            control: Handle::Path(place.directory.join("control")),
            control_uid: None,
            request_id: None,
            log_levels: None,
            disks: self.places(place).iter().map(|place| self.disk(place)).collect(),
        }
    }

    fn disk(&self, place: &Place) -> DiskConfig {
        let offset = if self.encrypted { DATA_OFFSET } else { 0 };
        let crypt = FilterSpec::Crypt { key: Handle::Path(place.key()), holes: Holes::Zero };
        DiskConfig {
            disk: DiskId::new(),
            size: place.size / u64::from(CRYPT_SECTOR) * u64::from(CRYPT_SECTOR),
            serial: "laboratory".to_owned(),
            read_only: false,
            chain: self
                .beside
                .iter()
                .filter_map(|beside| beside.link(place))
                .chain(self.encrypted.then_some(crypt))
                .chain(self.delay())
                .collect(),
            backend: self.backend(place, offset),
            front_end: Some(self.front_end(Handle::Path(place.socket()))),
            beside: None,
            bitmaps: None,
            import: None,
            export: None,
            merge: None,
            convert: None,
        }
    }

    fn backend(&self, place: &Place, offset: u64) -> BackendSpec {
        let file = Handle::Path(place.disk());
        if self.snapshot.is_none() {
            let (direct, keeps_room) = (self.direct, false);
            let channel = place.channel.clone().filter(|_| !self.by_files).map(Handle::Path);
            return BackendSpec::File { file, offset, direct, keeps_room, channel };
        }
        let kept = Handle::Path(kept_path(place));
        let backing = vec![BackingSpec { file: kept, format: ImageFormat::Raw }];
        BackendSpec::Qcow2 { file, backing, offset, lock: None }
    }

    /// Makes what there is after a snapshot: the disk's file is kept, and an image above it takes what is written.
    fn snapshot(&self, place: &Place, image_tool: &Program) -> Result<(), SystemError> {
        let (disk, kept) = (place.disk(), kept_path(place));
        let failed = |source| SystemError::File { path: kept.clone(), source };
        fs::rename(&disk, &kept).map_err(failed)?;
        image_tool.make_layer(&kept, &disk)
    }

    fn delay(&self) -> Option<FilterSpec> {
        let spec = DelaySpec {
            operations: Vec::new(),
            microseconds: self.delay_us,
            jitter_microseconds: 0,
            reorders: false,
            seed: 0,
        };
        (self.delay_us > 0).then_some(FilterSpec::Delay(spec))
    }

    fn front_end(&self, socket: Handle) -> FrontEndSpec {
        match self.transport {
            Transport::VhostUser => {
                FrontEndSpec::VhostUserBlk { socket, connected: None, peer_uid: None, queues: 1 }
            }
            Transport::Nbd => FrontEndSpec::Nbd { listen: socket, peer_uid: None },
        }
    }
}

impl System for Vmseal {
    fn id(&self) -> &'static str {
        match (self.encrypted, self.named_by_disks) {
            (false, _) if self.beside.is_some() => "vmseal-plain-encrypting",
            (true, _) if self.beside.is_some() => "vmseal-encrypted-snapshots",
            (true, _) if self.snapshot.is_some() => "vmseal-encrypted-snapshot",
            (true, true) => "vmseal-encrypted-8-disks",
            (true, _) if self.by_files => "vmseal-encrypted-files",
            (false, _) if self.by_files => "vmseal-plain-files",
            (true, _) => "vmseal-encrypted",
            (false, _) => "vmseal-plain",
        }
    }

    fn encrypts(&self) -> bool {
        self.encrypted
    }

    fn places(&self, place: &Place) -> Vec<Place> {
        if self.disks == 1 {
            return vec![place.clone()];
        }
        let size = place.size / self.disks as u64 / ALIGNMENT * ALIGNMENT;
        let disk = |i: usize| Place {
            directory: place.directory.join(i.to_string()),
            storage: place.storage.as_ref().map(|storage| storage.join(i.to_string())),
            channel: place.channel.clone(),
            size,
        };
        (0..self.disks).map(disk).collect()
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        for place in self.places(place) {
            for path in [Some(&place.directory), place.storage.as_ref()].into_iter().flatten() {
                let failed = |source| SystemError::File { path: path.clone(), source };
                fs::create_dir_all(path).map_err(failed)?;
            }
            if self.encrypted || self.beside.is_some() {
                let path = place.key();
                make_key(&path).map_err(|source| SystemError::File { path, source })?;
            }
            place.make_disk(place.size + if self.encrypted { DATA_OFFSET } else { 0 })?;
            if let Some(image_tool) = &self.snapshot {
                self.snapshot(&place, image_tool)?;
            }
        }
        Ok(())
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        let path = place.directory.join("filter.json");
        let failed = |source| SystemError::File { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(&self.configuration(place))
            .map_err(|error| failed(error.into()))?;
        fs::write(&path, text).map_err(failed)?;
        let mut command = self.filter.command();
        command.arg("--config").arg(&path);
        let places = self.places(place);
        if let Some(beside) = &self.beside {
            places.iter().try_for_each(|place| beside.prepare(place))?;
        }
        Server::start(self.id(), &self.filter, command, core, self.transport, &places)
    }

    fn starts_for_each_cell(&self) -> bool {
        self.beside.is_some()
    }

    fn act(&self, place: &Place, after: Duration) -> Result<Option<Acted>, SystemError> {
        self.beside.as_ref().map_or(Ok(None), |beside| beside.act(place, after))
    }
}

/// Beside the disk's file, as layers of a VM's disk are.
fn kept_path(place: &Place) -> PathBuf {
    place.disk().with_file_name("kept")
}

/// A key that protects only a test's pattern and is removed with the directory, so a file may contain it.
pub(super) fn make_key(path: &Path) -> io::Result<()> {
    let mut key = [0; KEY_LENGTH];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_of_a_pool_have_its_channel_unless_they_are_files_and_nothing_else() {
        let program = Program { path: "vmseal-filter".into(), advice: "" };
        let of_pool = Vmseal {
            filter: program.clone(),
            encrypted: true,
            transport: Transport::VhostUser,
            direct: Direct::Auto,
            disks: 1,
            named_by_disks: false,
            by_files: false,
            snapshot: None,
            beside: None,
            delay_us: 0,
        };
        let by_files = Vmseal { by_files: true, ..of_pool.clone() };
        let place = Place {
            directory: "/x".into(),
            storage: Some("/pool".into()),
            channel: Some("/run/pool.sock".into()),
            size: 1 << 20,
        };
        let elsewhere = Place { channel: None, ..place.clone() };
        for (system, place, id, socket) in [
            (&of_pool, &place, "vmseal-encrypted", Some(Handle::Path("/run/pool.sock".into()))),
            (&by_files, &place, "vmseal-encrypted-files", None),
            (&of_pool, &elsewhere, "vmseal-encrypted", None),
        ] {
            let BackendSpec::File { channel, file, .. } = system.backend(place, 0) else {
                panic!("{id} has no file")
            };
            assert_eq!((system.id(), channel), (id, socket));
            assert_eq!(file, Handle::Path("/pool/disk".into()));
        }
        let several = Vmseal { disks: 2, ..of_pool.clone() };
        assert!(several.places(&place).iter().all(|disk| disk.channel == place.channel));
        let snapshot = Vmseal { snapshot: Some(program), ..of_pool };
        assert!(matches!(snapshot.backend(&place, 0), BackendSpec::Qcow2 { .. }));
    }
}
