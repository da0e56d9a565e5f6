//! Waiting until a cluster has come to a state.

use std::time::{Duration, Instant};

use super::answers::ClusterStatus;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;
use super::processes;
use super::progress::Progress;
use super::tools::{self, Tools};
use crate::stop;

/// How long it may take. Seconds on an idle machine; after a crash OSDs recover data first.
const LIMIT: Duration = Duration::from_secs(600);
/// How often the cluster is asked; each question starts a Python program.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// How far the cluster is: what to say of it, and whether it is there.
pub type Reached = (Progress, bool);

/// A cluster that is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Waiting<'a> {
    /// Where its files are.
    pub layout: &'a Layout,
    /// The daemons that live.
    pub daemons: &'a [Daemon],
}

impl Waiting<'_> {
    /// Waits until `reached` says that the cluster is there.
    ///
    /// # Errors
    /// It was not in time, or a daemon has ended.
    pub fn until(
        self,
        observe: &mut dyn FnMut(&Progress),
        reached: impl Fn(&ClusterStatus) -> Reached,
    ) -> Result<(), CephError> {
        let begun = Instant::now();
        let mut told = None;
        loop {
            let state = match (Tools { layout: self.layout }).ask::<ClusterStatus>(&["status"]) {
                Ok(status) => {
                    let (progress, there) = reached(&status);
                    if told.as_ref() != Some(&progress) {
                        observe(&progress);
                    }
                    if there {
                        return Ok(());
                    }
                    let state = format!("{progress}, {}", status.health.status);
                    told = Some(progress);
                    state
                }
                // The monitor may be busy; while it lives, it is asked again.
                Err(error @ (CephError::Command { .. } | CephError::NoAnswer { .. })) => {
                    error.to_string()
                }
                Err(error) => return Err(error),
            };
            self.check()?;
            if stop::asked() || begun.elapsed() > LIMIT {
                let (seconds, logs) = (LIMIT.as_secs(), self.layout.logs());
                return Err(CephError::Never { seconds, state, logs });
            }
            std::thread::sleep(ASK_EVERY);
        }
    }

    /// Finds that all daemons live.
    fn check(self) -> Result<(), CephError> {
        let living = processes::running(self.layout);
        let dead = |it: &&Daemon| !living.iter().any(|process| process.daemon == **it);
        match self.daemons.iter().find(dead) {
            None => Ok(()),
            Some(daemon) => {
                let log = self.layout.log(*daemon);
                let end = tools::end_of(&log);
                Err(CephError::Ended { daemon: daemon.to_string(), log, end })
            }
        }
    }
}
