//! Chooses the server to ask, and records how it answered.
//!
//! The servers of a provider replicate, so that any of them will do: those that answered last time come
//! first, in the operator's order; then those that were late; then those that failed. A key or operation that
//! one does not have or refuses is requested from the next, as replication takes time and may fail.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::client::{Client, Error};

use super::race::{DEADLINE, race};
use super::{KmipProvider, ServerState, problem};

/// Why a request failed.
pub(super) enum ServerFailure {
    /// The server refused.
    Refused(Problem),
    /// The server gave no valid answer.
    NoAnswer(Problem),
}

impl From<ServerFailure> for Problem {
    fn from(answer: ServerFailure) -> Self {
        match answer {
            ServerFailure::Refused(problem) | ServerFailure::NoAnswer(problem) => problem,
        }
    }
}

/// The servers that did not answer in one pass over many keys, by alias: their timeouts would add up.
#[derive(Default)]
pub(super) struct Silent(HashMap<String, Problem>);

impl KmipProvider {
    /// The servers, the most promising first.
    pub(super) fn by_health(&self) -> Vec<Arc<ServerState>> {
        let mut servers = self.servers();
        // A stable sort: servers of equal rank stay in the operator's order.
        servers.sort_by_key(|server| match (&server.client, server.fault()) {
            (Err(_), _) => 3,
            (Ok(_), Some(_)) => 2,
            (Ok(_), None) if server.is_late() => 1,
            (Ok(_), None) => 0,
        });
        servers
    }

    /// Asks the servers until one answers; otherwise returns the failure of each, in the order of the requests.
    /// A server that is late is asked after the others for a while.
    pub(super) async fn ask_any<T, E, F>(
        &self,
        ask: impl Fn(Arc<ServerState>) -> F,
    ) -> Result<(Arc<ServerState>, T), Vec<(Arc<ServerState>, Option<E>)>>
    where
        F: Future<Output = Result<T, E>>,
    {
        self.ask_any_of(self.by_health(), ask).await
    }

    /// As [`Self::ask_any`], of these servers, in their order.
    pub(super) async fn ask_any_of<T, E, F>(
        &self,
        servers: Vec<Arc<ServerState>>,
        ask: impl Fn(Arc<ServerState>) -> F,
    ) -> Result<(Arc<ServerState>, T), Vec<(Arc<ServerState>, Option<E>)>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let race = race(servers.len(), |place| ask(Arc::clone(&servers[place]))).await;
        for &place in &race.late {
            if !servers[place].is_late() {
                // The watch finds out the cause.
                self.wake.notify_one();
            }
            servers[place].set_late();
        }
        if let Some((place, answer)) = race.won {
            return Ok((Arc::clone(&servers[place]), answer));
        }
        let mut failed: HashMap<usize, E> = race.failed.into_iter().collect();
        let each = servers.into_iter().enumerate();
        Err(each.map(|(place, server)| (server, failed.remove(&place))).collect())
    }

    /// Asks one server, and records how it answered.
    pub(super) async fn ask_one<T, W, F>(
        &self,
        server: &ServerState,
        work: W,
    ) -> Result<T, ServerFailure>
    where
        W: FnOnce(Arc<Client>) -> F,
        F: Future<Output = Result<T, Error>>,
    {
        let client =
            server.client.as_ref().map_err(|problem| ServerFailure::NoAnswer(problem.clone()))?;
        match work(Arc::clone(client)).await {
            Ok(answer) => {
                self.note(server, None);
                Ok(answer)
            }
            Err(error) => {
                let problem = problem::of(&self.name, &error);
                if problem::is_silence(&error) {
                    self.note(server, Some(problem.clone()));
                    Err(ServerFailure::NoAnswer(problem))
                } else {
                    if error.refusal().is_some() {
                        self.note(server, None);
                    }
                    Err(ServerFailure::Refused(problem))
                }
            }
        }
    }

    /// As [`Self::ask_one`], but skips a server that did not answer before in the same pass.
    pub(super) async fn ask_unless<T, W, F>(
        &self,
        silent: &mut Silent,
        server: &ServerState,
        work: W,
    ) -> Result<T, ServerFailure>
    where
        W: FnOnce(Arc<Client>) -> F,
        F: Future<Output = Result<T, Error>>,
    {
        if let Some(problem) = silent.0.get(&server.row.alias) {
            return Err(ServerFailure::NoAnswer(problem.clone()));
        }
        let answer = self.ask_one(server, work).await;
        if let Err(ServerFailure::NoAnswer(problem)) = &answer {
            silent.0.insert(server.row.alias.clone(), problem.clone());
        }
        answer
    }

    /// Records how a server answered; wakes the watch if that is a change.
    pub(super) fn note(&self, server: &ServerState, problem: Option<Problem>) {
        let was = server.seen().map(|seen| seen.problem.is_some());
        let is = problem.is_some();
        server.saw(problem);
        if was != Some(is) {
            self.wake.notify_one();
        }
    }

    /// The failure of a server that had not answered at the timeout of the whole operation.
    pub(super) fn too_late(&self, what: &str) -> Problem {
        let what = format!("{what} did not answer within {} s", DEADLINE.as_secs());
        problem::new(&self.name, ErrorCode::TimedOut, KeyFault::KmsTimeout, &what)
    }

    /// Bounds a whole operation by [`DEADLINE`].
    pub(super) async fn within_deadline<T>(
        &self,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let bounded = tokio::time::timeout(DEADLINE, work).await;
        bounded.unwrap_or_else(|_| Err(self.too_late("the KMS")))
    }
}
