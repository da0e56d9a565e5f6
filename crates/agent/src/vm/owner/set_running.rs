//! What is done to a VM that runs: its guest is paused, reset or woken, and it is registered anew, with devices that are
//! plugged in and out.
//!
//! A device is on record before QEMU gets it and until QEMU has let it go. When QEMU lacks a device that is on record, the agent
//! removes it from the record, and the server that asked for it registers the VM again.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::timeout;
use vmseal_api::filter::DiskStatus;
use vmseal_api::hardware::Hardware;
use vmseal_api::host::{Device, DiskSpec, GuestControl, NicSpec, Power, VmSpec};
use vmseal_api::id::{DiskId, NicId};
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Event, Owner, State};
use crate::filter::{self, END_SEEN_WITHIN};
use crate::hypervisor::cdrom;
use crate::hypervisor::network;
use crate::hypervisor::plug;
use crate::hypervisor::qemu;
use crate::process::live::{DISK_QUEUES_MAX, DiskInUse, Live};
use crate::process::ports::{self, PORTS};
use crate::rules;
use crate::rules::exclusion::{Action, Permission};
use crate::rules::plugging::{check_exposed, check_unplugged, no_free_port};
use crate::rules::set_running::{self, Difference};
use crate::storage::disk_keys;
use crate::storage::lease;
use crate::storage::medium;
use crate::vm::asleep;
use crate::vm::bitmap_files;
use crate::vm::internal;
use crate::vm::panicking;
use crate::vm::queues;
use crate::vm::running::{ProcessEvent, Running};
use crate::vm::serve::{self, Plan};
use crate::vm::service::{self, FILTER_RESTART_TIMEOUT, Service};
use crate::vm::start::set_link;

impl Owner {
    /// Pauses, unpauses, resets or wakes the guest.
    pub(super) async fn control_guest(&mut self, what: GuestControl) -> Result<(), Problem> {
        let action = match what {
            GuestControl::Pause => Action::Pause,
            GuestControl::Unpause => Action::Unpause,
            GuestControl::Reset => Action::Reset,
            GuestControl::Wakeup => Action::Wakeup,
        };
        if self.situation().may(action, None)? == Permission::Already {
            return Ok(());
        }
        self.require_no_panic()?;
        match what {
            GuestControl::Pause => self.pause().await,
            GuestControl::Unpause => self.unpause().await,
            GuestControl::Reset => self.reset().await,
            GuestControl::Wakeup => self.wake().await,
        }
    }

    /// Pauses the guest. Its filter has answered QEMU then, or the guest goes on: what QEMU saves of a paused guest is whole.
    async fn pause(&mut self) -> Result<(), Problem> {
        self.until_served().await?;
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        let filter = running.witness()?;
        // On record first: an agent that finds the guest otherwise does it.
        let before = running.live.clone();
        running.live.paused = true;
        running.live.queues_known = false;
        write_or(running, &spec, before)?;
        running.qmp.execute("stop", Value::Null).await.map_err(internal)?;
        let what = "is not paused";
        let stopped = match asleep::require_stopped(&running.qmp, &spec, what).await {
            Ok(()) => filter.has_answered(&spec, &running.live, what).await,
            sleeps => sleeps,
        };
        match stopped {
            Ok(()) => {
                running.live.queues_known = true;
                running.write(&spec)
            }
            Err(problem) => {
                running.live.paused = false;
                // Whether that is on record or not: else it would stand still, and count as one that runs.
                let noted = running.write(&spec);
                let gone_on = running.qmp.execute("cont", Value::Null).await;
                self.serve_again();
                noted.and(gone_on.map(drop).map_err(internal)).and(Err(problem))
            }
        }
    }

