//! Suspending and resuming a guest by hand: a QEMU that is not of vmseal writes its migration to a file in the clear, or reads it.
//!
//! ```text
//!   QEMU started ─► stop ─► migration to a file (timed for `suspend`: until QEMU has ended and the file is durable)
//!                           ─► another QEMU started, which reads the file and goes on (timed for `resume`)
//! ```
//! What vmseal does with VMs in the clear is no such measure: it seals their memory as that of others, under a key in the file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use vmseal_api::atomic_file;

use super::{OperationError, Task, image};
use crate::definition::Operation;
use crate::installation::Installation;
use crate::qemu::{self, BANDWIDTH, Qemu};

/// How long a guest runs before it is suspended: about what passes between two commands of vmseal. Its firmware finds nothing to
/// boot meanwhile, and has touched as much of the memory.
const RUNS: Duration = Duration::from_millis(200);

/// By which name a QEMU knows the file.
const NAME: &str = "memory";

/// A guest that is suspended and resumed.
struct Guest<'a> {
    home: &'a Path,
    name: String,
    machine: &'a [String],
    /// Where its memory is saved.
    memory: PathBuf,
}

/// Suspends guests with so much memory, all at once, and resumes them where that is the operation; what the operation took, in seconds.
pub(super) fn measure(
    here: &Installation,
    task: &Task,
    memory_mib: u64,
) -> Result<f64, OperationError> {
    let home = tempfile::tempdir();
    let home =
        home.map_err(|source| OperationError::File { path: std::env::temp_dir(), source })?;
    // Guests that find nothing to boot write nothing, and all may have the one image.
    let drive = format!("file={},format=raw,readonly=on", image(here, task.size_mib).display());
    let machine = qemu::machine(memory_mib, &here.accelerator()?, &drive);
    let guest = |number: u32| {
        let name = format!("guest-{number}");
        // Beside the datastore in which vmseal saves memory.
        let memory = here.store().join(&name).with_extension("memory");
        Guest { home: home.path(), name, machine: &machine, memory }
    };
    let guests: Vec<Guest<'_>> = (0..task.at_once).map(guest).collect();
    let running = guests.iter().map(|guest| guest.start(&[])).collect::<Result<Vec<_>, _>>()?;
    std::thread::sleep(RUNS);
    let begun = Instant::now();
    at_once(guests.iter().zip(running), |(guest, qemu)| guest.suspend(qemu))?;
    let mut took = begun.elapsed();
    if task.operation == Operation::Resume {
        let begun = Instant::now();
        let resumed = at_once(guests.iter(), Guest::resume)?;
        took = begun.elapsed();
        drop(resumed);
    }
    for Guest { memory, .. } in guests {
        let removed = std::fs::remove_file(&memory);
        removed.map_err(|source| OperationError::File { path: memory, source })?;
    }
    Ok(took.as_secs_f64())
}

/// Does something with each, all at once.
fn at_once<I: Send, T: Send>(
    all: impl Iterator<Item = I>,
    work: impl Fn(I) -> Result<T, OperationError> + Sync,
) -> Result<Vec<T>, OperationError> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = all.map(|one| scope.spawn(move || work(one))).collect();
        let ended = threads.into_iter().map(|it| it.join().expect("it does not panic"));
        ended.collect()
    })
}

impl Guest<'_> {
    fn start(&self, more: &[&str]) -> Result<Qemu, OperationError> {
        let more = more.iter().map(|word| (*word).to_owned());
        let arguments: Vec<String> = self.machine.iter().cloned().chain(more).collect();
        let mut qemu = Qemu::start(self.home, &self.name, &arguments)?;
        // It tells when all is written or read.
        let events = json!({"capabilities": [{"capability": "events", "state": true}]});
        qemu.ask("migrate-set-capabilities", events)?;
        Ok(qemu)
    }

    /// In the order of vmseal: what is durable at the end is all of the memory, under its name.
    fn suspend(&self, mut qemu: Qemu) -> Result<(), OperationError> {
        let failed = |source| OperationError::File { path: self.memory.clone(), source };
        qemu.ask("stop", json!({}))?;
        qemu.ask("migrate-set-parameters", json!({"max-bandwidth": BANDWIDTH}))?;
        let file = File::create_new(&self.memory).map_err(failed)?;
        qemu.give(NAME, &file)?;
        qemu.ask("migrate", json!({"uri": format!("fd:{NAME}")}))?;
        qemu.migrated()?;
        qemu.quit()?;
        file.sync_all().map_err(failed)?;
        atomic_file::flush_directory_of(&self.memory).map_err(failed)
    }

    fn resume(&self) -> Result<Qemu, OperationError> {
        let file = File::open(&self.memory);
        let file =
            file.map_err(|source| OperationError::File { path: self.memory.clone(), source })?;
        let mut qemu = self.start(&qemu::INCOMING)?;
        qemu.give(NAME, &file)?;
        qemu.ask("migrate-incoming", json!({"uri": format!("fd:{NAME}")}))?;
        qemu.migrated()?;
        qemu.ask("cont", json!({}))?;
        Ok(qemu)
    }
}
