//! What reaches into a running guest: its screen, and its agent, which also says its addresses.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;

use serde_json::{Value, json};
use tokio::net::UnixStream;
use vmseal_api::host::{ConsoleStream, Power};
use vmseal_api::id::TaskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Owner, State};
use crate::hypervisor::guest_agent::GuestAgent;
use crate::hypervisor::qmp::Qmp;
use crate::rules;
use crate::rules::exclusion::Action;
use crate::vm::internal;
use crate::vm::running::Running;

impl Owner {
    fn reach(&self, action: Action) -> Result<&Running, Problem> {
        self.situation().may(action, None)?;
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => Ok(running),
            State::Off | State::Starting { .. } => {
                Err(rules::wrong_state(&self.spec, "does not run. Start it first"))
            }
        }
    }

    /// The way to the guest's agent; the caller waits for it without the owner.
    pub(super) fn guest_agent(&self) -> Result<GuestAgent, Problem> {
        Ok(self.reach(Action::Guest)?.guest.clone().called(&self.spec.name))
    }

    /// Begins to ask a guest that runs for its addresses, where it is time to; its answer is an event.
    pub(super) fn ask_for_addresses(&mut self) {
        if self.power() != Power::Running {
            return;
        }
        let Ok(agent) = self.guest_agent() else { return };
        if let State::Running(running) = &mut self.state {
            running.ask_for_addresses(agent, &self.spec);
        }
    }

    /// Notes the addresses of the guest, which has said them.
    pub(super) fn note_addresses(&mut self) {
        if let State::Running(running) | State::Stopping { running, .. } = &mut self.state {
            running.note_addresses(&self.spec);
        }
    }

    /// A new connection to the guest's screen.
    pub(super) async fn screen(&self) -> Result<ConsoleStream, Problem> {
        let running = self.reach(Action::Screen)?;
        if servers(&running.qmp).await? == 0 {
            let what = "has no screen: an earlier vmseal started it. Stop and start it";
            return Err(Problem::new(
                ErrorCode::Unsupported,
                format!("VM '{}' {what}", self.spec.name),
            ));
        }
        connect(&running.qmp).await.map_err(internal)
    }
}

/// How many VNC servers QEMU has.
async fn servers(qmp: &Qmp) -> Result<usize, Problem> {
    let servers = qmp.execute("query-vnc-servers", Value::Null).await.map_err(internal)?;
    Ok(servers.as_array().map_or(0, Vec::len))
}

/// Passes QEMU one end of a new socket as a VNC client. QEMU listens nowhere.
async fn connect(qmp: &Qmp) -> Result<ConsoleStream, Box<dyn std::error::Error + Send + Sync>> {
    let (ours, theirs) = StdStream::pair()?;
    // QEMU keeps it under this name until the next command takes it.
    let name = format!("vnc-{}", TaskId::new());
    qmp.pass_descriptor(&name, theirs.as_fd()).await?;
    let client = json!({"protocol": "vnc", "fdname": name, "skipauth": true});
    qmp.execute("add_client", client).await?;
    ours.set_nonblocking(true)?;
    Ok(Box::new(UnixStream::from_std(ours)?))
}
