//! What VMs use of their hosts, again and again: rates between two looks.

use std::io::IsTerminal;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use vmseal_api::client::ServerClient;
use vmseal_api::usage::{NetworkCounters, Usage, UsageCounters, VmUsage};

use super::reconnect::across;
use crate::arguments::{Output, Top, TopOrder};
use crate::print::{self, VmRates, rates};

/// Moves to the top of the terminal and clears it (ECMA-48: CUP, ED).
const CLEAR: &str = "\x1b[H\x1b[2J";

/// One look, for programs.
#[derive(Serialize)]
struct Document<'a> {
    at: String,
    vms: &'a [VmRates],
    missing: &'a [String],
}

pub async fn run(server: &ServerClient, output: Output, options: Top) -> anyhow::Result<()> {
    let path = match &options.name {
        Some(name) => format!(
            "usage?vm={}",
            url::form_urlencoded::byte_serialize(name.as_bytes()).collect::<String>()
        ),
        None => "usage".to_owned(),
    };
    let read = async || server.get::<Usage>(&path).await;
    let whole_screen = output == Output::Table && !options.batch && std::io::stdout().is_terminal();
    let mut before = read().await?;
    let mut looks = 0;
    while options.iterations.is_none_or(|most| looks < most) && !print::is_closed() {
        tokio::select! {
            () = tokio::time::sleep(options.delay) => {}
            // To watch has no other end.
            Ok(()) = tokio::signal::ctrl_c() => return Ok(()),
        }
        let now = across(server, &read).await?;
        let mut rows = rates_between(&before, &now);
        sort(&mut rows, options.sort);
        if whole_screen {
            print::print(CLEAR)?;
        }
        show(output, &rows, &now.missing)?;
        (before, looks) = (now, looks + 1);
    }
    Ok(())
}

fn show(output: Output, rows: &[VmRates], missing: &[String]) -> anyhow::Result<()> {
    match output {
        Output::Json | Output::Yaml => {
            let at = Timestamp::now().to_string();
            print::document(output, &Document { at, vms: rows, missing })?;
        }
        Output::Table | Output::Csv if rows.is_empty() => print::say("no VM runs"),
        Output::Table | Output::Csv => rates::show(output, rows)?,
    }
    for host in missing {
        print::say(format_args!("no figures of host {host}"));
    }
    Ok(())
}

/// The rates of the VMs that ran at both looks.
fn rates_between(before: &Usage, now: &Usage) -> Vec<VmRates> {
    let rate = |now: &VmUsage| {
        let before = before.vms.iter().find(|it| it.vm == now.vm)?;
        let elapsed = Duration::try_from(now.at.duration_since(before.at)).ok()?.as_secs_f64();
        let (old, new) = (&before.counters, &now.counters);
        // A counter begins again with another process, or another interface.
        let grown = |old: u64, new: u64| {
            if elapsed > 0.0 { new.saturating_sub(old) as f64 / elapsed } else { 0.0 }
        };
        let per_second = |of: fn(&UsageCounters) -> u64| grown(of(old), of(new));
        let network = old.network.zip(new.network);
        let over_network =
            |of: fn(&NetworkCounters) -> u64| network.map(|(old, new)| grown(of(&old), of(&new)));
        Some(VmRates {
            vm: now.vm.to_string(),
            name: now.name.clone(),
            host: now.host.clone(),
            vcpus: now.vcpus,
            cpu_percent: per_second(|it| it.cpu_nanoseconds) / 1e7,
            filter_percent: per_second(|it| it.filter_cpu_nanoseconds) / 1e7,
            memory: now.memory,
            memory_resident: new.memory_resident,
            reads_per_second: per_second(|it| it.reads),
            read_bytes_per_second: per_second(|it| it.read_bytes),
            writes_per_second: per_second(|it| it.writes),
            written_bytes_per_second: per_second(|it| it.written_bytes),
            flushes_per_second: per_second(|it| it.flushes),
            errors: new.errors,
            received_bytes_per_second: over_network(|it| it.received_bytes),
            received_packets_per_second: over_network(|it| it.received_packets),
            sent_bytes_per_second: over_network(|it| it.sent_bytes),
            sent_packets_per_second: over_network(|it| it.sent_packets),
        })
    };
    now.vms.iter().filter_map(rate).collect()
}

fn sort(rows: &mut [VmRates], order: TopOrder) {
    let io = |row: &VmRates| row.read_bytes_per_second + row.written_bytes_per_second;
    let network = |row: &VmRates| {
        [row.received_bytes_per_second, row.sent_bytes_per_second]
            .into_iter()
            .flatten()
            .sum::<f64>()
    };
    match order {
        TopOrder::Cpu => rows.sort_by(|one, other| {
            let cpu = |row: &VmRates| row.cpu_percent + row.filter_percent;
            cpu(other).total_cmp(&cpu(one))
        }),
        TopOrder::Memory => rows.sort_by_key(|row| std::cmp::Reverse(row.memory_resident)),
        TopOrder::Io => rows.sort_by(|one, other| io(other).total_cmp(&io(one))),
        TopOrder::Network => {
            rows.sort_by(|one, other| network(other).total_cmp(&network(one)));
        }
        TopOrder::Name => rows.sort_by(|one, other| one.name.cmp(&other.name)),
    }
}

