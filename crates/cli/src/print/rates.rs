//! What VMs use, as a table.

use serde::Serialize;
use vmseal_api::usage::VmUsage;

use super::Lines;
use crate::arguments::Output;
use crate::rows::Row;
use crate::rows::column::{Cell, Column, more, usual};

/// What a VM uses, per second, between two looks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmRates {
    pub vm: String,
    pub name: String,
    pub host: String,
    pub vcpus: u32,
    /// Of one processor: 200 are two that are busy.
    pub cpu_percent: f64,
    /// What of a processor encrypts and moves its data.
    pub filter_percent: f64,
    pub memory: u64,
    pub memory_resident: u64,
    pub reads_per_second: f64,
    pub read_bytes_per_second: f64,
    pub writes_per_second: f64,
    pub written_bytes_per_second: f64,
    pub flushes_per_second: f64,
    /// Since the VM started.
    pub errors: u64,
    /// What its guest receives and sends by cards on bridges and taps; none where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub received_bytes_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub received_packets_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_bytes_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_packets_per_second: Option<f64>,
}

/// Prints one look.
pub fn show(output: Output, rows: &[VmRates]) -> anyhow::Result<()> {
    match output {
        Output::Csv => super::append(output, &mut Lines::all(output), rows),
        _ => super::append(output, &mut Lines::usual(output), rows),
    }
}

/// What a VM has used since it started.
pub fn since_start(used: &VmUsage) -> Vec<(&'static str, String)> {
    let size = |bytes| Cell::Bytes(bytes).for_people();
    let seconds = |nanoseconds: u64| format!("{:.1} s", nanoseconds as f64 / 1e9);
    let counters = &used.counters;
    let mut lines = vec![
        (
            "CPU SINCE START",
            format!(
                "{}, and {} of its filter",
                seconds(counters.cpu_nanoseconds),
                seconds(counters.filter_cpu_nanoseconds)
            ),
        ),
        ("MEMORY IN USE", size(counters.memory_resident)),
        (
            "READ SINCE START",
            format!("{} in {} requests", size(counters.read_bytes), counters.reads),
        ),
        (
            "WRITTEN SINCE START",
            format!("{} in {} requests", size(counters.written_bytes), counters.writes),
        ),
    ];
    if let Some(network) = counters.network {
        let over = |bytes, packets| format!("{} in {packets} packets", size(bytes));
        let received = over(network.received_bytes, network.received_packets);
        let sent = over(network.sent_bytes, network.sent_packets);
        lines.extend([("RECEIVED SINCE START", received), ("SENT SINCE START", sent)]);
    }
    lines
}

fn tenths(value: f64) -> Cell {
    Cell::Text(format!("{value:.1}"))
}

fn bytes(value: f64) -> Cell {
    // Rates of real devices fit; what does not is the most.
    Cell::Bytes(value as u64)
}

impl Row for VmRates {
    const PLURAL: &'static str = "VMs";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("host", |it| (&it.host).into()),
        usual("cpu%", |it| tenths(it.cpu_percent)),
        usual("filter%", |it| tenths(it.filter_percent)),
        usual("vcpus", |it| Cell::Number(it.vcpus.into())),
        usual("in-use", |it| Cell::Bytes(it.memory_resident)),
        usual("memory", |it| Cell::Bytes(it.memory)),
        usual("reads/s", |it| tenths(it.reads_per_second)),
        usual("read/s", |it| bytes(it.read_bytes_per_second)),
        usual("writes/s", |it| tenths(it.writes_per_second)),
        usual("written/s", |it| bytes(it.written_bytes_per_second)),
        more("flushes/s", |it| tenths(it.flushes_per_second)),
        usual("errors", |it| Cell::Number(it.errors)),
        usual("rx/s", |it| it.received_bytes_per_second.map(bytes).into()),
        more("rx-packets/s", |it| it.received_packets_per_second.map(tenths).into()),
        usual("tx/s", |it| it.sent_bytes_per_second.map(bytes).into()),
        more("tx-packets/s", |it| it.sent_packets_per_second.map(tenths).into()),
        more("id", |it| (&it.vm).into()),
    ];
    fn identity(&self) -> String {
        self.vm.clone()
    }
}
