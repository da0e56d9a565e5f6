//! QEMU's storage daemon: raw, and with QEMU's own LUKS driver.

use super::luks_image::{self, secret};
use super::{Place, Program, Server, System, SystemError, Transport};

/// QEMU's storage daemon on a raw file or a LUKS image.
#[derive(Clone, Debug)]
pub struct StorageDaemon {
    /// Through QEMU's LUKS driver (LUKS1, AES-256-XTS as vmseal).
    pub luks: bool,
    /// qemu-storage-daemon.
    pub daemon: Program,
    /// qemu-img, which formats LUKS.
    pub image_tool: Program,
}

impl System for StorageDaemon {
    fn id(&self) -> &'static str {
        if self.luks { "storage-daemon-luks" } else { "storage-daemon-plain" }
    }

    fn encrypts(&self) -> bool {
        self.luks
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        if !self.luks {
            return place.make_disk(place.size);
        }
        luks_image::make(self.id(), &self.image_tool, place)
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        let mut command = self.daemon.command();
        command
            .args(["--object", "iothread,id=io0", "--blockdev"])
            .arg(format!("driver=file,node-name=f0,filename={},{IO}", place.disk().display()));
        if self.luks {
            command.args(["--object", &secret(place)]);
            command.args(["--blockdev", "driver=luks,node-name=d0,file=f0,key-secret=s0"]);
        }
        let node = if self.luks { "d0" } else { "f0" };
        command.arg("--export").arg(export(node, place));
        // libvhost-user writes the index of its next notification (`vu_queue_pop`) and then reads the ring
        // without a barrier in between: rarely, both sides go to sleep with a request pending.
        Server::start(
            self.id(),
            &self.daemon,
            command,
            core,
            Transport::VhostUser,
            &self.places(place),
        )
        .map(Server::that_misses_notifications)
    }
}

/// The export of a node of the daemon's, by its iothread `io0`.
pub(super) fn export(node: &str, place: &Place) -> String {
    format!(
        "type=vhost-user-blk,id=e0,node-name={node},addr.type=unix,addr.path={},writable=on,num-queues=1,iothread=io0",
        place.socket().display()
    )
}

/// How the daemon accesses the file: its fastest option (docs/benchmarks.md).
const IO: &str = "cache.direct=on,aio=io_uring";
