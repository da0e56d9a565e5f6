//! The network cards of a VM, on the host's side: what QEMU is given of each when it starts.
//!
//! ```text
//! user    QEMU's own network stack; ports of the host that lead into the guest are chosen here
//! tap     a tap that somebody has made: opened here, handed to QEMU, otherwise left as it is
//! bridge  a tap made here, put on the bridge and handed to QEMU; it goes with QEMU
//! ```
//! QEMU opens nothing of them itself, and has no right to: see docs/network.md and docs/decisions/083.

pub(crate) mod addresses;
pub(crate) mod announce;
pub(crate) mod backlog;
mod forwards;
mod neighbours;
mod taken;
mod tap;

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};

use vmseal_api::host::{NicSpec, NicState, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::nic::{NicBackend, NicModel, PortForward};
use vmseal_api::problem::{ErrorCode, Problem};

use self::tap::{Tap, TapError};

/// The most queues of a card: a pair for each processor of the guest gains little beyond.
pub(super) const QUEUES_MAX: u32 = 8;

/// What every interface that is made for a card is called; the kernel puts a number for `%d`.
const TAP_NAMES: &str = "vmseal%d";

/// The kernel's part of virtio-net.
const VHOST_NET: &str = "/dev/vhost-net";

/// A card as QEMU is to have it.
#[derive(Debug)]
pub struct Card {
    /// What it is connected to, with what was chosen.
    pub state: NicState,
    /// Where its frames go; none through QEMU's own stack.
    pub tap: Option<OpenTap>,
}

/// A tap that is to be QEMU's.
#[derive(Debug)]
pub struct OpenTap {
    tap: Tap,
    /// As many as there are queues, or none where the kernel has no vhost-net.
    vhost: Vec<File>,
}

impl OpenTap {
    /// A descriptor for each queue.
    pub fn queues(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.tap.queues.iter().map(AsFd::as_fd)
    }

    /// A descriptor of the kernel's virtio-net for each queue, or none.
    pub fn vhost(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.vhost.iter().map(AsFd::as_fd)
    }

    /// What the guest should send at most in one frame, where it is not what Ethernet has.
    pub fn mtu(&self) -> Option<u32> {
        self.tap.mtu.filter(|mtu| *mtu != tap::ETHERNET_MTU)
    }

    /// One of descriptors that a test has made.
    #[cfg(test)]
    pub(super) fn made_of(queues: Vec<File>, vhost: Vec<File>) -> Self {
        let queues = queues.into_iter().map(Into::into).collect();
        Self { tap: Tap { name: "tap0".to_owned(), queues, mtu: None }, vhost }
    }
}

/// Opens the cards of a VM that is to start. `before` is what they were when it ran last, whose chosen ports are
/// chosen again where they are free; `own_user` is whether QEMU runs as a user of its own.
///
/// # Errors
/// What the host lacks, and what to do: nothing is left of it.
pub fn open(spec: &VmSpec, before: &[NicState], own_user: bool) -> Result<Vec<Card>, Problem> {
    let mut chosen = forwards::Chosen::new(spec.vm, own_user);
    spec.nics().map(|nic| open_chosen(spec, nic, before, &mut chosen)).collect()
}

/// Opens a card that is plugged into a VM that runs.
///
/// # Errors
/// Those of [`open`].
pub fn open_one(
    spec: &VmSpec,
    nic: &NicSpec,
    before: &[NicState],
    own_user: bool,
) -> Result<Card, Problem> {
    open_chosen(spec, nic, before, &mut forwards::Chosen::new(spec.vm, own_user))
}

fn open_chosen(
    spec: &VmSpec,
    nic: &NicSpec,
    before: &[NicState],
    chosen: &mut forwards::Chosen,
) -> Result<Card, Problem> {
    let queues = spec.vcpus.clamp(1, QUEUES_MAX);
    let queues = if nic.model == NicModel::Virtio { queues } else { 1 };
    let tap = tap_of(nic, queues)?;
    let before = before.iter().find(|before| before.nic == nic.nic);
    let forwards = chosen.choose(nic, before.map_or(&[], |before| &before.forwards))?;
    let interface = tap.as_ref().map(|open| open.tap.name.clone());
    // QEMU does not have it yet.
    let link = None;
    let state = NicState { nic: nic.nic, forwards, interface, addresses: Vec::new(), link };
    Ok(Card { state, tap })
}

/// Sees whether a card could be opened; nothing is made or taken.
///
/// # Errors
/// What [`open`] would refuse, as far as that can be told without doing it.
pub fn examine(vm: VmId, nic: &NicSpec, own_user: bool) -> Result<(), Problem> {
    match &nic.backend {
        NicBackend::User { .. } => forwards::Chosen::new(vm, own_user).choose(nic, &[]).map(drop),
        NicBackend::Tap { tap } => tap::examine_tap(tap).map_err(|error| refused(nic, &error)),
        NicBackend::Bridge { bridge } => {
            tap::examine_bridge(bridge).map_err(|error| refused(nic, &error))
        }
    }
}

/// Sees whether taps can be opened here.
///
/// # Errors
/// Why not, and what to do.
pub fn taps() -> Result<(), TapError> {
    tap::open_tun().map(drop)
}

/// Whether the kernel moves the frames of virtio cards.
#[must_use]
pub fn has_vhost() -> bool {
    !vhost(1).is_empty()
}

/// The ports that a host chooses where none is taken.
#[must_use]
pub fn preferred(vm: VmId, nic: &NicSpec) -> Vec<PortForward> {
    forwards::preferred(vm, nic)
}

fn tap_of(nic: &NicSpec, queues: u32) -> Result<Option<OpenTap>, Problem> {
    let tap = match &nic.backend {
        NicBackend::User { .. } => return Ok(None),
        NicBackend::Tap { tap } => tap::open_tap(tap, queues),
        NicBackend::Bridge { bridge } => tap::on_bridge(TAP_NAMES, bridge, queues, nic.mac),
    };
    let tap = tap.map_err(|error| refused(nic, &error))?;
    let vhost = match nic.model {
        NicModel::Virtio => vhost(tap.queues.len()),
        NicModel::E1000e => Vec::new(),
    };
    Ok(Some(OpenTap { tap, vhost }))
}

/// The kernel's virtio-net, where there is one; QEMU does its work otherwise.
fn vhost(queues: usize) -> Vec<File> {
    let open = |_| OpenOptions::new().read(true).write(true).open(VHOST_NET);
    (0..queues).map(open).collect::<Result<_, _>>().unwrap_or_else(|error| {
        tracing::debug!(%error, "{VHOST_NET} cannot be opened: QEMU moves the frames of network cards");
        Vec::new()
    })
}

fn refused(nic: &NicSpec, error: &TapError) -> Problem {
    Problem::new(ErrorCode::WrongState, format!("network card '{}': {error}", nic.name))
}
