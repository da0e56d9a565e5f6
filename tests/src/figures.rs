//! What the filter of a VM counts.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::bail;
use vmseal_api::filter::ControlReply;

use crate::installation::Installation;

/// How much the filter of a VM has read for its guest into memory of its own.
pub fn bounced_bytes(here: &Installation, vm: &str) -> anyhow::Result<u64> {
    Ok(counted(here, vm, "bounced_bytes")?.into_iter().sum())
}

/// How many requests of its guest have waited for the limits of each disk that has some.
pub fn held_requests(here: &Installation, vm: &str) -> anyhow::Result<Vec<u64>> {
    counted(here, vm, "held_requests")
}

/// What the layers of a VM's disks have counted by this name.
fn counted(here: &Installation, vm: &str, name: &str) -> anyhow::Result<Vec<u64>> {
    let shown = here.vm(vm)?;
    let socket = here.path("run/vms").join(shown["id"].as_str().unwrap_or_default());
    let mut stream = UnixStream::connect(socket.join("filter.sock"))?;
    stream.write_all(b"{\"do\":\"figures\"}\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let ControlReply::Figures(figures) = serde_json::from_str(&line)? else { bail!("{line}") };
    let layers = figures.disks.iter().flat_map(|disk| &disk.layers);
    Ok(layers.filter_map(|layer| layer.counters.get(name).copied()).collect())
}
