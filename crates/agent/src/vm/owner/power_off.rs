//! Cutting a VM's power, and asking its guest to shut down.

use std::time::Duration;

use tokio::time::Instant;
use vmseal_api::host::{Power, PowerOff, StopReason};
use vmseal_api::problem::Problem;
use vmseal_api::request_id;

use super::{Owner, State};
use crate::rules;
use crate::rules::exclusion::Action;
use crate::vm::internal;

impl Owner {
    pub(super) async fn power_off(&mut self, how: PowerOff) -> Result<(), Problem> {
        let shutdown_time = match how {
            PowerOff::Shutdown { seconds } => {
                let shutdown_time = rules::shutdown_time(seconds)?;
                self.situation().may(Action::ShutDown, None)?;
                shutdown_time
            }
            PowerOff::Force if self.power() == Power::Suspended => {
                return Err(rules::suspended(&self.spec));
            }
            PowerOff::Force | PowerOff::CancelStart => Duration::ZERO,
        };
        match (std::mem::replace(&mut self.state, State::Off), how) {
            (State::Off, _) => {}
            // `may` has refused that above.
            (state @ State::Starting { .. }, PowerOff::Shutdown { .. }) => self.state = state,
            (State::Starting { task, cancel }, PowerOff::Force | PowerOff::CancelStart) => {
                self.request = request_id::current();
                let _ = cancel.send(());
                let ending = match task.await {
                    // Its saved memory is used up: what the guest has is nowhere else.
                    Ok(Ok(started)) if self.suspended => {
                        self.started(Ok(started)).await;
                        return Err(rules::resumed(&self.spec));
                    }
                    // The start has just succeeded: the VM is ended like a running one.
                    Ok(Ok((running, _))) => running.force_off().await,
                    Ok(Err(_)) | Err(_) => {
                        (StopReason::PoweredOff, "an operator cancelled the start".to_owned())
                    }
                };
                self.went_off(ending).await;
            }
            (
                // Pressed again: some guests obey it only when they have booted.
                State::Running(running) | State::Stopping { running, .. },
                PowerOff::Shutdown { .. },
            ) => {
                let asked = running.ask_to_shut_down().await;
                self.request = request_id::current();
                self.state = match asked {
                    Ok(()) => State::Stopping { running, until: Instant::now() + shutdown_time },
                    Err(_) => State::Running(running),
                };
                asked.map_err(internal)?;
            }
            (state @ (State::Running(_) | State::Stopping { .. }), PowerOff::CancelStart) => {
                self.state = state;
                return Err(rules::has_started(&self.spec));
            }
            (State::Running(running) | State::Stopping { running, .. }, PowerOff::Force) => {
                self.request = request_id::current();
                let ending = running.force_off().await;
                self.went_off(ending).await;
            }
        }
        Ok(())
    }
}
