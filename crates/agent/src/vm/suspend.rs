//! Saving the memory of a guest, and giving it back.
//!
//! ```text
//! saving:   stop ─► QEMU's stream, sealed into vm.memory.creating ─► flush it and the disks ─► (the owner) name it vm.memory
//!           ─► QEMU and the filter end
//! loading:  QEMU, waiting ─► vm.memory, opened into QEMU's stream, to its authenticated end ─► on record as running
//!           ─► rename vm.memory away ─► cont ─► remove it
//! ```
//! Until the file has its name the guest can go on; from then on it is suspended.
//!
//! A filter that is dead when the guest is stopped cannot say which requests it has not done, and nothing is saved ([`super::queues`]).
//! No other filter is started until the memory is saved.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use tokio::task::{JoinHandle, spawn_blocking};
use vmseal_api::boot::Cdrom;
use vmseal_api::hardware::Hardware;
use vmseal_api::host::{Device, NicSpec, VmSpec};
use vmseal_api::nic::NicBackend;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::asleep;
use super::internal;
use super::migration::machine_of;
use super::queues::Witness;
use super::stream::{BANDWIDTH_MAX, completed, pass, pipe, take_back};
use crate::hypervisor::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::process::live::Live;
use crate::process::run_record::Record;
use crate::storage::memory::{self, MemoryFiles, MemoryReader, SavedMachine};
use crate::storage::mirror;

/// The saving of a guest's memory, while the VM is being suspended. Dropped, it ends, and nothing is named.
pub struct Saving(JoinHandle<Result<(), Problem>>);