    /// Has a paused guest go on.
    async fn unpause(&mut self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        if running.live.queues_known
            && !has_filter(running)
            && !plug::takes_filters_at_any_time(&running.qmp).await.map_err(internal)?
        {
            let what = match running.was_saved_paused().await.map_err(internal)? {
                false => {
                    "has lost its filter while it was paused, and its QEMU, older than 9.0, takes no other one for it. Nothing is lost: suspend it, resume it (vmseal vm suspend, vmseal vm resume), and unpause it then"
                }
                true => {
                    "has lost its filter while it was paused, and its QEMU, older than 9.0, takes no other one for it and cannot save its memory a second time. If `vmseal snapshot list` shows a complete snapshot with memory that was taken during this pause, nothing is lost: revert to that snapshot (vmseal snapshot revert, with --running), and unpause it. Otherwise its memory is lost: force it off and start it; its disks are as after a power cut"
                }
            };
            return Err(rules::wrong_state(&spec, what));
        }
        let before = running.live.clone();
        running.live.panics.over();
        running.live.paused = false;
        running.live.queues_known = false;
        write_or(running, &spec, before)?;
        running.goes_on();
        let gone_on = running.qmp.execute("cont", Value::Null).await.map(drop).map_err(internal);
        // The next filter begins when the guest runs.
        self.serve_again();
        gone_on
    }

    async fn reset(&mut self) -> Result<(), Problem> {
        self.require_tpm().await?;
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        let before = running.live.clone();
        if running.was_saved_paused().await.map_err(internal)? {
            if !has_filter(running)
                && !plug::takes_filters_at_any_time(&running.qmp).await.map_err(internal)?
            {
                let what = "has lost its filter while it was paused, and its QEMU, older than 9.0, takes no other one: it cannot be reset. `vmseal vm unpause` says what can be done";
                return Err(rules::wrong_state(&spec, what));
            }
            // QEMU must not save it before it has run, and does not say so any more when it has reset it.
            running.live.queues_known = false;
        }
        running.live.panics.over();
        write_or(running, &spec, before)?;
        running.goes_on();
        // QEMU leaves a guest standing still that slept.
        let sleeps =
            !running.live.paused && asleep::is_asleep(&running.qmp).await.map_err(internal)?;
        let reset = match sleeps {
            true => panicking::restart(&running.qmp).await,
            false => running.qmp.execute("system_reset", Value::Null).await.map(drop),
        };
        if sleeps {
            self.note_sleep().await;
        }
        reset.map_err(internal)?;
        // What it boots with was frozen by nobody.
        self.thawed();
        Ok(())
    }

    /// Registers the VM anew while it runs.
    pub(super) async fn set_running(&mut self, new: VmSpec) -> Result<(), Problem> {
        let known = self.spec.clone();
        let difference = self.difference(&new).await?;
        let now = set_running::before_plugging(&known, &new, self.in_use());
        if known.key != new.key {
            self.kek = None;
        }
        let mut links = difference.links;
        links.extend(self.links_not_set(&new));
        self.keep(now).await?;
        for nic in links {
            let Some(running) = self.running() else { return Err(not_there()) };
            set_link(&running.qmp, nic.nic, nic.link).await?;
            running.live.note_link(&nic);
        }
        if difference.medium {
            self.change_medium(&new.hardware).await?;
        }
        for nic in difference.gone_nics {
            self.unplug_nic(nic).await?;
        }
        for disk in difference.gone_disks {
            self.unplug_disk(disk, new.disk(disk).cloned()).await?;
        }
        for nic in difference.new_nics {
            self.plug_nic(nic).await?;
        }
        for disk in difference.new_disks {
            self.plug_disk(disk).await?;
        }
        self.made.retain(|disk, _| new.disk(*disk).is_some());
        self.jobs.keep_disks_of(&new);
        self.keep(set_running::until_next_start(&known, &new)).await?;
        if known.hardware.on_crash != new.hardware.on_crash {
            // On record first: an agent that starts tells QEMU, too.
            let Some(running) = self.running() else { return Err(not_there()) };
            let told = panicking::tell_qemu(&running.qmp, new.hardware.on_crash).await;
            told.map_err(internal)?;
        }
        self.next = (self.spec != new).then_some(new);
        self.describe();
        Ok(())
    }

