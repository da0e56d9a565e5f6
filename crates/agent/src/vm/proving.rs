//! A proof while it is made: the files are read in a thread of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::problem::Problem;
use vmseal_api::proof::SignedReport;

use super::report::{Progress, Report};
use super::{Shared, internal};
use crate::storage::gate::Gate;
use crate::storage::proof::Proving;

/// Reads the files, at the pace of `gate`, and signs the report. When this returns, nothing is read any more.
///
/// # Errors
/// Those of [`Proving::run`].
pub async fn prove(
    shared: Arc<Shared>,
    proving: Proving,
    show: Progress,
    gate: Arc<Gate>,
    mut cancelled: oneshot::Receiver<()>,
) -> Result<SignedReport, Problem> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let pace = Arc::clone(&gate);
    let mut reading = spawn_blocking(move || {
        let mut before = 0;
        let progress = |done: u64, total| {
            show.progress(Report::Progress(done, total));
            // After a refusal it has been cancelled, which ends the reading.
            let _ = pace.pass(done.saturating_sub(before));
            before = done;
        };
        let mut report = proving.run(progress, &|| stopped.load(Ordering::Relaxed))?;
        let signer = shared.signer.get();
        report.host = signer.map(|signer| signer.host);
        let text = serde_json::to_string(&report).map_err(internal)?;
        let signature = signer.map(|signer| signer.sign(text.as_bytes())).transpose()?;
        Ok(SignedReport { report: text, signature })
    });
    tokio::select! {
        report = &mut reading => return report.map_err(internal)?,
        _ = &mut cancelled => {
            stop.store(true, Ordering::Relaxed);
            gate.close();
        }
    }
    reading.await.map_err(internal)?
}
