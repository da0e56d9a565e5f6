//! Other control planes over HTTPS, known by their authority's certificate.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::json;
use vmseal_api::client::ServerClient;
use vmseal_api::id::TaskId;
use vmseal_api::model::About;
use vmseal_api::problem::Problem;
use vmseal_api::remote::{
    ArrivalAddress, ArrivalChecks, ArrivalSession, ArrivalShown, BeginArrival,
};

use super::{RemoteConnector, RemoteControlPlane};
use crate::store::remotes::Remote;

/// Connects over HTTPS.
pub struct HttpsRemotes;

impl RemoteConnector for HttpsRemotes {
    fn connect(
        &self,
        remote: &Remote,
        token: &str,
    ) -> Result<Arc<dyn RemoteControlPlane>, Problem> {
        let client = ServerClient::new(&remote.url, &remote.authority, token)?;
        Ok(Arc::new(HttpsRemote(client)))
    }
}

struct HttpsRemote(ServerClient);

#[async_trait]
impl RemoteControlPlane for HttpsRemote {
    async fn about(&self) -> Result<About, Problem> {
        self.0.get("about").await
    }

    async fn check_arrival(&self, arrival: &BeginArrival) -> Result<ArrivalChecks, Problem> {
        self.0.post("arrivals/check", arrival).await
    }

    async fn begin_arrival(&self, id: TaskId, of: &BeginArrival) -> Result<ArrivalShown, Problem> {
        self.0.put(&format!("arrivals/{id}"), of).await
    }

    async fn begin_session(
        &self,
        id: TaskId,
        session: &ArrivalSession,
    ) -> Result<ArrivalAddress, Problem> {
        self.0.post(&format!("arrivals/{id}/session"), session).await
    }

    async fn arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem> {
        self.0.get(&format!("arrivals/{id}")).await
    }

    async fn commit_arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem> {
        self.0.post(&format!("arrivals/{id}/commit"), &json!({})).await
    }

    async fn cancel_arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem> {
        self.0.post(&format!("arrivals/{id}/cancel"), &json!({})).await
    }
}