impl Saving {
    /// Waits until the memory is in a flushed file that has no name yet.
    pub async fn finished(&mut self) -> Result<(), Problem> {
        (&mut self.0).await.unwrap_or_else(|error| Err(internal(error)))
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What is saved.
pub struct ToSave {
    pub files: MemoryFiles,
    /// Which of the VM's memories it is.
    pub generation: u64,
    /// What it runs as; its key is the one under which it is saved.
    pub record: Record,
    pub kek: Option<SecretBytes>,
    pub qmp: Arc<Qmp>,
    /// What serves its disks; none of a guest that is paused, and was stopped then.
    pub filter: Option<Witness>,
}

/// Begins to save the memory of a guest that runs or is paused.
pub fn begin(what: ToSave) -> Saving {
    Saving(tokio::spawn(vmseal_api::request_id::inherit(save(what))))
}

async fn save(what: ToSave) -> Result<(), Problem> {
    let ToSave { files, generation, record, kek, qmp, filter } = what;
    let refused = |error: QmpError| internal(format!("its memory cannot be saved: {error}"));
    if filter.is_some() {
        qmp.execute("stop", Value::Null).await.map_err(refused)?;
    }
    let what = "cannot be saved";
    asleep::require_stopped(&qmp, &record.spec, what).await?;
    if let Some(filter) = filter {
        filter.has_answered(&record.spec, &record.live, what).await?;
    }
    let machine = machine_of(&qmp).await.map_err(refused)?;
    let limits = json!({"max-bandwidth": BANDWIDTH_MAX});
    qmp.execute("migrate-set-parameters", limits).await.map_err(refused)?;
    let (ours, theirs) = pipe()?;
    let name = pass(&qmp, "memory", theirs).await.map_err(refused)?;
    let (spec, saved) = (record.spec.clone(), SavedMachine { machine, record });
    let writing = files.clone();
    let copying = spawn_blocking(move || {
        let mut writer = writing.create(&saved, generation, kek.as_ref())?;
        writer.copy_from(File::from(ours)).map_err(|error| {
            internal(format!(
                "the memory of VM '{}' cannot be written: {error}",
                saved.record.spec.name
            ))
        })?;
        Ok::<_, Problem>(writer)
    });
    let uri = json!({"uri": format!("fd:{name}")});
    if let Err(error) = qmp.execute("migrate", uri).await {
        take_back(&qmp, &name).await;
        copying.await.map_err(internal)??;
        return Err(refused(error));
    }
    // It ends when QEMU has closed its end of the pipe; where it ends sooner, QEMU finds the pipe closed.
    let copied = copying.await.map_err(internal)?;
    let streamed = completed(&qmp, COMMAND_TIMEOUT, |_| ()).await;
    let writer = copied?;
    streamed?;
    let finish = move || {
        files.finish(writer)?;
        memory::flush_disks(&spec)
    };
    spawn_blocking(finish).await.map_err(internal)?
}

/// The saved memory that a VM starts with.
pub struct Resume {
    files: MemoryFiles,
    /// Taken when it is read.
    reader: Mutex<Option<MemoryReader>>,
    /// The type of the machine.
    pub machine: String,
    /// Whether something else is in its CD-ROM drive than when it was suspended.
    pub other_medium: bool,
}

/// Where the memory of a VM is saved, also where the copy of its first disk has taken the disk's place. Only for its owner. Blocks.
///
/// # Errors
/// As [`MemoryFiles::of`]; those of the copy.
pub fn files_of(spec: &VmSpec) -> Result<MemoryFiles, Problem> {
    MemoryFiles::of(&mirror::with_first_disk_as_it_is(spec)?)
}

/// A suspended VM: what it is to run as, how QEMU is to have its devices, and its memory, which must be of the given generation. Blocks.
///
/// # Errors
/// `damaged`, also where it is of another generation, `locked`, those of the file system, and `wrong-state` where a device is missing.
pub fn open(
    registered: &VmSpec,
    kek: Option<&SecretBytes>,
    generation: Option<u64>,
) -> Result<(VmSpec, Live, Resume), Problem> {
    let files = files_of(registered)?;
    let (saved, reader) = files.open(registered, kek, generation)?;
    let SavedMachine { machine, record } = saved;
    let drive = record.spec.hardware.cdrom.clone();
    let (spec, live) = same_machine(registered, record)?;
    let other_medium = spec.hardware.cdrom != drive;
    let reader = Mutex::new(Some(reader));
    Ok((spec, live, Resume { files, reader, machine, other_medium }))
}

/// The machine that was saved, with keys and devices as they are registered, and what is in its CD-ROM drive now; and how QEMU is to have its
/// devices, whose network cards are connected anew.
pub fn same_machine(registered: &VmSpec, saved: Record) -> Result<(VmSpec, Live), Problem> {
    let Record { spec: saved, mut live, .. } = saved;
    live.nics.clear();
    let mut devices = Vec::with_capacity(saved.devices.len());
    for before in &saved.devices {
        let now = device_of(registered, &saved, before).ok_or_else(|| lost(registered, before))?;
        if let (Device::Nic(before), Device::Nic(now)) = (before, now)
            && let Some(port) = live.nic_ports.remove(&before.nic)
        {
            live.nic_ports.insert(now.nic, port);
        }
        devices.push(now.clone());
    }
    // What is done when the guest panics may have changed meanwhile.
    let (on_crash, crash_dump_format) =
        (registered.hardware.on_crash, registered.hardware.crash_dump_format);
    // A medium is a file of the host that it was put in at: a VM without it has an empty drive, wherever it is.
    let now = registered.hardware.medium().map(Path::to_owned);
    let cdrom = saved.hardware.cdrom.map(|_| Cdrom { medium: now });
    let hardware = Hardware { on_crash, crash_dump_format, cdrom, ..saved.hardware };
    let (vcpus, memory) = (saved.vcpus, saved.memory);
    Ok((VmSpec { vcpus, memory, hardware, devices, ..registered.clone() }, live))
}

/// The device of a VM that is one of its saved machine: that one, or a network card like it that was added in its place. A guest knows a card
/// by its place, its model and its address.
fn device_of<'a>(registered: &'a VmSpec, saved: &VmSpec, wanted: &Device) -> Option<&'a Device> {
    let id = |device: &Device| match device {
        Device::Disk(disk) => disk.disk.0,
        Device::Nic(nic) => nic.nic.0,
    };
    let known = registered.devices.iter().find(|device| id(device) == id(wanted));
    let (None, Device::Nic(gone)) = (known, wanted) else { return known };
    // QEMU loads no card that had offloads, which its own network stack has none of, into one without, or the other way round.
    let is_user = |nic: &NicSpec| matches!(nic.backend, NicBackend::User { .. });
    let is_alike = |nic: &NicSpec| {
        (nic.mac, nic.model, is_user(nic)) == (gone.mac, gone.model, is_user(gone))
            && saved.nics().all(|it| it.nic != nic.nic)
    };
    registered.devices.iter().find(|device| matches!(device, Device::Nic(nic) if is_alike(nic)))
}

/// That a VM has lost a device of its saved machine.
fn lost(registered: &VmSpec, device: &Device) -> Problem {
    let name = &registered.name;
    let (what, remedy) = match device {
        Device::Disk(disk) => (format!("disk '{}'", disk.name), String::new()),
        Device::Nic(nic) => (
            format!("network card '{}' ({}, {})", nic.name, nic.model.name(), nic.mac),
            format!(
                ". If a snapshot keeps that memory: give it up, stop the VM, add a card with that address, of that model and to a network of the same kind (vmseal nic add {name}), and revert again"
            ),
        ),
    };
    let what = format!(
        "VM '{name}' was suspended with {what}, which it no longer has, and its guest needs it. Give the saved memory up (vmseal vm start {name} --discard-memory){remedy}"
    );
    Problem::new(ErrorCode::WrongState, what)
}

