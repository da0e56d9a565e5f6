//! What QEMU knows of the queues of a guest's disks when the guest stands still: whether its memory can be saved, or sent.
//!
//! ```text
//!  the guest is stopped ─► QEMU asks the filter how far it has come in each queue ─► it is saved: the memory, and these places
//!                             │ the filter is dead
//!                             └─► QEMU takes as many as are answered: what was answered out of order is then missed,
//!                                 or done twice
//! ```
//! A filter that begins while the guest stands still works through what is in the queues, beyond the places that QEMU has noted when the
//! guest was stopped. QEMU saves the places that it has noted, and the one that loads them finds more requests answered than begun, and
//! refuses.
//!
//! So what is saved is whole if one filter served before the guest was stopped, lived after that, and none has begun since. It may have
//! died since: QEMU has the places. [`Witness`] says the first two, and [`stands_still`](super::running::Running::stands_still) keeps others from beginning; where that is
//! not possible, it is noted ([`begun_still`](super::running::Running::begun_still), [`Live::queues_known`]).

use serde_json::Value;
use vmseal_api::filter::{DiskActivity, FilterStatus};
use vmseal_api::host::{Attachment, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::asleep;
use crate::filter::Control;
use crate::hypervisor::qmp::Qmp;
use crate::process::Observed;
use crate::process::live::Live;
use crate::rules;

/// The filter that serves a guest which is about to be stopped, and how it is asked.
pub struct Witness {
    filter: Observed,
    control: Control,
}

impl Witness {
    pub fn new(filter: Observed, control: Control) -> Self {
        Self { filter, control }
    }

    /// Why it may not have answered QEMU, which has stopped the guest; none where it has. A filter that ends while this asks may have
    /// answered: that counts as an error, too.
    pub async fn silent(&self, spec: &VmSpec, live: &Live) -> Option<String> {
        if self.filter.has_ended() {
            return Some("it has ended".to_owned());
        }
        match self.control.status().await {
            Ok(status) => not_connected(&status, spec, live),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Checks that it has answered QEMU, which has stopped the guest. `what` says what is not done otherwise.
    ///
    /// # Errors
    /// `wrong-state`.
    pub async fn has_answered(
        &self,
        spec: &VmSpec,
        live: &Live,
        what: &str,
    ) -> Result<(), Problem> {
        let Some(why) = self.silent(spec, live).await else { return Ok(()) };
        let what = format!(
            "{what}: the filter of its disks did not answer when its guest was stopped ({why}). Try again"
        );
        Err(rules::wrong_state(spec, &what))
    }
}

/// Why QEMU is not connected to a filter for all of the guest's disks.
fn not_connected(status: &FilterStatus, spec: &VmSpec, live: &Live) -> Option<String> {
    let expected = |disk: DiskId| live.disk(disk).is_some() && stays_connected(spec, disk);
    // One that QEMU has left is not looked at once more.
    unserved(status, expected, &mut true)
}

/// Whether QEMU connects to this disk by itself when another filter serves it. To the firmware's variables it
/// connects when the guest next reads or writes them.
pub fn stays_connected(spec: &VmSpec, disk: DiskId) -> bool {
    spec.disk(disk).is_none_or(|disk| disk.role.attachment() == Attachment::Disk)
}

/// Why a live filter must be replaced. A disk that QEMU has disconnected from is `left` at first, and a
/// reason at the next check: QEMU may be ending. `expected` says whether QEMU keeps a connection for a disk.
pub fn unserved(
    status: &FilterStatus,
    expected: impl Fn(DiskId) -> bool,
    left: &mut bool,
) -> Option<String> {
    let was_left = std::mem::replace(left, false);
    status.disks.iter().find_map(|disk| match &disk.state {
        DiskActivity::Failed { message } => Some(message.clone()),
        DiskActivity::Idle if !expected(disk.disk) => None,
        DiskActivity::Idle if was_left => Some("QEMU's connection has ended".to_owned()),
        DiskActivity::Idle => {
            *left = true;
            None
        }
        _ => None,
    })
}

/// Whether QEMU has taken the filter that serves, and its guest runs after that.
pub async fn taken(control: &Control, spec: &VmSpec, live: &Live, qmp: &Qmp) -> bool {
    let Ok(status) = control.status().await else { return false };
    if not_connected(&status, spec, live).is_some() {
        return false;
    }
    qmp.execute("query-status", Value::Null).await.is_ok_and(|status| runs(&status))
}

/// Whether a guest runs of which QEMU says this. One that sleeps has its disks used as one that is awake: QEMU does not stop them then.
pub fn runs(status: &Value) -> bool {
    status["running"] == Value::Bool(true) || asleep::sleeps(status)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Stdio;

    use serde_json::json;

    use super::*;
    use crate::filter;
    use crate::process::run_dir::RunDir;
    use crate::process::run_dir::tests::spec;
    use crate::process::{self, Launch};

    #[test]
    fn a_guest_runs_while_its_disks_are_used() {
        for (status, expected) in [
            (json!({"running": true, "status": "running"}), true),
            (json!({"running": false, "status": "suspended"}), true),
            (json!({"running": false, "status": "paused"}), false),
            (json!({"running": false, "status": "finish-migrate"}), false),
            (json!({"running": false, "status": "postmigrate"}), false),
            (json!({}), false),
        ] {
            assert_eq!(runs(&status), expected, "{status}");
        }
    }

    #[tokio::test]
    async fn a_filter_that_has_ended_or_says_nothing_has_not_answered() {
        let root = tempfile::tempdir().unwrap();
        let spec = spec();
        let directory = RunDir::open(root.path()).unwrap().vm(spec.vm);
        directory.renew().await.unwrap();
        let process = process::launch(Launch {
            program: &process::open_program(Path::new("/bin/sh")).unwrap(),
            name: filter::NAME,
            arguments: vec!["-c".into(), "exec sleep 60".into()],
            keep: vec![],
            input: Stdio::null(),
            log: directory.log(filter::NAME).unwrap(),
            user: None,
            locks_memory: false,
            record: &directory.process(filter::NAME),
        })
        .unwrap();
        let control = Control::of(&directory);
        let witness = Witness { filter: process.observe().unwrap(), control };
        let live = Live::at_start(&spec);
        let why = witness.silent(&spec, &live).await.expect("it has no control socket");
        assert!(!why.contains("it has ended"), "{why}");
        process.kill();
        process.ended().await;
        assert_eq!(witness.silent(&spec, &live).await.unwrap(), "it has ended");
        let problem = witness.has_answered(&spec, &live, "is not paused").await.unwrap_err();
        assert!(problem.detail.contains("is not paused: the filter"), "{problem}");
        directory.sweep().await.unwrap();
    }
}
