//! The fixture of the unit tests: a control plane with one simulated host, which can crash.

mod fixture;
mod template;

use std::sync::Arc;

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::HostAgent;
use vmseal_api::problem::Problem;

pub use self::fixture::{ATTEMPTS, Fixture};
pub use self::template::new_store;
use crate::hosts::connector::HostConnector;
use crate::store::hosts::Host;

/// Connects every host to the same agent.
pub struct ToSimulated(pub SimulatedHost);

impl HostConnector for ToSimulated {
    fn connect(&self, _: &Host) -> Result<Arc<dyn HostAgent>, Problem> {
        Ok(Arc::new(self.0.clone()))
    }
}
