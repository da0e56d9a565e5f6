//! A filter that writes the copy of a disk that comes from another host, or a file of it. It has no key.

use std::fs::File;
use std::os::unix::net::UnixStream;

use vmseal_api::host::VmSpec;
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::{Shared, internal};
use crate::filter::{self, Control};
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::arriving::ArrivingDisk;
use crate::storage::builder::{self, is_preallocated};
use crate::storage::filling::end_idle;
use crate::storage::opening::data_offset;

/// The socket of a disk's NBD.
const SOCKET: &str = "nbd";

/// See the module.
pub struct Server {
    process: Process,
    directory: ProcessDir,
    // Released when the process has ended.
    _slot: Slot,
}

impl Server {
    /// Of the disk's uppermost file.
    pub async fn start(
        shared: &Shared,
        spec: &VmSpec,
        arriving: &ArrivingDisk,
    ) -> Result<Self, Problem> {
        let slot = shared.users.take().ok_or_else(builder::too_many)?;
        let directory = shared.run_dir.import(arriving.disk.disk);
        directory.renew().await.map_err(internal)?;
        let above = arriving.above.iter().map(File::try_clone);
        let served = filter::Disk {
            disk: arriving.disk.disk,
            size: arriving.disk.size,
            file: arriving.file.try_clone().map_err(internal)?,
            layers: above.collect::<Result<_, _>>().map_err(internal)?,
            offset: data_offset(&arriving.facts),
            // The source encrypts before it sends.
            key: None,
            shared: filter::Shared::default(),
            keeps_room: is_preallocated(&arriving.disk),
            work: filter::Work::Expose {
                socket: directory.listen(SOCKET).map_err(internal)?,
                writable: true,
            },
            beside: None,
            replica: None,
            mirror: None,
        };
        let (process, _) =
            filter::start(&shared.filter, spec.vm, &directory, vec![served], slot.filter())
                .await
                .map_err(internal)?;
        Control::of(&directory).ready(&process, &directory).await.map_err(internal)?;
        Ok(Self { process, directory, _slot: slot })
    }

    /// Connects to it.
    pub fn connect(&self) -> Result<UnixStream, Problem> {
        UnixStream::connect(self.directory.socket(SOCKET)).map_err(internal)
    }

    /// Ends when nobody is connected any more, with all flushed.
    pub async fn end(self, disk: DiskId) -> Result<(), Problem> {
        end_idle(&Control::of(&self.directory), disk).await?;
        self.process.end_within(filter::SHUTDOWN_TIMEOUT).await;
        self.directory.sweep().await.map_err(internal)
    }
}
