//! How the server connects to an agent: over HTTPS, or in tests to a simulated one.

use std::sync::Arc;

use vmseal_api::client::{ClientIdentity, HostClient};
use vmseal_api::host::HostAgent;
use vmseal_api::problem::Problem;

use crate::store::hosts::Host;

/// Makes the clients of hosts' agents.
pub trait HostConnector: Send + Sync {
    /// The agent of a host; it need not answer yet.
    ///
    /// # Errors
    /// No client can be made with these settings.
    fn connect(&self, host: &Host) -> Result<Arc<dyn HostAgent>, Problem>;
}

/// Over HTTPS, with certificates on both sides.
pub struct HttpsConnector(pub ClientIdentity);

impl HostConnector for HttpsConnector {
    fn connect(&self, host: &Host) -> Result<Arc<dyn HostAgent>, Problem> {
        let client = HostClient::new(host.id, &host.name, &host.address, &self.0)
            .map_err(|error| crate::internal(&error))?;
        Ok(Arc::new(client))
    }
}
