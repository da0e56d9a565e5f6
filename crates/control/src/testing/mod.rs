//! The fixture of the unit tests: a control plane with simulated hosts, which can crash.

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

/// The name of the second host of a fixture.
pub const OTHER_HOST: &str = "there";

/// Connects the second host to its agent, and every other one to the first.
pub struct ToEither(pub SimulatedHost, pub SimulatedHost);

impl HostConnector for ToEither {
    fn connect(&self, host: &Host) -> Result<Arc<dyn HostAgent>, Problem> {
        let agent = if host.name == OTHER_HOST { &self.1 } else { &self.0 };
        Ok(Arc::new(agent.clone()))
    }
}

/// Connects every host to the same agent.
pub struct ToSimulated(pub SimulatedHost);

impl HostConnector for ToSimulated {
    fn connect(&self, _: &Host) -> Result<Arc<dyn HostAgent>, Problem> {
        Ok(Arc::new(self.0.clone()))
    }
}
