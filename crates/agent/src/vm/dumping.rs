//! Core dumps: QEMU writes the memory of its guest, which stands still meanwhile, and it is sealed as it comes.
//!
//! ```text
//! vm.core-ID.creating ─► QEMU's dump, through a pipe, sealed ─► flush ─► vm.core-ID
//! ```

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use vmseal_api::dump::DumpFormat;
use vmseal_api::host::VmSpec;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::frame::CONTENT_MAX;
use vmseal_secret::SecretBytes;

use super::internal;
use super::report::{Progress, Report};
use super::stream::{pass, pipe, take_back};
use crate::hypervisor::qmp::Qmp;
use crate::storage::core_file::CoreFile;
use crate::storage::export::{self, Export};
use crate::storage::exported::Exported;
use crate::storage::transfer::TransferDirectories;

/// The pause between questions about the progress of a dump.
const ASK_INTERVAL: Duration = Duration::from_millis(100);

/// A core dump to write.
pub struct Dumping {
    pub file: CoreFile,
    pub spec: VmSpec,
    pub kek: Option<SecretBytes>,
    pub qmp: Arc<Qmp>,
    pub format: DumpFormat,
}

impl Dumping {
    /// Writes it, unless an attempt before has; returns its length. When this returns, nothing writes any more. `progress` gets
    /// the bytes that are dumped, and those in all.
    ///
    /// # Errors
    /// `cancelled`, `no-space`, QEMU's; nothing is left of it then.
    pub async fn run(
        self,
        progress: impl Fn(u64, u64),
        cancelled: oneshot::Receiver<()>,
    ) -> Result<u64, Problem> {
        let file = self.file.clone();
        let known = spawn_blocking(move || file.length()).await.map_err(internal)??;
        if let Some(length) = known {
            return Ok(length);
        }
        let file = self.file.clone();
        let written = self.write(progress, cancelled).await;
        if written.is_err() {
            let removed = spawn_blocking(move || file.remove()).await.map_err(internal)?;
            if let Err(problem) = removed {
                tracing::warn!(%problem, "an unfinished core dump is left");
            }
        }
        written
    }

    async fn write(
        self,
        progress: impl Fn(u64, u64),
        mut cancelled: oneshot::Receiver<()>,
    ) -> Result<u64, Problem> {
        let Self { file, spec, kek, qmp, format } = self;
        let refused = |error| internal(format!("QEMU writes no core dump: {error}"));
        let (ours, theirs) = pipe()?;
        let name = pass(&qmp, "core", theirs).await.map_err(refused)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let mut sealing = spawn_blocking(move || {
            let mut writer = file.create(&spec, kek.as_ref())?;
            let mut part = zeroize::Zeroizing::new(vec![0; CONTENT_MAX]);
            let mut from = File::from(ours);
            let failed = |error| {
                internal(format!("the core dump of VM '{}' cannot be written: {error}", spec.name))
            };
            loop {
                let length = from.read(&mut part).map_err(failed)?;
                if stopped.load(Ordering::Relaxed) {
                    return Err(Problem::new(ErrorCode::Cancelled, "no core dump is written"));
                }
                if length == 0 {
                    return Ok((file, writer));
                }
                writer.write(&part[..length]).map_err(|error| {
                    crate::storage::file_error::failed(file.path(), "written", &error)
                })?;
            }
        });
        let what = json!({
            "paging": false, "detach": true, "protocol": format!("fd:{name}"),
            "format": match format { DumpFormat::Elf => "elf", DumpFormat::Kdump => "kdump-zlib" },
        });
        if let Err(error) = qmp.execute("dump-guest-memory", what).await {
            take_back(&qmp, &name).await;
            sealing.await.map_err(internal)??;
            return Err(refused(error));
        }
        // Where the reading ends sooner, QEMU finds the pipe closed, and lets its guest go on.
        let sealed = loop {
            tokio::select! {
                sealed = &mut sealing => break sealed.map_err(internal)?,
                _ = &mut cancelled, if !stop.load(Ordering::Relaxed) => stop.store(true, Ordering::Relaxed),
                () = sleep(ASK_INTERVAL) => {
                    if let Ok(state) = qmp.execute("query-dump", Value::Null).await {
                        let bytes = |name: &str| state[name].as_u64().unwrap_or_default();
                        progress(bytes("completed"), bytes("total"));
                    }
                }
            }
        };
        let dumped = dumped(&qmp).await;
        let (file, writer) = sealed?;
        dumped?;
        spawn_blocking(move || file.finish(writer)).await.map_err(internal)?
    }
}

/// Waits until QEMU has ended its dump: its guest goes on then.
async fn dumped(qmp: &Qmp) -> Result<(), Problem> {
    loop {
        let state = qmp.execute("query-dump", Value::Null).await.map_err(internal)?;
        match state["status"].as_str().unwrap_or_default() {
            "completed" => return Ok(()),
            "failed" => return Err(internal("QEMU has not dumped the guest's memory")),
            _ => sleep(ASK_INTERVAL).await,
        }
    }
}

/// A core dump to decrypt.
pub struct Decrypting {
    pub file: CoreFile,
    pub spec: VmSpec,
    pub kek: Option<SecretBytes>,
    pub export: Export,
    /// The path of the record of the file that is written.
    pub record: std::path::PathBuf,
    pub allowed: TransferDirectories,
}

impl Decrypting {
    /// Writes the file in the clear, under the name of one that is not complete.
    ///
    /// # Errors
    /// `cancelled`, `damaged`, `locked`, `no-space`; nothing is left of it then.
    pub async fn run(
        self,
        show: Arc<Progress>,
        mut cancelled: oneshot::Receiver<()>,
    ) -> Result<(), Problem> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let mut writing = spawn_blocking(move || {
            let written = self.write(&show, &stopped);
            if written.is_err()
                && let Err(problem) = export::remove(&self.export, &self.record, &self.allowed)
                && !matches!(problem.code, ErrorCode::NotFound | ErrorCode::AlreadyExists)
            {
                tracing::warn!(%problem, "an unfinished file is left");
            }
            written
        });
        tokio::select! {
            written = &mut writing => return written.map_err(internal)?,
            _ = &mut cancelled => stop.store(true, Ordering::Relaxed),
        }
        writing.await.map_err(internal)?
    }

    fn write(&self, show: &Progress, stopped: &AtomicBool) -> Result<(), Problem> {
        let total = self.file.length()?.unwrap_or_default();
        let mut target = export::make(&self.export, total, &self.record, &self.allowed)?;
        let progress = |done: u64| {
            show.progress(Report::Progress(done.min(total), total));
            !stopped.load(Ordering::Relaxed)
        };
        self.file.decrypt((&self.spec, self.kek.as_ref()), &mut target, progress)?;
        target.sync_all().and_then(|()| Exported::written(&self.record)).map_err(internal)
    }
}
