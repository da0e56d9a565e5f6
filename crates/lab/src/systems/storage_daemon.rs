//! QEMU's storage daemon: raw, and with QEMU's own LUKS driver.

use std::fs;
use std::path::PathBuf;

use super::{Place, Program, Server, System, SystemError};

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

/// Where LUKS keeps the passphrase of the test: it protects nothing, but argv is no place for one.
fn passphrase(place: &Place) -> PathBuf {
    place.directory.join("passphrase")
}

fn secret(place: &Place) -> String {
    format!("secret,id=s0,file={}", passphrase(place).display())
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
        let path = passphrase(place);
        fs::write(&path, "benchmark").map_err(|source| SystemError::File { path, source })?;
        for _ in 1..FORMAT_ATTEMPTS {
            if self.format(place).is_ok() {
                return Ok(());
            }
        }
        self.format(place)
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        let socket = place.socket();
        let mut command = self.daemon.command();
        command
            .args(["--object", "iothread,id=io0", "--blockdev"])
            .arg(format!("driver=file,node-name=f0,filename={},{IO}", place.disk().display()));
        if self.luks {
            command.args(["--object", &secret(place)]);
            command.args(["--blockdev", "driver=luks,node-name=d0,file=f0,key-secret=s0"]);
        }
        let node = if self.luks { "d0" } else { "f0" };
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=e0,node-name={node},addr.type=unix,addr.path={},writable=on,num-queues=1,iothread=io0",
            socket.display()
        ));
        // libvhost-user tells where it wants to be notified (`vu_queue_pop`), then looks at the ring
        // without a barrier in between: seldom, both sides go to sleep over a request.
        Server::start(self.id(), &self.daemon, command, core, socket)
            .map(Server::that_misses_notifications)
    }
}

impl StorageDaemon {
    fn format(&self, place: &Place) -> Result<(), SystemError> {
        let mut command = self.image_tool.command();
        command
            .args(["create", "-q", "-f", "luks", "--object", &secret(place)])
            .args(["-o", "key-secret=s0,cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64"])
            .args(["-o", "hash-alg=sha512,iter-time=200"])
            .arg(place.disk())
            .arg(place.size.to_string());
        let output = command.output().map_err(|e| self.image_tool.failed(e))?;
        if output.status.success() {
            return Ok(());
        }
        Err(SystemError::NotServing {
            system: self.id(),
            what: format!("qemu-img ended with {}", output.status),
            log: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }
}

/// QEMU times 32768 rounds of its key derivation by a clock that often does not move meanwhile, and gives
/// up then ("Unable to get accurate CPU usage"): with SHA-256 once in six attempts on a busy machine,
/// with the slower SHA-512 never seen. The derivation has no part in what is measured.
const FORMAT_ATTEMPTS: u32 = 5;

/// How the daemon reaches the file: of its choices the quickest (docs/benchmarks.md).
const IO: &str = "cache.direct=on,aio=io_uring";
