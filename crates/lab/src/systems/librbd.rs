//! Ceph's own library by way of QEMU's storage daemon: an image of the pool, in the clear or encrypted by the library itself.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::CpuSet;
use vmseal_api::datastore::RbdPool;

use super::server::{last_words, on_cores};
use super::{
    DATA_OFFSET, Place, Program, Server, System, SystemError, Transport, luks_image, storage_daemon,
};
use crate::ceph::{client, tools};
use crate::children;
use crate::stop::{self, LOOK_EVERY};

/// What `rbd create --size` counts in.
const MIB: u64 = 1 << 20;
/// A `ceph.conf` that is not there: the daemon looks for its driver first.
const NO_CONFIGURATION: &str = "/dev/null/ceph.conf";
/// What the daemon says of a driver that it does not have.
const NO_DRIVER: &str = "Unknown driver";

/// What `rbd rm` says of an image that a client has open.
const IN_USE: &str = "image still has watchers";
/// What `rbd create` says of one that is there.
const EXISTS: &str = "File exists";
/// How long an image may be in use by a client that was killed: the cluster forgets that 30 s after it was heard of last
/// (`osd_client_watch_timeout`).
const STILL_USED: Duration = Duration::from_secs(60);

/// QEMU's storage daemon on an image, through librbd.
#[derive(Clone, Debug)]
pub struct Librbd {
    /// Its name in goals and results; its image has that, too.
    pub id: &'static str,
    /// Whether librbd encrypts the image (LUKS2, AES-256-XTS as vmseal).
    pub luks: bool,
    /// The pool of the image.
    pub pool: RbdPool,
    /// qemu-storage-daemon.
    pub daemon: Program,
    /// The cores of the daemon: those that `vmseal-rbd` has, too, as librbd's threads are in it. None are those of who starts it.
    pub cores: Option<CpuSet>,
}

/// Why the daemon cannot get to images; none if it can.
#[must_use]
pub fn obstacle(daemon: &Program) -> Option<String> {
    let device = format!("driver=rbd,node-name=d0,pool=p,image=i,conf={NO_CONFIGURATION}");
    let said = daemon.command().args(["--blockdev", &device]).output();
    let path = daemon.path.display();
    match said {
        Ok(output) => String::from_utf8_lossy(&output.stderr).contains(NO_DRIVER).then(|| {
            format!("{path} has no driver rbd; install Debian's package qemu-block-extra")
        }),
        Err(_) => Some(format!("{path} cannot be run; {}", daemon.advice)),
    }
}

/// The `ceph.conf` of a place.
pub(super) fn configuration(place: &Place) -> PathBuf {
    place.directory.join("ceph.conf")
}

impl Librbd {
    /// The image's name with its pool.
    fn image(&self) -> String {
        format!("{}/{}", self.pool.pool, self.id)
    }

    /// Has `rbd` do something.
    fn rbd(&self, place: &Place, arguments: &[&str]) -> Result<(), SystemError> {
        let command = client::rbd(&configuration(place), &self.pool, arguments);
        Ok(tools::run(command).map(drop)?)
    }

