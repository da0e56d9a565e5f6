//! A `vmseal-filter` started by hand, without server or agent.

use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;
use vmseal_api::filter::{
    BackendSpec, ControlReply, Direct, DiskConfig, FilterConfig, FilterSpec, FilterStatus,
    FrontEndSpec, Handle, Holes, StallSpec, VERSION,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_secret::SecretBytes;

use crate::process::Process;
use crate::{eventually, program};

/// A running filter with one disk on a vhost-user socket.
pub struct Filter {
    process: Process,
    socket: PathBuf,
    control: PathBuf,
}

/// A disk that a filter serves.
pub struct Disk<'a> {
    /// The image.
    pub image: &'a Path,
    /// The offset of its data.
    pub offset: u64,
    /// The size that the guest sees.
    pub size: u64,
    /// Its key; none without encryption.
    pub dek: Option<&'a SecretBytes>,
    /// The meaning of a hole.
    pub holes: Holes,
    /// When its requests fail that storage does not answer; none where they wait.
    pub stall: Option<StallSpec>,
    /// The socket of the `vmseal-rbd` that serves the image, for one whose data goes through shared memory.
    pub channel: Option<&'a Path>,
}

impl Filter {
    /// Starts one in `directory`, and waits until it listens.
    pub fn start(directory: &Path, disk: &Disk<'_>) -> anyhow::Result<Self> {
        Self::start_with(directory, disk, Handle::Path(disk.image.to_owned()), None)
    }

    /// The same on the open image, whose lock is the caller's business: several filters may have it, one of which writes.
    pub fn start_unlocked(directory: &Path, disk: &Disk<'_>) -> anyhow::Result<Self> {
        let image = File::options().read(true).write(true).open(disk.image)?;
        Self::start_with(directory, disk, Handle::Fd(image.as_raw_fd()), Some(image.as_raw_fd()))
    }

    fn start_with(
        directory: &Path,
        disk: &Disk<'_>,
        image: Handle,
        inherited: Option<RawFd>,
    ) -> anyhow::Result<Self> {
        let socket = directory.join("disk.sock");
        let serves = Handle::Path(socket.clone());
        let (mut command, log) = command(directory, disk, image, serves)?;
        inherit(&mut command, inherited);
        let mut process = Process::start(&mut command, &log)?;
        eventually("the filter listens", || (socket.exists() || process.ended()).then_some(()))?;
        ensure!(!process.ended(), "the filter ended: {}", std::fs::read_to_string(&log)?);
        Ok(Self { process, socket, control: directory.join("control.sock") })
    }

    /// Its status; none if it does not answer the question.
    #[must_use]
    pub fn status(&self) -> Option<FilterStatus> {
        status(&self.control)
    }

    /// The socket for QEMU.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.process.id()
    }

    /// Ends it in order, and removes its sockets.
    pub fn stop(self) -> anyhow::Result<()> {
        let Self { mut process, socket, control } = self;
        process.terminate();
        eventually("the filter has ended", || process.ended().then_some(()))?;
        for path in [socket, control] {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    /// Ends it as a power cut would, and removes its sockets.
    pub fn kill(self) {
        self.process.kill();
        for path in [self.socket, self.control] {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A filter as the agent starts it: its image is locked and its VMM connected.
pub struct Successor {
    process: Process,
    control: PathBuf,
}

impl Successor {
    /// Starts one in `directory`, after the previous one has ended, with its connection to a VMM.
    pub fn start(directory: &Path, disk: &Disk<'_>, vmm: &UnixStream) -> anyhow::Result<Self> {
        let image = locked(disk.image)?;
        let inherited = [image.as_raw_fd(), vmm.as_raw_fd()];
        let [image_fd, socket] = inherited.map(Handle::Fd);
        let (mut command, log) = command(directory, disk, image_fd, socket)?;
        inherit(&mut command, inherited);
        let process = Process::start(&mut command, &log)?;
        Ok(Self { process, control: directory.join("control.sock") })
    }

    /// How many requests it has answered; none if it does not answer the question.
    #[must_use]
    pub fn answered(&self) -> Option<u64> {
        let disks = status(&self.control)?.disks;
        Some(disks.iter().map(|disk| disk.counters.reads + disk.counters.writes).sum())
    }

    /// Ends it as a power cut would.
    pub fn kill(self) {
        self.process.kill();
        let _ = std::fs::remove_file(self.control);
    }
}

/// The status of the filter with this control socket; none if it does not answer the question.
fn status(control: &Path) -> Option<FilterStatus> {
    let mut stream = UnixStream::connect(control).ok()?;
    stream.write_all(b"{\"do\":\"status\"}\n").ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    match serde_json::from_str(&line).ok()? {
        ControlReply::Status(status) => Some(status),
        _ => None,
    }
}

/// Has a process get these descriptors, which stay open until it is started.
fn inherit(command: &mut Command, descriptors: impl IntoIterator<Item = RawFd>) {
    let descriptors: Vec<RawFd> = descriptors.into_iter().collect();
    // SAFETY: fcntl is async-signal-safe, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            for fd in &descriptors {
                libc::fcntl(*fd, libc::F_SETFD, 0);
            }
            Ok(())
        });
    }
}

/// Opens an image again and takes its lock: not before the kernel has finished all requests of the last
/// filter.
fn locked(image: &Path) -> anyhow::Result<File> {
    let file = File::options().read(true).write(true).open(image)?;
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let take = || nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole)).ok();
    eventually("the dead filter's lock is gone", take)?;
    Ok(file)
}

/// The command that starts a filter in `directory`, and its log.
fn command(
    directory: &Path,
    disk: &Disk<'_>,
    image: Handle,
    socket: Handle,
) -> anyhow::Result<(Command, PathBuf)> {
    let config = directory.join("filter.json");
    let configuration = configuration(directory, disk, image, socket)?;
    std::fs::write(&config, serde_json::to_vec(&configuration)?)?;
    let mut command = Command::new(program("vmseal-filter")?);
    command.arg("--config").arg(&config);
    Ok((command, directory.join("filter.log")))
}

fn configuration(
    directory: &Path,
    disk: &Disk<'_>,
    image: Handle,
    socket: Handle,
) -> anyhow::Result<FilterConfig> {
    let mut chain: Vec<_> = disk.stall.map(FilterSpec::Stall).into_iter().collect();
    if let Some(dek) = disk.dek {
        let key = directory.join("dek");
        let _ = std::fs::remove_file(&key);
        std::fs::write(&key, [])?;
        std::fs::set_permissions(&key, Permissions::from_mode(0o600))?;
        std::fs::write(&key, dek.expose())?;
        chain.push(FilterSpec::Crypt { key: Handle::Path(key), holes: disk.holes });
    }
    Ok(FilterConfig {
        version: VERSION,
        vm: VmId::new(),
        control: Handle::Path(directory.join("control.sock")),
        control_uid: None,
        request_id: None,
        log_levels: None,
        disks: vec![DiskConfig {
            disk: DiskId::new(),
            size: disk.size,
            serial: "by-hand".to_owned(),
            read_only: false,
            chain,
            backend: BackendSpec::File {
                file: image,
                offset: disk.offset,
                direct: Direct::Auto,
                keeps_room: false,
                channel: disk.channel.map(|path| Handle::Path(path.to_owned())),
            },
            front_end: Some(FrontEndSpec::VhostUserBlk {
                socket,
                connected: None,
                peer_uid: None,
                queues: 2,
            }),
            beside: None,
            bitmaps: None,
            import: None,
            export: None,
            merge: None,
            convert: None,
        }],
    })
}
