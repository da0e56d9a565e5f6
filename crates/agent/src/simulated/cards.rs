//! What network cards are connected to: a simulated host has every bridge and tap that was not taken from it and whose name does not
//! begin with `missing`, and guests that run have what theirs are connected to.

use vmseal_api::host::NicSpec;
use vmseal_api::nic::{NicBackend, PortForward};
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Inside, SimulatedHost};
use crate::hypervisor::network;

impl SimulatedHost {
    /// Takes a bridge or a tap from it. Guests that run keep what they are connected to.
    pub fn lack_network(&self, name: &str) {
        self.inside().lacks_networks.insert(name.to_owned());
    }
}

impl Inside {
    /// Checks that a card could be connected.
    pub fn may_connect(&self, nic: &NicSpec) -> Result<(), Problem> {
        let refused = |code, what: String| {
            Err(Problem::new(code, format!("network card '{}': {what}", nic.name)))
        };
        match &nic.backend {
            NicBackend::Bridge { bridge: name } | NicBackend::Tap { tap: name }
                if name.starts_with("missing") || self.lacks_networks.contains(name) =>
            {
                refused(ErrorCode::WrongState, format!("there is no '{name}'"))
            }
            NicBackend::Tap { tap } if self.has_guest_with(nic) => {
                let what = format!("tap '{tap}' is in use by another VM or program");
                refused(ErrorCode::WrongState, what)
            }
            NicBackend::User { forwards } => match forwards.iter().find(|it| self.forwards(it)) {
                Some(taken) => {
                    let what = format!("port {} is in use on the host", taken.host_port);
                    refused(ErrorCode::InUse, what)
                }
                None => Ok(()),
            },
            NicBackend::Bridge { .. } | NicBackend::Tap { .. } => Ok(()),
        }
    }

    /// Whether a guest that runs has another card that is connected to the same.
    fn has_guest_with(&self, nic: &NicSpec) -> bool {
        let mut cards = self.persisted.guests.values().flat_map(|guest| guest.spec.nics());
        cards.any(|card| card.nic != nic.nic && card.backend == nic.backend)
    }

    /// Whether a port leads into a guest that runs.
    fn forwards(&self, wanted: &PortForward) -> bool {
        self.persisted.guests.values().any(|guest| {
            let spec = &guest.spec;
            let mut taken = spec.nics().flat_map(|card| network::preferred(spec.vm, card));
            taken.any(|port| port.collides(wanted))
        })
    }
}
