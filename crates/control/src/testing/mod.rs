//! The fixture of the unit tests: a control plane with simulated hosts, one unless a test adds others, which can crash.

mod fixture;
mod nearby;
mod template;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::HostAgent;
use vmseal_api::problem::Problem;

pub use self::fixture::{ATTEMPTS, Fixture};
pub use self::nearby::{Lost, NearbyRemotes};
pub use self::template::new_store;
use crate::hosts::connector::HostConnector;
use crate::store::hosts::Host;

/// Connects hosts to simulated agents: each to the one of its name, and all others to the first.
#[derive(Clone)]
pub struct ToSimulated {
    pub first: SimulatedHost,
    pub others: Arc<Mutex<BTreeMap<String, SimulatedHost>>>,
}

impl HostConnector for ToSimulated {
    fn connect(&self, host: &Host) -> Result<Arc<dyn HostAgent>, Problem> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::new(others.get(&host.name).unwrap_or(&self.first).clone()))
    }
}
