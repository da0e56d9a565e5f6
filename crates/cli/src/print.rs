//! Results on standard output: tables for people, the API's own documents for programs.

use bytesize::ByteSize;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;
use vmseal_api::host::{DatastoreLocation, DiskFacts};
use vmseal_api::model::{Alarm, Datastore, Event, Host, Policy, Provider, Task, Vm};

use crate::arguments::Output;

/// A resource as a row of a table.
pub trait Row: Serialize {
    /// The column heads.
    const HEADS: &'static [&'static str];
    /// The cells, as many as heads.
    fn cells(&self) -> Vec<String>;
}

/// Prints a list.
pub fn list<T: Row>(output: Output, items: &[T]) -> anyhow::Result<()> {
    match output {
        Output::Json => json(&items),
        Output::Table => {
            let mut table = Table::new();
            table.load_style(NOTHING).set_header(T::HEADS);
            for item in items {
                table.add_row(item.cells());
            }
            print(&table.trim_fmt());
            Ok(())
        }
    }
}

/// Prints one resource: all of it for programs, name and value lines for people.
pub fn one<T: Row>(output: Output, item: &T, more: &[(&str, String)]) -> anyhow::Result<()> {
    match output {
        Output::Json => json(item),
        Output::Table => {
            let mut table = Table::new();
            table.load_style(NOTHING);
            for (head, cell) in T::HEADS.iter().zip(item.cells()) {
                table.add_row([format!("{head}:"), cell]);
            }
            for (head, cell) in more {
                table.add_row([format!("{head}:"), cell.clone()]);
            }
            print(&table.trim_fmt());
            Ok(())
        }
    }
}

/// Prints what a program reads.
pub fn json<T: Serialize + ?Sized>(item: &T) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(item)?);
    Ok(())
}

/// Prints a line; a reader that has gone away (`vmseal vm list | head -1`) is no error.
fn print(text: &str) {
    use std::io::Write;
    if writeln!(std::io::stdout().lock(), "{text}").is_err() {
        std::process::exit(0);
    }
}

/// The word that the API uses for an enum's value.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word.replace('_', "-"),
        _ => String::new(),
    }
}

/// Bytes as people write them.
pub fn bytes(count: u64) -> String {
    ByteSize(count).display().iec().to_string()
}

fn or_dash<T: Serialize>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), word)
}

impl Row for Host {
    const HEADS: &'static [&'static str] =
        &["NAME", "CONNECTION", "ADDRESS", "ACCELERATOR", "CPUS", "MEMORY"];
    fn cells(&self) -> Vec<String> {
        let described = self.description.as_ref();
        vec![
            self.name.clone(),
            word(&self.connection),
            self.address.clone(),
            or_dash(described.map(|d| &d.accelerator.kind)),
            described.map_or_else(|| "-".into(), |d| d.cpus.to_string()),
            described.map_or_else(|| "-".into(), |d| bytes(d.memory)),
        ]
    }
}

impl Row for Datastore {
    const HEADS: &'static [&'static str] = &["NAME", "HOST", "LOCATION", "FREE", "CAPACITY"];
    fn cells(&self) -> Vec<String> {
        let DatastoreLocation::Dir { path } = &self.location;
        vec![
            self.name.clone(),
            self.host.clone(),
            format!("dir:{}", path.display()),
            self.usage.map_or_else(|| "-".into(), |usage| bytes(usage.free)),
            self.usage.map_or_else(|| "-".into(), |usage| bytes(usage.capacity)),
        ]
    }
}

impl Row for Provider {
    const HEADS: &'static [&'static str] = &["NAME", "KIND", "DEFAULT", "STATUS"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            word(&self.kind),
            if self.default { "yes" } else { "no" }.into(),
            word(&self.status),
        ]
    }
}

impl Row for Policy {
    const HEADS: &'static [&'static str] = &["NAME", "ENCRYPTION", "PROVIDER", "ALLOCATION"];
    fn cells(&self) -> Vec<String> {
        let provider = match (&self.provider, self.encryption) {
            (Some(provider), _) => provider.clone(),
            (None, true) => "(default)".into(),
            (None, false) => "-".into(),
        };
        vec![
            self.name.clone(),
            if self.encryption { "yes" } else { "no" }.into(),
            provider,
            word(&self.allocation),
        ]
    }
}

impl Row for Vm {
    const HEADS: &'static [&'static str] =
        &["NAME", "POWER", "KEY", "POLICY", "HOST", "VCPUS", "MEMORY", "LIFECYCLE"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            or_dash(self.power.as_ref()),
            or_dash(self.key_state.as_ref()),
            self.policy.clone(),
            self.host.clone(),
            self.vcpus.to_string(),
            bytes(self.memory),
            word(&self.lifecycle),
        ]
    }
}

/// What `vm show` says beyond the list's columns.
pub fn vm_details(vm: &Vm) -> Vec<(&'static str, String)> {
    let mut lines = vec![("ID", vm.id.to_string())];
    if let Some(key) = &vm.key {
        lines.push((
            "KEY ID",
            format!("{} (provider {}, check value {})", key.key_id, key.provider, key.check),
        ));
    }
    for disk in &vm.disks {
        let format = match &disk.facts {
            None => "not made yet".to_owned(),
            Some(DiskFacts::Raw) => "raw, in the clear".to_owned(),
            Some(DiskFacts::Luks2 { cipher, key_bits, sector_size, .. }) => {
                format!("LUKS2 {cipher}, {key_bits}-bit key, {sector_size}-byte sectors")
            }
        };
        lines.push((
            "DISK",
            format!(
                "{} {} {} on {}: {format} ({})",
                disk.name,
                bytes(disk.size),
                word(&disk.allocation),
                disk.datastore,
                disk.id
            ),
        ));
    }
    if let Some(stopped) = &vm.stopped {
        lines.push((
            "LAST STOP",
            format!("{} at {}: {}", word(&stopped.reason), stopped.at, stopped.detail),
        ));
    }
    lines
}

impl Row for Task {
    const HEADS: &'static [&'static str] = &["ID", "KIND", "TARGET", "STATE", "STEP", "CREATED"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.kind.clone(),
            self.target.clone(),
            word(&self.state),
            self.step.clone(),
            format!("{:.0}", self.created),
        ]
    }
}

impl Row for Event {
    const HEADS: &'static [&'static str] = &["AT", "KIND", "TARGET", "ACTOR", "DETAIL"];
    fn cells(&self) -> Vec<String> {
        vec![
            format!("{:.0}", self.at),
            self.kind.clone(),
            self.target.clone(),
            self.actor.clone(),
            self.detail.clone(),
        ]
    }
}

impl Row for Alarm {
    const HEADS: &'static [&'static str] = &["ALARM", "TARGET", "SINCE", "DETAIL"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.code.clone(),
            self.target.clone(),
            format!("{:.0}", self.since),
            self.detail.clone(),
        ]
    }
}