    /// The network cards that QEMU did not plug in or out when it was asked before: the record has them as they are to be.
    pub(super) fn links_not_set(&self, new: &VmSpec) -> Vec<NicSpec> {
        let (State::Running(running) | State::Stopping { running, .. }) = &self.state else {
            return Vec::new();
        };
        let is_known = |nic: &NicSpec| self.spec.nics().any(|known| known == nic);
        let nics = new.nics().filter(|&nic| is_known(nic) && running.live.has_other_link(nic));
        nics.cloned().collect()
    }

    /// What registering the VM anew would change of what runs.
    pub(super) async fn difference(&self, new: &VmSpec) -> Result<Difference, Problem> {
        let known = &self.spec;
        let both = set_running::needs_both_keys(known, new) && self.named_by_disks(new).await?;
        set_running::difference(known, new, self.in_use(), both)
    }

    /// Checks that devices can be plugged in and out, as far as that can be told before the guest is asked.
    pub(super) async fn may_plug(&mut self, difference: &Difference) -> Result<(), Problem> {
        let Difference { gone_disks, new_nics, new_disks, .. } = difference;
        for disk in gone_disks {
            self.may_unplug(*disk)?;
        }
        for nic in new_nics {
            self.may_plug_nic(nic.clone()).await?;
        }
        if gone_disks.is_empty() && new_disks.is_empty() {
            return Ok(());
        }
        self.may_replace_filter().await?;
        if new_disks.is_empty() {
            return Ok(());
        }
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        free_place(&spec, running).map(drop)
    }

