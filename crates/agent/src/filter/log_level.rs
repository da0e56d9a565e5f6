//! Log levels. The agent's levels are also those of its filters, from their start on.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;
use vmseal_api::host::{HostState, Power};
use vmseal_api::log_level::LogLevel;
use vmseal_api::problem::Problem;
use vmseal_log::{Levels, LevelsError};

use crate::filter::Control;
use crate::process::run_dir::RunDir;

/// How long a filter may take to change its levels; it does no disk I/O for that.
const FILTER_TIMEOUT: Duration = Duration::from_secs(2);

/// Parses levels.
///
/// # Errors
/// `invalid-request`.
pub fn parse(levels: &str) -> Result<Levels, Problem> {
    levels.parse().map_err(|error: LevelsError| Problem::invalid("levels", error.to_string()))
}

/// The current levels.
#[must_use]
pub fn shown() -> LogLevel {
    LogLevel { levels: vmseal_log::levels().to_string(), silent: Vec::new() }
}

/// Changes the levels here first, then in the filters of VMs. A filter that is being started meanwhile gets
/// them at its start, or its socket is there already.
///
/// # Errors
/// `invalid-request`: nothing is changed.
pub async fn set(run_dir: &RunDir, state: HostState, levels: &str) -> Result<LogLevel, Problem> {
    let levels = parse(levels)?;
    tracing::info!(%levels, "logging at other levels from now on");
    vmseal_log::set_levels(levels);
    let mut told = JoinSet::new();
    for vm in state.vms.iter().filter(|vm| vm.power != Power::Off) {
        let (vm, starting) = (vm.vm, vm.power == Power::Starting);
        let control = Control::of(&run_dir.vm(vm));
        told.spawn(async move { (!pass_on(&control).await && !starting).then_some(vm) });
    }
    let mut silent: Vec<_> = told.join_all().await.into_iter().flatten().collect();
    silent.sort();
    Ok(LogLevel { silent, ..shown() })
}

/// Sends the agent's levels to a filter; false if it did not accept them.
pub async fn pass_on(control: &Control) -> bool {
    let levels = vmseal_log::levels().to_string();
    matches!(timeout(FILTER_TIMEOUT, control.set_log_level(levels)).await, Ok(Ok(())))
}
