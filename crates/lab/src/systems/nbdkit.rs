//! nbdkit's file plugin: raw, and with its LUKS filter.

use super::luks_image;
use super::{Place, Program, Server, System, SystemError, Transport};

/// Threads for the requests of a connection: nbdkit's default, made explicit.
const THREADS: u32 = 16;

/// nbdkit on a raw file or a LUKS image.
#[derive(Clone, Debug)]
pub struct Nbdkit {
    /// Through its LUKS filter.
    pub luks: bool,
    /// nbdkit.
    pub nbdkit: Program,
    /// qemu-img, which formats LUKS.
    pub image_tool: Program,
}

impl System for Nbdkit {
    fn id(&self) -> &'static str {
        if self.luks { "nbdkit-luks" } else { "nbdkit-plain" }
    }

    fn encrypts(&self) -> bool {
        self.luks
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        if self.luks {
            luks_image::make(self.id(), &self.image_tool, place)
        } else {
            place.make_disk(place.size)
        }
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        let mut command = self.nbdkit.command();
        command.args(["--foreground", "--threads", &THREADS.to_string(), "--unix"]);
        command.arg(place.socket());
        if self.luks {
            command.arg("--filter=luks");
        }
        command.arg("file").arg(format!("file={}", place.disk().display()));
        if self.luks {
            command.arg(format!("passphrase=+{}", luks_image::passphrase(place).display()));
        }
        Server::start(self.id(), &self.nbdkit, command, core, Transport::Nbd, &self.places(place))
    }
}