/// What `vm show` says of a VM that runs; nothing where that is not known.
pub async fn of_one(server: &ServerClient, name: &str) -> Vec<(&'static str, String)> {
    let name: String = url::form_urlencoded::byte_serialize(name.as_bytes()).collect();
    let Ok(usage) = server.get::<Usage>(&format!("usage?vm={name}")).await else {
        return Vec::new();
    };
    usage.vms.first().map(rates::since_start).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::VmId;

    use super::*;

    fn usage(vm: VmId, at: &str, counters: UsageCounters) -> Usage {
        let (name, host) = ("web".to_owned(), "here".to_owned());
        let at = at.parse().unwrap();
        let vm = VmUsage { vm, name, host, vcpus: 2, memory: 1 << 30, at, counters };
        Usage { vms: vec![vm], missing: Vec::new() }
    }

    #[test]
    fn rates_are_what_was_used_between_two_looks() {
        let vm = VmId::new();
        let first =
            UsageCounters { cpu_nanoseconds: 1_000_000_000, reads: 100, ..Default::default() };
        let second = UsageCounters {
            cpu_nanoseconds: 4_000_000_000,
            reads: 300,
            written_bytes: 8192,
            memory_resident: 7,
            ..Default::default()
        };
        let before = usage(vm, "2026-01-01T00:00:00Z", first);
        let now = usage(vm, "2026-01-01T00:00:02Z", second);
        let rates = rates_between(&before, &now);
        let rate = &rates[0];
        assert!((rate.cpu_percent - 150.0).abs() < 1e-6, "{rate:?}");
        assert!((rate.reads_per_second - 100.0).abs() < 1e-6, "{rate:?}");
        assert!((rate.written_bytes_per_second - 4096.0).abs() < 1e-6, "{rate:?}");
        // Another filter has taken over: its counters began again.
        let again = usage(vm, "2026-01-01T00:00:04Z", first);
        assert_eq!(rates_between(&now, &again)[0].reads_per_second, 0.0);
        assert!(rates_between(&usage(VmId::new(), "2026-01-01T00:00:00Z", first), &now).is_empty());
        assert_eq!(rates_between(&now, &now)[0].cpu_percent, 0.0);
    }

    #[test]
    fn rates_of_the_network_are_there_where_both_looks_have_them() {
        let vm = VmId::new();
        let at = |second: u32, network: Option<NetworkCounters>| {
            let counters = UsageCounters { network, ..Default::default() };
            usage(vm, &format!("2026-01-01T00:00:0{second}Z"), counters)
        };
        let counted = |bytes: u64, packets: u64| {
            Some(NetworkCounters {
                received_bytes: bytes,
                sent_packets: packets,
                ..Default::default()
            })
        };
        let rates = |before: &Usage, now: &Usage| {
            let rate = rates_between(before, now).remove(0);
            (rate.received_bytes_per_second, rate.sent_packets_per_second)
        };
        let (first, second) = (at(0, counted(1000, 10)), at(2, counted(5000, 16)));
        assert_eq!(rates(&first, &second), (Some(2000.0), Some(3.0)));
        // The guest has another tap: its counters began again.
        assert_eq!(rates(&second, &at(4, counted(7, 1))), (Some(0.0), Some(0.0)));
        assert_eq!(rates(&second, &at(4, None)), (None, None));
        assert_eq!(rates(&at(0, None), &second), (None, None));
    }

    #[test]
    fn vms_are_in_the_order_of_what_goes_over_their_network() {
        let row = |name: &str, received: u64| {
            let of = |bytes| {
                let network = NetworkCounters { received_bytes: bytes, ..Default::default() };
                UsageCounters { network: Some(network), ..Default::default() }
            };
            let vm = VmId::new();
            let before = usage(vm, "2026-01-01T00:00:00Z", of(0));
            let now = usage(vm, "2026-01-01T00:00:01Z", of(received));
            VmRates { name: name.to_owned(), ..rates_between(&before, &now).remove(0) }
        };
        let quiet = usage(VmId::new(), "2026-01-01T00:00:00Z", UsageCounters::default());
        let mut rows = rates_between(&quiet, &quiet);
        rows.extend([row("some", 5), row("most", 50)]);
        sort(&mut rows, TopOrder::Network);
        let names: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["most", "some", "web"]);
    }
}