    /// Checks that a network card can be plugged in, as [`Self::plug_nic`] would begin: no tap is made, and no port kept.
    async fn may_plug_nic(&mut self, nic: NicSpec) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        free_port(&spec, running, ports::for_another_card())?;
        let own_user = running.slot.qemu().is_some();
        let examine = move || network::examine(spec.vm, &nic, own_user);
        tokio::task::spawn_blocking(examine).await.map_err(internal)?
    }

    /// Whether a recryption has added the key of this specification to all disks.
    async fn named_by_disks(&self, new: &VmSpec) -> Result<bool, Problem> {
        let (spec, Some(key)) = (self.spec.clone(), new.key.clone()) else { return Ok(false) };
        let look = move || disk_keys::all_name(&spec, &key);
        tokio::task::spawn_blocking(look).await.map_err(internal)?
    }

    /// The disks that the guest does not have, of a VM that runs.
    pub(super) fn unused(&self) -> Vec<DiskId> {
        if !matches!(self.state, State::Running(_) | State::Stopping { .. }) {
            return Vec::new();
        }
        let in_use = self.in_use();
        self.spec.disks().map(|disk| disk.disk).filter(|disk| !in_use(*disk)).collect()
    }

    /// The disks that the guest has.
    fn in_use(&self) -> impl Fn(DiskId) -> bool + use<> {
        let disks: Vec<DiskId> = match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                running.live.disks.iter().map(|disk| disk.disk).collect()
            }
            State::Off | State::Starting { .. } => Vec::new(),
        };
        move |disk| disks.contains(&disk)
    }

    /// Puts a specification of the running VM on record, and keeps it. Where another disk is its first one, or that has been moved, the lease there
    /// is on record with it: a filter that is started for either finds the one that belongs to it.
    pub(super) async fn keep(&mut self, spec: VmSpec) -> Result<(), Problem> {
        let (known, new) = (self.spec.clone(), spec.clone());
        let Some(running) = self.running() else { return Err(not_there()) };
        let began = running.live.lease;
        let look = move || lease::noted(&known, &new, began);
        let noted = tokio::task::spawn_blocking(look).await.map_err(internal)??;
        let Some(running) = self.running() else { return Err(not_there()) };
        running.live.lease = noted;
        running.write(&spec)?;
        self.spec = spec;
        Ok(())
    }

    /// Changes what is in the CD-ROM drive. Last on record: an agent that ends before is told to do it again.
    async fn change_medium(&mut self, hardware: &Hardware) -> Result<(), Problem> {
        let medium = medium::open(hardware, &self.shared.transfer).await?;
        let Some(running) = self.running() else { return Err(not_there()) };
        cdrom::change(&running.qmp, medium.as_ref()).await.map_err(internal)?;
        let mut spec = self.spec.clone();
        spec.hardware.cdrom.clone_from(&hardware.cdrom);
        self.keep(spec).await
    }

    async fn plug_nic(&mut self, nic: NicSpec) -> Result<(), Problem> {
        let mut spec = self.spec.clone();
        let before = self.nics_before.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        let port = free_port(&spec, running, ports::for_another_card())?;
        let own_user = running.slot.qemu().is_some();
        let (of, wanted) = (spec.clone(), nic.clone());
        let open = move || network::open_one(&of, &wanted, &before, own_user);
        let card = tokio::task::spawn_blocking(open).await.map_err(internal)??;
        spec.devices.push(Device::Nic(nic.clone()));
        running.live.nic_ports.insert(nic.nic, port);
        running.live.nics.push(card.state.clone());
        running.write(&spec)?;
        let plugged = plug::nic(&running.qmp, port, &nic, &card).await.map_err(internal);
        if plugged.is_ok() {
            network::backlog::lengthen(&running.qemu, &running.live.nics);
        }
        let linked = match (&plugged, nic.link) {
            (Ok(()), NicLink::Down) => set_link(&running.qmp, nic.nic, NicLink::Down).await,
            _ => plugged,
        };
        if linked.is_err() {
            plug::drop_network(&running.qmp, nic.nic).await;
            self.forget_nic(nic.nic).await?;
            return linked;
        }
        running.live.note_link(&nic);
        self.spec = spec;
        Ok(())
    }

    async fn unplug_nic(&mut self, nic: NicId) -> Result<(), Problem> {
        let name = self.spec.nics().find(|known| known.nic == nic).map(|nic| nic.name.clone());
        let what = format!("network card '{}'", name.unwrap_or_default());
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        let gone = plug::out(&running.qmp, &plug::nic_device(nic)).await.map_err(internal)?;
        if !gone {
            return Err(not_released(&spec, &what));
        }
        plug::drop_network(&running.qmp, nic).await;
        self.forget_nic(nic).await
    }

    /// Takes a network card that QEMU does not have off the record.
    async fn forget_nic(&mut self, nic: NicId) -> Result<(), Problem> {
        let mut spec = self.spec.clone();
        spec.devices.retain(|device| !matches!(device, Device::Nic(known) if known.nic == nic));
        if let Some(running) = self.running() {
            running.live.nics.retain(|known| known.nic != nic);
            if let Some(port) = running.live.nic_ports.remove(&nic) {
                running.left_ports.insert(port, Instant::now());
            }
        }
        self.keep(spec).await
    }

    /// Plugs in a disk that is made. The filter is replaced by one that serves it, too: the guest sees a pause, as
    /// when a filter has died (docs/decisions/093).
    async fn plug_disk(&mut self, disk: DiskSpec) -> Result<(), Problem> {
        self.may_replace_filter().await?;
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        let (port, queues) = free_place(&spec, running)?;
        let socket =
            running.live.disks.iter().map(|disk| disk.socket.saturating_add(1)).max().unwrap_or(0);
        let id = disk.disk;
        running.live.disks.push(DiskInUse {
            disk: id,
            socket,
            queues,
            port: Some(port),
            grown: false,
        });
        running.write(&spec)?;
        let served = async {
            let listener = {
                running.directory.forget_socket(&serve::socket(socket)).map_err(internal)?;
                running.directory.listen(&serve::socket(socket)).map_err(internal)?
            };
            plug::listen(&running.qmp, socket, &listener).await.map_err(internal)
        };
        let served = served.await;
        let served = match served {
            Ok(()) => self.replace_filter().await,
            refused => refused,
        };
        let plugged = match served {
            Ok(()) => self.add_device(id, socket, queues, port).await,
            refused => refused,
        };
        let Err(problem) = plugged else { return Ok(()) };
        let Some(running) = self.running() else { return Err(problem) };
        let devices = plug::devices(&running.qmp).await;
        if devices.is_ok_and(|devices| !devices.contains(&qemu::disk_device(id))) {
            plug::drop_listener(&running.qmp, socket).await;
            self.forget_disk(id, None).await?;
            return Err(problem);
        }
        // The guest has it, or may have it: the caller asks again, and finds it there or not.
        self.serve_again();
        Err(Problem::new(ErrorCode::TimedOut, problem.detail))
    }

    /// Has QEMU add the device of a disk, and waits until a filter serves it. Where the filter dies meanwhile, QEMU does
    /// nothing else until it gets a connection to another: so that is started at once.
    async fn add_device(
        &mut self,
        disk: DiskId,
        socket: u32,
        queues: u16,
        port: u32,
    ) -> Result<(), Problem> {
        let Some(running) = self.running() else { return Err(not_there()) };
        let qmp = running.qmp.clone();
        let mut adding = pin!(plug::disk(&qmp, disk, socket, queues, port));
        loop {
            let Some(running) = self.running() else { return Err(not_there()) };
            let event = tokio::select! {
                added = &mut adding => match added {
                    Ok(()) => break,
                    Err(error) => return Err(internal(error)),
                },
                event = running.service.next() => event,
            };
            self.apply(Event::Process(ProcessEvent::Service(event))).await;
        }
        loop {
            let spec = self.spec.clone();
            let Some(running) = self.running() else { return Err(not_there()) };
            let connected = match running.service {
                Service::Served(_) => {
                    let has_device = |disk| running.live.disk(disk).is_some();
                    serve::wait_connected(&running.control, &spec, has_device).await
                }
                Service::Down(None) => return Err(rules::locked(&spec)),
                Service::Down(Some(_)) => Err(internal("its disks are not served yet")),
            };
            let Err(problem) = connected else { return Ok(()) };
            // The filter may have died.
            let limit = match running.service {
                Service::Served(_) => END_SEEN_WITHIN,
                Service::Down(_) => FILTER_RESTART_TIMEOUT,
            };
            let Ok(event) = timeout(limit, running.service.next()).await else {
                return Err(problem);
            };
            self.apply(Event::Process(ProcessEvent::Service(event))).await;
        }
    }

    async fn unplug_disk(&mut self, disk: DiskId, kept: Option<DiskSpec>) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let what = format!("disk '{}'", spec.disk(disk).map_or("", |disk| disk.name.as_str()));
        let Some(DiskInUse { socket, .. }) = self.may_unplug(disk)? else { return Ok(()) };
        self.may_replace_filter().await?;
        let Some(running) = self.running() else { return Err(not_there()) };
        let gone = plug::out(&running.qmp, &qemu::disk_device(disk)).await.map_err(internal)?;
        if !gone {
            return Err(not_released(&spec, &what));
        }
        plug::drop_listener(&running.qmp, socket).await;
        self.forget_disk(disk, kept).await
    }

    /// Checks that a disk can be unplugged, and says how QEMU has it; none where the guest does not have it.
    fn may_unplug(&mut self, disk: DiskId) -> Result<Option<DiskInUse>, Problem> {
        let spec = self.spec.clone();
        // What a snapshot keeps of it, too.
        check_exposed(&spec, self.exposed.contains_key(&disk).then_some(disk).into_iter())?;
        let Some(running) = self.running() else { return Err(not_there()) };
        let Some(in_use) = running.live.disk(disk).copied() else { return Ok(None) };
        check_unplugged(&spec, disk, in_use.port.is_some())?;
        Ok(Some(in_use))
    }

    /// Takes a disk that QEMU does not have off the record, and has a filter serve the others. `kept` is what is known
    /// of the disk from now on.
    async fn forget_disk(&mut self, disk: DiskId, kept: Option<DiskSpec>) -> Result<(), Problem> {
        let mut spec = self.spec.clone();
        spec.devices.retain(|device| !matches!(device, Device::Disk(known) if known.disk == disk));
        spec.devices.extend(kept.map(Device::Disk));
        if let Some(running) = self.running() {
            let port = running.live.disk(disk).and_then(|known| known.port);
            running.left_ports.extend(port.map(|port| (port, Instant::now())));
            running.live.disks.retain(|known| known.disk != disk);
            // What others write to it from now on is not marked.
            bitmap_files::forget_unplugged(&running.directory, disk);
        }
        self.keep(spec).await?;
        self.troubles.retain(|notice| notice.disk != Some(disk));
        self.serve_again();
        if let Err(problem) = self.let_go_of_disks().await {
            // It is tried again at every check.
            tracing::info!(vm = %self.spec.vm, %problem, "the filter serves a disk that was unplugged");
        }
        Ok(())
    }

    /// Whether the filter can be replaced without a loss: exposures end with it.
    pub(super) async fn may_replace_filter(&mut self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        if spec.disks().any(|disk| disk.encrypted) && self.kek.is_none() {
            return Err(rules::locked(&spec));
        }
        let beside = self.exposed.iter().filter(|(_, exposed)| exposed.beside);
        check_exposed(&spec, beside.map(|(disk, _)| *disk))?;
        let Some(running) = self.running() else { return Err(not_there()) };
        if running.saving.is_some() {
            // What another filter does would not be in what is saved.
            let what = "has its memory saved. Try again when that is done";
            return Err(refusal(ErrorCode::TimedOut, &spec, what));
        }
        if running.service.waits() && running.stands_still() {
            let what = if running.live.paused {
                "has lost its filter while it was paused. Another one is started when it is unpaused (vmseal vm unpause)"
            } else {
                "has a guest that panicked, and has lost its filter. Another one is started when its guest has been restarted: try again then"
            };
            return Err(refusal(ErrorCode::TimedOut, &spec, what));
        }
        if !matches!(running.service, Service::Served(_)) {
            // In a moment it runs: the caller asks again.
            let what = "waits for another filter (alarm 'disks-down'). Try again when it runs";
            return Err(refusal(ErrorCode::TimedOut, &spec, what));
        }
        let status = running.control.status().await.map_err(|error| {
            // It may just have died: another one follows, and the caller asks again.
            let what =
                format!("has a filter that does not answer ({error}). Try again in a moment");
            refusal(ErrorCode::TimedOut, &spec, &what)
        })?;
        let at_any_time = plug::takes_filters_at_any_time(&running.qmp).await.map_err(internal)?;
        let unused = |it: &&DiskStatus| {
            let qemu_has_it = running.live.disk(it.disk).is_some();
            let counts = qemu_has_it && queues::stays_connected(&spec, it.disk);
            counts && it.driver == Some(false) && !at_any_time
        };
        let unused = status.disks.iter().find(unused);
        if let Some(disk) = unused.and_then(|it| spec.disk(it.disk)) {
            let what = format!(
                "does not use its disk '{}' now, and its QEMU, older than 9.0, would lose that disk. Try again when its guest has booted, is not paused, and has a driver for the disk",
                disk.name
            );
            return Err(refusal(ErrorCode::TimedOut, &spec, &what));
        }
        Ok(())
    }

    /// Ends the filter and starts one that serves the disks that are on record now; the guest sees a pause.
    pub(super) async fn replace_filter(&mut self) -> Result<(), Problem> {
        self.end_filter_to_replace().await?;
        self.start_filter().await
    }

    /// Ends the filter; the guest waits until there is another one.
    pub(super) async fn end_filter_to_replace(&mut self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        running.lost_still = running.panicked;
        if running.live.queues_known {
            // QEMU has the next one begin, though the guest is paused. On record before that is so.
            running.live.queues_known = false;
            running.write(&spec)?;
        }
        match std::mem::replace(&mut running.service, Service::Down(None)) {
            Service::Served(old) => {
                if running.control.shut_down().await.is_err() {
                    old.kill();
                }
                old.end_within(filter::SHUTDOWN_TIMEOUT).await;
            }
            Service::Down(Some(attempt)) => {
                attempt.end().await;
                running.end_filter_on_record().await?;
            }
            Service::Down(None) => {}
        }
        Ok(())
    }

    /// Starts a filter for a guest that waits for one.
    pub(super) async fn start_filter(&mut self) -> Result<(), Problem> {
        let plan = self.plan()?;
        self.start_filter_of(plan).await
    }

    /// The same with this plan.
    pub(super) async fn start_filter_of(&mut self, plan: Plan) -> Result<(), Problem> {
        let (shared, spec) = (self.shared.clone(), self.spec.clone());
        let Some(running) = self.running() else { return Err(not_there()) };
        let (directory, slot) = (&running.directory, &running.slot);
        let new = service::serve_once(&shared, directory, plan.into(), slot, &running.qmp).await;
        let new = new.map_err(|not_served| match not_served.into_problem() {
            // QEMU lets a new connection go while it resets the disk's device: the caller asks again.
            Problem { code: ErrorCode::Internal, detail, .. } => {
                Problem::new(ErrorCode::TimedOut, detail)
            }
            problem => problem,
        })?;
        running.service = Service::Served(new);
        running.begun_still =
            !queues::taken(&running.control, &spec, &running.live, &running.qmp).await;
        self.serves_sizes = true;
        Ok(())
    }

    /// Takes disks off the record that QEMU does not have: an answer of its monitor was lost.
    pub(super) async fn note_missing_devices(&mut self) {
        let Some(running) = self.running() else { return };
        if running.live.disks.iter().all(|disk| disk.port.is_none()) {
            return;
        }
        let Ok(devices) = plug::devices(&running.qmp).await else { return };
        let plugged = running.live.disks.iter().filter(|disk| disk.port.is_some());
        let missing = plugged.filter(|disk| !devices.contains(&qemu::disk_device(disk.disk)));
        // The next one at the next check.
        if let Some(disk) = missing.copied().next() {
            plug::drop_listener(&running.qmp, disk.socket).await;
            let _ = self.forget_disk(disk.disk, None).await;
        }
    }

    /// Has a filter replaced that serves a disk that the guest no longer has.
    pub(super) async fn let_go_of_disks(&mut self) -> Result<(), Problem> {
        let Some(running) = self.running() else { return Ok(()) };
        if !matches!(running.service, Service::Served(_)) {
            return Ok(());
        }
        let status = running.control.status().await.map_err(internal)?;
        if status.disks.iter().all(|disk| running.live.disk(disk.disk).is_some()) {
            return Ok(());
        }
        self.may_replace_filter().await?;
        let replaced = self.replace_filter().await;
        if replaced.is_err() {
            // It is started again until it serves: the guest waits.
            self.serve_again();
        }
        replaced
    }

    /// QEMU has let a device go, perhaps long after it was asked to.
    pub(super) async fn device_gone(&mut self, device: &str) {
        let Some(running) = self.running() else { return };
        let there = plug::devices(&running.qmp).await;
        if there.is_ok_and(|there| there.iter().any(|it| it == device)) {
            // It was plugged in again since: the event is older.
            return;
        }
        let live = running.live.clone();
        let nic = live.nics.iter().map(|nic| nic.nic).find(|nic| plug::nic_device(*nic) == device);
        let disk = live.disks.iter().find(|disk| qemu::disk_device(disk.disk) == device);
        if let Some(nic) = nic {
            plug::drop_network(&running.qmp, nic).await;
            let _ = self.forget_nic(nic).await;
        } else if let Some(disk) = disk {
            plug::drop_listener(&running.qmp, disk.socket).await;
            let _ = self.forget_disk(disk.disk, None).await;
        }
    }

    /// What the guest has that the server cannot change while it runs.
    pub(super) fn started_with(&self) -> Option<vmseal_api::host::StartedWith> {
        use vmseal_api::host::{DiskSettings, StartedWith};
        if matches!(self.power(), Power::Off | Power::Starting) {
            return None;
        }
        let in_use = self.in_use();
        let disks = self.spec.disks().filter(|disk| in_use(disk.disk));
        let disks = disks.map(|disk| DiskSettings {
            disk: disk.disk,
            limits: disk.limits,
            cache: disk.cache,
        });
        let (vcpus, memory) = (self.spec.vcpus, self.spec.memory);
        let boot = self.spec.hardware.boot.clone();
        Some(StartedWith { vcpus, memory, disks: disks.collect(), boot })
    }
}