    /// Removes the image of disks that were made before. The cluster takes a client that was killed for one that uses it, for a while.
    fn remove_image(&self, place: &Place) -> Result<(), SystemError> {
        let give_up = Instant::now() + STILL_USED;
        loop {
            let removed = self.rbd(place, &["rm", "--no-progress", &self.image()]);
            let in_use = |error: &SystemError| error.to_string().contains(IN_USE);
            let waits = Instant::now() < give_up && !stop::asked();
            if !(waits && removed.as_ref().is_err_and(in_use)) {
                return removed;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Makes an empty image, which has room for a header before the disk. One that was made before is removed.
    pub(super) fn make_image(&self, place: &Place, header: u64) -> Result<(), SystemError> {
        let path = configuration(place);
        fs::write(&path, client::configuration(&self.pool))
            .map_err(|source| SystemError::File { path, source })?;
        let removed = self.remove_image(place);
        let size = format!("{}M", (place.size + header).div_ceil(MIB));
        let created = self.rbd(place, &["create", "--size", &size, &self.image()]);
        created.map_err(|error| match error.to_string().contains(EXISTS) {
            true => removed.err().unwrap_or(error),
            false => error,
        })
    }

    /// The image as the daemon opens it. Without its host's cache the daemon turns librbd's off, too.
    fn block_device(&self, place: &Place) -> String {
        let encrypt = if self.luks { ",encrypt.format=luks2,encrypt.key-secret=s0" } else { "" };
        format!(
            "driver=rbd,node-name=d0,pool={},image={},conf={},user={},cache.direct=on{encrypt}",
            self.pool.pool,
            self.id,
            configuration(place).display(),
            client::user(&self.pool),
        )
    }
}

impl System for Librbd {
    fn id(&self) -> &'static str {
        self.id
    }

    fn encrypts(&self) -> bool {
        self.luks
    }

    fn has_files(&self) -> bool {
        false
    }

    fn kept(&self, place: &Place) -> Result<Box<dyn Read>, SystemError> {
        let failed = |source| SystemError::Kept { system: self.id, source };
        Ok(Box::new(Export::start(self, place).map_err(failed)?))
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        self.make_image(place, if self.luks { DATA_OFFSET } else { 0 })?;
        if !self.luks {
            return Ok(());
        }
        luks_image::write_passphrase(place)?;
        let passphrase = luks_image::passphrase(place).display().to_string();
        self.rbd(place, &["encryption", "format", &self.image(), "luks2", &passphrase])
    }

    fn start(&self, place: &Place, _core: Option<usize>) -> Result<Server, SystemError> {
        let mut command = tools::isolated(self.daemon.command());
        command.args(["--object", "iothread,id=io0"]);
        if self.luks {
            command.args(["--object", &luks_image::secret(place)]);
        }
        command.args(["--blockdev", &self.block_device(place)]);
        command.args(["--export", &storage_daemon::export("d0", place)]);
        let places = self.places(place);
        let start = || {
            let transport = Transport::VhostUser;
            Server::start(self.id, &self.daemon, command, None, transport, &places)
        };
        let server = match &self.cores {
            Some(cores) => on_cores(cores, start).map_err(|error| self.daemon.failed(error))?,
            None => start(),
        };
        server.map(Server::that_misses_notifications)
    }
}

/// An image as it is in the pool, with the header and the ciphertext of an encrypted one.
struct Export {
    process: Child,
    output: ChildStdout,
    log: PathBuf,
}

impl Export {
    fn start(system: &Librbd, place: &Place) -> io::Result<Self> {
        let log = place.directory.join("export.log");
        let image = system.image();
        let arguments = ["export", "--no-progress", &image, "-"];
        let mut command = client::rbd(&configuration(place), &system.pool, &arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut process = command.spawn()?;
        let output = process.stdout.take().ok_or_else(|| io::Error::other("it has no output"))?;
        Ok(Self { process, output, log })
    }

    /// Waits until there is something to read, or will be no more.
    fn until_ready(&self) -> io::Result<()> {
        let limit = PollTimeout::try_from(LOOK_EVERY).map_err(io::Error::other)?;
        loop {
            let mut output = [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)];
            match poll(&mut output, limit) {
                Ok(0) | Err(Errno::EINTR) => stop::check().map_err(io::Error::other)?,
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for Export {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.until_ready()?;
        let length = self.output.read(buffer)?;
        // A pipe ends in the same way when its writer fails.
        if length == 0 && !buffer.is_empty() {
            ended(&mut self.process, &self.log)?;
        }
        Ok(length)
    }
}

fn ended(process: &mut Child, log: &Path) -> io::Result<()> {
    let status = process.wait()?;
    if status.success() {
        return Ok(());
    }
    let said = last_words(log);
    Err(io::Error::other(format!("`rbd export` ended with {status}; it said: {said}")))
}

impl Drop for Export {
    fn drop(&mut self) {
        children::end(&mut self.process);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ceph::client::tests::pool;

    pub(in crate::systems) fn librbd(id: &'static str) -> Librbd {
        let daemon = Program { path: "/nonexistent/daemon".into(), advice: "install QEMU" };
        Librbd { id, luks: id.ends_with("luks2"), pool: pool(), daemon, cores: None }
    }

    fn place(directory: &Path) -> Place {
        Place { directory: directory.to_owned(), storage: None, channel: None, size: 64 * MIB }
    }

    #[test]
    fn images_are_opened_without_a_cache_and_only_the_encrypted_one_with_a_key() {
        let place = place(Path::new("/x"));
        let plain = librbd("librbd-plain").block_device(&place);
        let shared = "pool=some,image=librbd-plain,conf=/x/ceph.conf,user=one,cache.direct=on";
        assert_eq!(plain, format!("driver=rbd,node-name=d0,{shared}"));
        let luks = librbd("librbd-luks2").block_device(&place);
        let encrypt = ",encrypt.format=luks2,encrypt.key-secret=s0";
        assert_eq!(luks, plain.replace("librbd-plain", "librbd-luks2") + encrypt);
    }

    #[test]
    fn a_daemon_without_the_driver_is_told_with_its_package() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let said = |text: &str| {
            let path = directory.path().join(text);
            fs::write(&path, format!("#!/bin/sh\necho \"daemon: $2: {text}\" >&2\nexit 1\n"))
                .unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
            obstacle(&Program { path, advice: "" })
        };
        // As QEMU 7.2 says it without and with the package.
        let without = said("Unknown driver 'rbd'").unwrap();
        assert!(without.contains("install Debian's package qemu-block-extra"), "{without}");
        assert_eq!(said("error reading conf file"), None);
        let missing = obstacle(&librbd("librbd-plain").daemon).unwrap();
        assert!(missing.contains("/nonexistent/daemon cannot be run; install QEMU"), "{missing}");
    }

    #[test]
    fn an_export_that_fails_is_no_empty_disk() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "printf 1234; echo 'no image' >&2; exit 2"]);
        command.stdout(Stdio::piped()).stderr(File::create(&log).unwrap());
        let mut process = command.spawn().unwrap();
        let output = process.stdout.take().unwrap();
        let mut export = Export { process, output, log };
        let mut read = Vec::new();
        let failed = export.read_to_end(&mut read).unwrap_err().to_string();
        assert!(failed.contains("exit status: 2") && failed.contains("no image"), "{failed}");
        assert_eq!(read, b"1234");
    }
}
