//! The memory of a guest that comes from another host, as QEMU loads it. See [`super::migration`].

use std::sync::{Mutex, PoisonError};

use serde_json::json;
use vmseal_api::problem::Problem;

use super::internal;
use super::migration::{Link, Message, lost, set_capabilities};
use super::stream::{completed, pass, sockets};
use crate::hypervisor::qmp::Qmp;

/// The memory that comes from another host.
pub struct Arriving {
    /// The type of the machine.
    pub machine: String,
    /// Taken when it is loaded.
    link: Mutex<Option<Link>>,
}

impl Arriving {
    /// That of a guest with such a machine.
    pub fn new(machine: String, link: Link) -> Self {
        Self { machine, link: Mutex::new(Some(link)) }
    }

    /// Has the source send it, and a QEMU that waits load it.
    ///
    /// # Errors
    /// QEMU's, and those of the connection.
    pub async fn load(&self, qmp: &Qmp) -> Result<(), Problem> {
        let mut link = self.take().ok_or_else(|| internal("the memory has been loaded already"))?;
        set_capabilities(qmp).await.map_err(internal)?;
        let (theirs, ours) = sockets()?;
        let name = pass(qmp, "migration", theirs).await.map_err(internal)?;
        let carried = link.carry_memory(ours)?;
        let uri = json!({"uri": format!("fd:{name}")});
        qmp.execute("migrate-incoming", uri).await.map_err(internal)?;
        link.send(&Message::Ready).await?;
        // First what the connection says: QEMU only finds that its stream has ended. To its authenticated end: nothing of it
        // was cut off.
        tokio::try_join!(async { carried.done().await.map_err(lost) }, completed(qmp, |_| ()))?;
        link.finish().await;
        Ok(())
    }

    /// Tells the source why it need not send, unless it does already.
    pub async fn refuse(&self, problem: &Problem) {
        if let Some(mut link) = self.take() {
            let why = problem.detail.clone();
            let _ = link.send(&Message::Refused { why }).await;
        }
    }

    fn take(&self) -> Option<Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
