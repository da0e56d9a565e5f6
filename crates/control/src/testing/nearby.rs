//! Another control plane of the same process, whose services are called without HTTP.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;
use vmseal_api::id::TaskId;
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{
    ArrivalAddress, ArrivalChecks, ArrivalSession, ArrivalShown, BeginArrival,
};

use crate::remotes::{RemoteConnector, RemoteControlPlane};
use crate::services::caller::Caller;
use crate::services::{Services, arrivals, passphrases};
use crate::store::remotes::Remote;

/// What a test does to calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// They do not reach it.
    Calls,
    /// They reach it, and their answers are lost.
    Answers,
}

/// The other control plane that a fixture may have.
#[derive(Clone)]
pub struct NearbyRemotes {
    services: watch::Sender<Option<Arc<Services>>>,
    inside: Arc<Mutex<Inside>>,
}

impl Default for NearbyRemotes {
    fn default() -> Self {
        Self { services: watch::Sender::new(None), inside: Arc::default() }
    }
}

#[derive(Default)]
struct Inside {
    /// How many calls of this name are lost next, and how.
    lost: Option<(&'static str, Lost, u32)>,
    calls: Vec<&'static str>,
    /// What it does not say of itself, as an earlier version.
    lacks: Vec<&'static str>,
    /// What keys are sealed to in its run before this one; none once a session has begun.
    earlier_box: Option<String>,
}

impl NearbyRemotes {
    fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls go to these services from now on; without any they wait, as for a server that restarts.
    pub fn set(&self, services: Option<Arc<Services>>) {
        self.services.send_replace(services);
    }

    /// The next calls of this name are lost.
    pub fn lose(&self, call: &'static str, how: Lost, times: u32) {
        self.inside().lost = Some((call, how, times));
    }

    /// It does not say these features of itself, as an earlier version.
    pub fn lack_features(&self, features: &[&'static str]) {
        self.inside().lacks = features.to_vec();
    }

    /// It restarts between saying of itself what keys are sealed to, and the next session.
    pub fn restart_before_session(&self, earlier_box: String) {
        self.inside().earlier_box = Some(earlier_box);
    }

    /// How often this was called.
    pub fn calls(&self, name: &str) -> usize {
        self.inside().calls.iter().filter(|call| **call == name).count()
    }

    async fn ask<T>(
        &self,
        name: &'static str,
        call: impl AsyncFnOnce(&Services, &Caller) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let silent = || Problem::new(ErrorCode::Unreachable, "the other control plane is silent");
        let lost = {
            let mut inside = self.inside();
            inside.calls.push(name);
            match &mut inside.lost {
                Some((call, how, times)) if *call == name && *times > 0 => {
                    *times -= 1;
                    Some(*how)
                }
                _ => None,
            }
        };
        if lost == Some(Lost::Calls) {
            return Err(silent());
        }
        let mut known = self.services.subscribe();
        let services = known.wait_for(Option::is_some).await.map_err(|_| silent())?.clone();
        let services = services.ok_or_else(silent)?;
        let answer = call(&services, &Caller::administrator("east")).await;
        if lost == Some(Lost::Answers) { Err(silent()) } else { answer }
    }
}

impl RemoteConnector for NearbyRemotes {
    fn connect(&self, _: &Remote, _: &str) -> Result<Arc<dyn RemoteControlPlane>, Problem> {
        Ok(Arc::new(self.clone()))
    }
}

#[async_trait]
impl RemoteControlPlane for NearbyRemotes {
    async fn about(&self) -> Result<About, Problem> {
        let mut about =
            self.ask("about", async |services, _| Ok(passphrases::about(services))).await?;
        let inside = self.inside();
        about.features.retain(|feature| !inside.lacks.contains(&feature.as_str()));
        if let Some(earlier) = &inside.earlier_box {
            about.passphrase_box.clone_from(earlier);
        }
        Ok(about)
    }

    async fn check_arrival(&self, arrival: &BeginArrival) -> Result<ArrivalChecks, Problem> {
        let arrival = arrival.clone();
        self.ask("check", async |on, caller| arrivals::check(on, caller, arrival).await).await
    }

    async fn begin_arrival(&self, id: TaskId, of: &BeginArrival) -> Result<ArrivalShown, Problem> {
        let (id, of) = (id.to_string(), of.clone());
        self.ask("begin", async |on, caller| arrivals::begin(on, caller, &id, of).await).await
    }

    async fn begin_session(
        &self,
        id: TaskId,
        session: &ArrivalSession,
    ) -> Result<ArrivalAddress, Problem> {
        self.inside().earlier_box = None;
        let (id, session) = (id.to_string(), session.clone());
        let call = async |on: &Services, caller: &Caller| {
            arrivals::session(on, caller, &id, session).await
        };
        self.ask("session", call).await
    }

    async fn arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem> {
        let id = id.to_string();
        self.ask("show", async |on, caller| arrivals::show(on, caller, &id).await).await
    }

    async fn commit_arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem> {
        let id = id.to_string();
        self.ask("commit", async |on, caller| arrivals::commit(on, caller, &id).await).await
    }

    async fn cancel_arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem> {
        let id = id.to_string();
        self.ask("cancel", async |on, caller| arrivals::cancel(on, caller, &id).await).await
    }
}