/// Puts on record what is about to be done to the guest. Where that fails, nothing is done, and it stays as it was `before`.
pub(super) fn write_or(running: &mut Running, spec: &VmSpec, before: Live) -> Result<(), Problem> {
    running.write(spec).inspect_err(|_| {
        running.live = before;
        // What was written may be there, though it failed.
        let _ = running.write(spec);
    })
}

/// Whether its filter lives.
fn has_filter(running: &Running) -> bool {
    matches!(&running.service, Service::Served(filter) if !filter.has_ended())
}

pub(super) fn not_there() -> Problem {
    internal("a VM that runs has no processes")
}

fn refusal(code: ErrorCode, spec: &VmSpec, what: &str) -> Problem {
    Problem::new(code, format!("VM '{}' {what}", spec.name))
}

fn not_released(spec: &VmSpec, what: &str) -> Problem {
    let detail = format!(
        "the guest of VM '{}' has not let go of its {what} yet: it does once it has booted, and no longer uses it",
        spec.name
    );
    Problem::new(ErrorCode::TimedOut, detail)
}

/// For how long a port is not taken that a device has left, while there are others. A guest that is slow to let a device go is asked
/// again; it may then eject twice, and the second time it ejects what has come to the port since (docs/decisions/292).
/// Four times as long as it has before it is asked again.
const PORT_LEFT: Duration = Duration::from_secs(20);

