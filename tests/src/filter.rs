//! A `vmseal-filter` started by hand, without server or agent.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;
use vmseal_api::filter::{
    BackendSpec, Direct, DiskConfig, FilterConfig, FilterSpec, FrontEndSpec, Handle, Holes, VERSION,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_secret::SecretBytes;

use crate::process::Process;
use crate::{eventually, program};

/// A running filter with one disk on a vhost-user socket.
pub struct Filter {
    process: Process,
    socket: PathBuf,
}

/// The disk that a filter serves.
pub struct Disk<'a> {
    /// The image.
    pub image: &'a Path,
    /// Where its data begins.
    pub offset: u64,
    /// What the guest sees as its size.
    pub size: u64,
    /// Its key; none for one in the clear.
    pub dek: Option<&'a SecretBytes>,
    /// What a hole means.
    pub holes: Holes,
}

impl Filter {
    /// Starts one in `directory`, and waits until it listens.
    pub fn start(directory: &Path, disk: &Disk<'_>) -> anyhow::Result<Self> {
        let socket = directory.join("disk.sock");
        let config = directory.join("filter.json");
        std::fs::write(&config, serde_json::to_vec(&configuration(directory, &socket, disk)?)?)?;
        let log = directory.join("filter.log");
        let mut process = Process::start(
            Command::new(program("vmseal-filter")?).arg("--config").arg(&config),
            &log,
        )?;
        eventually("the filter listens", || (socket.exists() || process.ended()).then_some(()))?;
        ensure!(!process.ended(), "the filter ended: {}", std::fs::read_to_string(&log)?);
        Ok(Self { process, socket })
    }

    /// Where QEMU connects.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends it in good order, and removes its sockets.
    pub fn stop(self, directory: &Path) -> anyhow::Result<()> {
        let Self { mut process, socket } = self;
        process.terminate();
        eventually("the filter has ended", || process.ended().then_some(()))?;
        for path in [socket, directory.join("control.sock")] {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }
}

fn configuration(directory: &Path, socket: &Path, disk: &Disk<'_>) -> anyhow::Result<FilterConfig> {
    let mut chain = Vec::new();
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
                file: Handle::Path(disk.image.to_owned()),
                offset: disk.offset,
                direct: Direct::Auto,
                keeps_room: false,
            },
            front_end: Some(FrontEndSpec::VhostUserBlk {
                listen: Handle::Path(socket.to_owned()),
                peer_uid: None,
                queues: 2,
            }),
            beside: None,
            import: None,
            export: None,
        }],
    })
}
