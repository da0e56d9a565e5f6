//! vmseal's layers with librbd in the same process. Beside it shows what it costs that `vmseal-rbd` is a process of its own.

use std::fs;
use std::io::Read;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_api::datastore::RbdPool;

use super::server::on_cores;
use super::vmseal::make_key;
use super::{DATA_OFFSET, Librbd, Place, Program, Server, System, SystemError, Transport};
use crate::ceph::tools;

/// The disk that the program serves. It reads this as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneProcessDisk {
    /// The pool of the image.
    pub pool: RbdPool,
    /// The image.
    pub image: String,
    /// Where the disk begins in the image, in bytes.
    pub offset: u64,
    /// The size of the disk, in bytes.
    pub size: u64,
    /// The file with its key.
    pub key: PathBuf,
    /// The socket of its front end.
    pub socket: PathBuf,
    /// The core of the disk's threads; none: wherever the kernel puts them.
    pub core: Option<usize>,
}

/// vmseal's encryption and front end on an image, with librbd in their process.
#[derive(Clone, Debug)]
pub struct OneProcess {
    /// The image, as it is made and looked at. Its cores are those of librbd's threads.
    pub image: Librbd,
    /// The laboratory's example `librbd-in-filter`.
    pub program: Program,
}

impl OneProcess {
    fn disk(&self, place: &Place, core: Option<usize>) -> OneProcessDisk {
        OneProcessDisk {
            pool: self.image.pool.clone(),
            image: self.image.id.to_owned(),
            offset: DATA_OFFSET,
            size: place.size,
            key: place.key(),
            socket: place.socket(),
            core,
        }
    }
}

impl System for OneProcess {
    fn id(&self) -> &'static str {
        self.image.id
    }

    fn encrypts(&self) -> bool {
        true
    }

    fn has_files(&self) -> bool {
        false
    }

    fn kept(&self, place: &Place) -> Result<Box<dyn Read>, SystemError> {
        self.image.kept(place)
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        let path = place.key();
        make_key(&path).map_err(|source| SystemError::File { path, source })?;
        self.image.make_image(place, DATA_OFFSET)
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        let path = place.directory.join("disk.json");
        let failed = |source| SystemError::File { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(&self.disk(place, core))
            .map_err(|error| failed(error.into()))?;
        fs::write(&path, text).map_err(failed)?;
        let mut command = tools::isolated(self.program.command());
        command.arg(&path);
        let places = self.places(place);
        // The program puts the disk's threads on the core, and not librbd's.
        let start = || {
            let transport = Transport::VhostUser;
            Server::start(self.id(), &self.program, command, None, transport, &places)
        };
        match &self.image.cores {
            Some(cores) => on_cores(cores, start).map_err(|error| self.program.failed(error))?,
            None => start(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::systems::ONE_PROCESS;
    use crate::systems::librbd::tests::librbd;

    #[test]
    fn the_disk_begins_where_that_of_a_filter_does_and_its_key_is_named_by_its_file() {
        let program = Program { path: "librbd-in-filter".into(), advice: "" };
        let system = OneProcess { image: librbd(ONE_PROCESS), program };
        let place = Place {
            directory: "/x".into(),
            storage: Some("/pool".into()),
            channel: None,
            size: 1 << 20,
        };
        let text = serde_json::to_string(&system.disk(&place, Some(3))).unwrap();
        let read: OneProcessDisk = serde_json::from_str(&text).unwrap();
        assert_eq!((read.offset, read.size, read.core), (DATA_OFFSET, 1 << 20, Some(3)));
        assert_eq!((read.image.as_str(), read.pool.pool.as_str()), (ONE_PROCESS, "some"));
        assert_eq!((read.key, read.socket), ("/x/key".into(), "/x/socket".into()));
        assert!(system.encrypts() && !system.has_files());
    }
}
