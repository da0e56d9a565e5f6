//! What the filter of a VM counts.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::bail;
use vmseal_api::filter::{ControlReply, LayerFigures};

use crate::installation::Installation;

/// How much the filter of a VM has read for its guest into memory of its own.
pub fn bounced_bytes(here: &Installation, vm: &str) -> anyhow::Result<u64> {
    let layers = layers(here, vm)?;
    Ok(layers.iter().filter_map(|layer| layer.counters.get("bounced_bytes")).sum())
}

/// How many disks of a VM that runs have limits.
pub fn limited_disks(here: &Installation, vm: &str) -> anyhow::Result<usize> {
    Ok(layers(here, vm)?.iter().filter(|layer| layer.kind == "limit").count())
}

/// The layers of all disks of a VM, as its filter counts.
fn layers(here: &Installation, vm: &str) -> anyhow::Result<Vec<LayerFigures>> {
    let shown = here.vm(vm)?;
    let socket = here.path("run/vms").join(shown["id"].as_str().unwrap_or_default());
    let mut stream = UnixStream::connect(socket.join("filter.sock"))?;
    stream.write_all(b"{\"do\":\"figures\"}\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let ControlReply::Figures(figures) = serde_json::from_str(&line)? else { bail!("{line}") };
    Ok(figures.disks.into_iter().flat_map(|disk| disk.layers).collect())
}