impl Resume {
    /// Gives the memory to a QEMU that waits for it.
    ///
    /// # Errors
    /// `damaged`, and QEMU's.
    pub async fn load(&self, qmp: &Qmp) -> Result<(), Problem> {
        let taken = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        let reader = taken.ok_or_else(|| internal("the saved memory has been read already"))?;
        let (theirs, ours) = pipe()?;
        let name = pass(qmp, "memory", theirs).await.map_err(internal)?;
        let copying = spawn_blocking(move || reader.copy_to(File::from(ours)));
        let uri = json!({"uri": format!("fd:{name}")});
        let loading = async {
            qmp.execute("migrate-incoming", uri).await.map_err(internal)?;
            completed(qmp, COMMAND_TIMEOUT, |_| ()).await
        };
        let loaded = loading.await;
        // First what the file says: QEMU only finds that its stream has ended.
        copying.await.map_err(internal)??;
        loaded
    }

    /// Takes the file's name away: the guest may go on.
    ///
    /// # Errors
    /// Those of the file system.
    pub async fn use_up(&self) -> Result<(), Problem> {
        let files = self.files.clone();
        spawn_blocking(move || files.use_up()).await.map_err(internal)?
    }

    /// Removes the file: the guest has gone on.
    pub async fn remove(&self) {
        let files = self.files.clone();
        let swept = spawn_blocking(move || files.sweep()).await;
        if let Ok(Err(problem)) = swept {
            tracing::warn!(%problem, "a memory that was used cannot be removed");
        }
    }
}

/// Whether the memory of the VM's guest is saved; none where its datastore cannot be asked.
pub async fn is_suspended(spec: &VmSpec) -> Option<bool> {
    let spec = spec.clone();
    let look = move || mirror::is_suspended(&spec).ok();
    spawn_blocking(look).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::NicId;
    use vmseal_api::nic::NicModel;

    use super::*;
    use crate::process::run_record::Phase;

    fn record(spec: VmSpec) -> Record {
        let live = Live::at_start(&spec);
        Record { boot: String::new(), spec, slot: 0, phase: Phase::Running, live }
    }

    #[test]
    fn a_card_that_was_added_again_takes_the_place_of_the_one_that_was_removed() {
        let card = |mac: &str, backend: NicBackend| NicSpec {
            nic: NicId::new(),
            name: "lan".to_owned(),
            mac: mac.parse().unwrap(),
            model: NicModel::Virtio,
            backend,
            link: Default::default(),
        };
        let user = || NicBackend::User { forwards: vec![] };
        let (first, second) =
            (card("02:00:00:00:00:01", user()), card("02:00:00:00:00:02", user()));
        let with = |cards: &[&NicSpec]| {
            let devices = cards.iter().map(|&card| Device::Nic(card.clone())).collect();
            VmSpec { devices, ..crate::process::run_dir::tests::spec() }
        };
        let saved = || record(with(&[&first, &second]));
        let again = NicSpec { nic: NicId::new(), ..second.clone() };
        let (spec, live) = same_machine(&with(&[&again, &first]), saved()).unwrap();
        assert!(spec.nics().eq([&first, &again]), "the cards are in another order");
        assert_eq!((live.nic_ports[&first.nic], live.nic_ports[&again.nic]), (0, 1));
        assert_eq!(live.nic_ports.len(), 2);
        // Not one that the guest would not know, or QEMU not load.
        let bridge = NicBackend::Bridge { bridge: "br0".to_owned() };
        for other in [
            NicSpec { model: NicModel::E1000e, ..again.clone() },
            card("02:00:00:00:00:02", bridge),
            card("02:00:00:00:00:03", user()),
        ] {
            let lost = same_machine(&with(&[&first, &other]), saved()).unwrap_err();
            assert_eq!(lost.code, ErrorCode::WrongState);
            assert!(lost.detail.contains("'lan' (virtio, 02:00:00:00:00:02)"), "{lost}");
        }
    }

    #[test]
    fn a_guest_that_goes_on_has_in_its_drive_what_is_in_there_now() {
        let with = |cdrom: Option<Cdrom>| {
            let mut spec = crate::process::run_dir::tests::spec();
            spec.hardware.cdrom = cdrom;
            spec
        };
        let drive = |medium: Option<&str>| Some(Cdrom { medium: medium.map(Into::into) });
        for (saved, now, expected) in [
            (drive(Some("/a.iso")), drive(Some("/a.iso")), drive(Some("/a.iso"))),
            (drive(Some("/a.iso")), drive(None), drive(None)),
            (drive(Some("/a.iso")), drive(Some("/b.iso")), drive(Some("/b.iso"))),
            (drive(None), drive(Some("/b.iso")), drive(Some("/b.iso"))),
            // Its machine is the one that was saved.
            (drive(Some("/a.iso")), None, drive(None)),
            (None, drive(Some("/b.iso")), None),
        ] {
            let (spec, _) = same_machine(&with(now.clone()), record(with(saved.clone()))).unwrap();
            assert_eq!(spec.hardware.cdrom, expected, "{saved:?}, {now:?}");
        }
    }
}
