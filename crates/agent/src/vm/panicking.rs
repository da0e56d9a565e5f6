//! A guest that has panicked: what QEMU does then, and the core dump that the agent writes by itself.
//!
//! ```text
//! the guest panics, and stands still ─► vm.core-ID.panic-FORMAT, unless there are enough ─► off, or system_reset ─► cont
//! ```
//! Until QEMU is told to go on, the guest stands still with the status `guest-panicked`, and an agent that starts finds it so.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use vmseal_api::dump::{DumpFormat, PanicDump};
use vmseal_api::hardware::OnCrash;
use vmseal_api::host::VmSpec;
use vmseal_api::id::DumpId;
use vmseal_api::problem::Problem;
use vmseal_api::size::Size;
use vmseal_secret::SecretBytes;

use super::dumping::Dumping;
use super::internal;
use crate::hypervisor::qmp::{Qmp, QmpError};
use crate::process::panics::check_dumps;
use crate::storage::core_file::{CoreFile, of_panics};

/// QEMU's status of a guest that has panicked and stands still.
pub const PANICKED: &str = "guest-panicked";

/// How long a dump that an earlier agent has begun may take to end: QEMU finds its pipe closed.
const EARLIER_DUMP: Duration = Duration::from_secs(20);

/// The pause between questions about such a dump.
const ASK_INTERVAL: Duration = Duration::from_millis(50);

/// Tells QEMU whether to end when its guest panics, or to have it stand still.
///
/// # Errors
/// QEMU's, also that of one before 6.0, which always ends.
pub async fn tell_qemu(qmp: &Qmp, on_crash: OnCrash) -> Result<(), QmpError> {
    let panic = if on_crash.is_usual() { "shutdown" } else { "pause" };
    qmp.execute("set-action", json!({ "panic": panic })).await.map(drop)
}

/// Resets a guest that stands still, as it has panicked or sleeps, and has it boot again with the same processes and keys.
///
/// # Errors
/// QEMU's.
pub async fn restart(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("system_reset", Value::Null).await?;
    qmp.execute("cont", Value::Null).await.map(drop)
}

/// What is dumped.
pub struct ToDump {
    pub spec: VmSpec,
    pub kek: Option<SecretBytes>,
    pub qmp: Arc<Qmp>,
    pub dump: DumpId,
}

/// The writing of a core dump of a guest that has panicked. Dropped, it ends, and nothing is named.
pub struct PanicDumping(JoinHandle<String>);

impl PanicDumping {
    /// Waits until it has ended, and returns what became of the core dump, for people.
    pub async fn finished(&mut self) -> String {
        (&mut self.0).await.unwrap_or_else(|error| not_written(&internal(error)))
    }
}

impl Drop for PanicDumping {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Begins to write a core dump, unless an earlier agent has written it or there are enough.
pub fn begin(what: ToDump) -> PanicDumping {
    PanicDumping(tokio::spawn(async move {
        match write(what).await {
            Ok(dumped) => dumped,
            Err(problem) => not_written(&problem),
        }
    }))
}

fn not_written(problem: &Problem) -> String {
    tracing::error!(%problem, "no core dump was written of a guest that panicked");
    format!("no core dump was written: {problem}")
}

async fn write(ToDump { spec, kek, qmp, dump }: ToDump) -> Result<String, Problem> {
    let encrypted = spec.key.is_some();
    let of = spec.clone();
    let file = match spawn_blocking(move || room_for(&of, dump)).await.map_err(internal)?? {
        Room::Free(file) => file,
        Room::There(known) => return Ok(written(known.bytes, encrypted)),
        Room::None(why) => return Ok(why),
    };
    // What an earlier agent has begun ends, as nobody reads it any more.
    let ended = timeout(EARLIER_DUMP, earlier_dump(&qmp)).await;
    ended.map_err(|_| internal("QEMU still writes an earlier core dump"))??;
    let format = match spec.hardware.crash_dump_format {
        Some(format) => format,
        None => usual_format(&qmp).await?,
    };
    let file = file.of_a_panic(format);
    // It runs to its end, or ends with QEMU.
    let (_uncancelled, cancelled) = oneshot::channel();
    let dumping = Dumping { file, spec, kek, qmp, format };
    Ok(written(dumping.run(|_, _| {}, cancelled).await?, encrypted))
}

fn written(bytes: u64, encrypted: bool) -> String {
    let how = if encrypted { "encrypted" } else { "IN THE CLEAR, as the VM has no key" };
    format!("a core dump of {} was written, {how}", Size(bytes))
}

/// Whether there is room for one more core dump.
enum Room {
    Free(CoreFile),
    /// It is written already.
    There(PanicDump),
    /// Why there is none.
    None(String),
}

fn room_for(spec: &VmSpec, dump: DumpId) -> Result<Room, Problem> {
    let known = of_panics(spec)?;
    if let Some(there) = known.iter().find(|known| known.dump == dump) {
        return Ok(Room::There(there.clone()));
    }
    let newest = known.last().map(|known| known.created);
    if let Err(why) = check_dumps(&spec.name, known.len(), newest, Timestamp::now()) {
        return Ok(Room::None(why));
    }
    let file = CoreFile::of(spec, dump)?;
    file.check_room(spec)?;
    Ok(Room::Free(file))
}

/// Waits until QEMU writes no dump.
async fn earlier_dump(qmp: &Qmp) -> Result<(), Problem> {
    loop {
        let state = qmp.execute("query-dump", Value::Null).await.map_err(internal)?;
        if state["status"] != "active" {
            return Ok(());
        }
        sleep(ASK_INTERVAL).await;
    }
}

/// kdump where QEMU writes it: it is compressed, and leaves out pages of zeroes.
async fn usual_format(qmp: &Qmp) -> Result<DumpFormat, Problem> {
    let question = "query-dump-guest-memory-capability";
    let known = qmp.execute(question, Value::Null).await.map_err(internal)?;
    let formats = known["formats"].as_array().map_or(&[][..], Vec::as_slice);
    let has_kdump = formats.iter().any(|format| format == "kdump-zlib");
    Ok(if has_kdump { DumpFormat::Kdump } else { DumpFormat::Elf })
}