/// A port that no device of a running VM is plugged into.
fn free_port(
    spec: &VmSpec,
    running: &Running,
    wanted: impl Iterator<Item = u32>,
) -> Result<u32, Problem> {
    let live = &running.live;
    if !live.spare_ports {
        let what = "was started by an earlier vmseal, without room for devices to be added while it runs. Stop it first";
        return Err(rules::wrong_state(spec, what));
    }
    let taken = |port: &u32| {
        live.nic_ports.values().any(|taken| taken == port)
            || live.disks.iter().any(|disk| disk.port == Some(*port))
    };
    let free = wanted.filter(|port| !taken(port));
    first_of(free, &running.left_ports).ok_or_else(|| no_free_port(spec, PORTS))
}

/// The first of these ports; one that a device has just left only if there is no other.
fn first_of(free: impl Iterator<Item = u32>, left: &BTreeMap<u32, Instant>) -> Option<u32> {
    let just_left = |port: &u32| left.get(port).is_some_and(|left| left.elapsed() < PORT_LEFT);
    free.min_by_key(just_left)
}

/// The port and the queues of another disk.
fn free_place(spec: &VmSpec, running: &Running) -> Result<(u32, u16), Problem> {
    if running.panicked {
        // QEMU adds a disk when a filter serves it. No other filter would begin if that died meanwhile, and QEMU would answer nothing any more.
        let what = "has a guest that panicked: it gets another disk when it boots again. Where it stands still for good, reset and unpause it first (vmseal vm reset, vmseal vm unpause)";
        return Err(rules::wrong_state(spec, what));
    }
    let last = running.live.disks.iter().filter_map(|disk| disk.port).max();
    let port = free_port(spec, running, ports::for_another_disk(last))?;
    Ok((port, free_queues(spec, running)?))
}

/// How many queues another disk may have.
fn free_queues(spec: &VmSpec, running: &Running) -> Result<u16, Problem> {
    let queues = running.live.disks.iter().map(|disk| disk.queues);
    let taken = queues.fold(0, u16::saturating_add);
    match DISK_QUEUES_MAX.saturating_sub(taken) {
        0 => {
            let what = "has no request queue left for another disk while it runs. Stop it first";
            Err(refusal(ErrorCode::LimitExceeded, spec, what))
        }
        left => Ok(left.min(running.live.disks.iter().map(|disk| disk.queues).max().unwrap_or(1))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_was_just_left_is_taken_last() {
        let long_ago = Instant::now().checked_sub(PORT_LEFT).unwrap();
        let left = BTreeMap::from([(1, Instant::now()), (2, long_ago)]);
        assert_eq!(first_of([1, 2, 3].into_iter(), &left), Some(2));
        assert_eq!(first_of([3, 1].into_iter(), &left), Some(3));
        assert_eq!(first_of([1].into_iter(), &left), Some(1));
        assert_eq!(first_of([].into_iter(), &left), None);
    }
}
