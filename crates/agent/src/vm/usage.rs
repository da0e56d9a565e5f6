//! What the VMs that run use: their processes and network cards as the kernel counts them, and their disks as their filters do.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;
use vmseal_api::host::{HostState, Power};
use vmseal_api::usage::{HostUsage, UsageCounters, UsageOnHost};

use crate::filter::{self, Control};
use crate::hypervisor::qemu;
use crate::process::interfaces::Interfaces;
use crate::process::run_dir::RunDir;
use crate::process::usage;

/// How long a filter may take to report its figures; it does no disk I/O for that.
const FIGURES_TIMEOUT: Duration = Duration::from_secs(2);

/// The usage of all VMs that run. The disks of a filter that does not answer count as idle.
pub async fn of_host(run_dir: &RunDir, state: HostState) -> HostUsage {
    let mut asked = JoinSet::new();
    let interfaces = Interfaces::now();
    let runs = |power| matches!(power, Power::Running | Power::Stopping | Power::Paused);
    for vm in state.vms.iter().filter(|vm| runs(vm.power)) {
        let network = interfaces.of_all(&vm.nics);
        let (vm, directory) = (vm.vm, run_dir.vm(vm.vm));
        asked.spawn(async move {
            let figures = timeout(FIGURES_TIMEOUT, Control::of(&directory).figures()).await;
            let guest = usage::of(&directory.process(qemu::NAME)).unwrap_or_default();
            let filter = usage::of(&directory.process(filter::NAME)).unwrap_or_default();
            let mut counters = UsageCounters {
                cpu_nanoseconds: guest.cpu_nanoseconds,
                filter_cpu_nanoseconds: filter.cpu_nanoseconds,
                memory_resident: guest.resident,
                network,
                ..UsageCounters::default()
            };
            for disk in figures.into_iter().flatten().flat_map(|figures| figures.disks) {
                counters.reads += disk.counters.reads;
                counters.read_bytes += disk.counters.read_bytes;
                counters.writes += disk.counters.writes;
                counters.written_bytes += disk.counters.written_bytes;
                counters.flushes += disk.counters.flushes;
                counters.errors += disk.counters.errors;
            }
            UsageOnHost { vm, counters }
        });
    }
    let mut vms = Vec::new();
    while let Some(answer) = asked.join_next().await {
        vms.extend(answer);
    }
    vms.sort_by_key(|usage| usage.vm);
    HostUsage { vms, memory_available: usage::memory_available() }
}
