//! What the agent and its filters have measured, for Prometheus (OpenMetrics text).
//!
//! Counters of the process are statics. Gauges are read when they are asked for: the state store says which
//! VMs run, and each VM's filter is asked over its control socket.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tokio::task::JoinSet;
use tokio::time::timeout;
use vmseal_api::filter::{DiskFigures, FilterFigures, Histogram, latency_bound_seconds};
use vmseal_api::host::{HostState, KeyState, Power, StopReason};
use vmseal_api::id::{NicId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::usage::NetworkCounters;

use crate::filter::Control;
use crate::migration::figures::{self, Figures};
use crate::migration::transport::Refused;
use crate::process::interfaces::Interfaces;
use crate::process::run_dir::RunDir;

/// How long a filter may take to report its figures; it does no disk I/O for that.
const FIGURES_TIMEOUT: Duration = Duration::from_secs(2);

/// The reasons of a VM's end, with their labels.
const ENDS: [(StopReason, &str); 8] = [
    (StopReason::GuestShutdown, "guest_shutdown"),
    (StopReason::PoweredOff, "powered_off"),
    (StopReason::GuestPanicked, "guest_panicked"),
    (StopReason::FilterDied, "filter_died"),
    (StopReason::QemuDied, "qemu_died"),
    (StopReason::FailedToStart, "failed_to_start"),
    (StopReason::FoundDead, "found_dead"),
    (StopReason::Suspended, "suspended"),
];

/// A counter that only grows.
#[derive(Debug)]
pub struct Count(AtomicU64);

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds one.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// KEKs that were accepted.
pub static KEYS_TAKEN: Count = Count::new();
/// KEKs that were refused.
pub static KEYS_REFUSED: Count = Count::new();
/// QEMU processes that were started.
pub static QEMU_STARTED: Count = Count::new();
/// Filter processes that were started, those of imports included.
pub static FILTERS_STARTED: Count = Count::new();
/// Filters that were started for a running guest after its filter had died.
pub static FILTERS_RESTARTED: Count = Count::new();
/// QMP commands and greetings that were not answered in time.
pub static QMP_TIMEOUTS: Count = Count::new();

static VM_ENDS: [Count; ENDS.len()] = [const { Count::new() }; ENDS.len()];

/// Counts the end of a VM.
pub fn vm_ended(reason: StopReason) {
    for ((kind, _), count) in ENDS.iter().zip(&VM_ENDS) {
        if *kind == reason {
            count.add();
        }
    }
}

/// All metrics as text.
///
/// # Errors
/// `internal`: the encoder failed, which does not happen with these metrics.
pub async fn exposition(
    run_dir: &RunDir,
    state: HostState,
    refused: Refused,
) -> Result<String, Problem> {
    let mut asked = JoinSet::new();
    for vm in state
        .vms
        .iter()
        .filter(|vm| matches!(vm.power, Power::Running | Power::Stopping | Power::Paused))
    {
        let (vm, control) = (vm.vm, Control::of(&run_dir.vm(vm.vm)));
        asked.spawn(async move { (vm, timeout(FIGURES_TIMEOUT, control.figures()).await) });
    }
    let (mut filters, mut silent) = (Vec::new(), 0);
    while let Some(Ok((vm, answer))) = asked.join_next().await {
        match answer {
            Ok(Ok(figures)) => filters.push((vm, figures)),
            // It has just ended, is of an earlier vmseal, or hangs.
            _ => silent += 1,
        }
    }
    filters.sort_by_key(|(vm, _)| *vm);
    let nics = counted(&state, &Interfaces::now());
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot { state, filters, nics, silent, refused }));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)
        .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
    Ok(text)
}

/// A network card on a bridge or a tap, and what its guest has received and sent by it.
type CountedNic = (VmId, NicId, NetworkCounters);

/// The network cards of VMs that run which have interfaces on the host.
fn counted(state: &HostState, interfaces: &Interfaces) -> Vec<CountedNic> {
    let nics = state.vms.iter().flat_map(|vm| vm.nics.iter().map(|nic| (vm.vm, nic)));
    nics.filter_map(|(vm, nic)| Some((vm, nic.nic, interfaces.of(nic)?))).collect()
}

/// The figures of one scrape.
#[derive(Debug)]
struct Snapshot {
    state: HostState,
    filters: Vec<(VmId, FilterFigures)>,
    nics: Vec<CountedNic>,
    silent: u64,
    refused: Refused,
}

type Encoded = Result<(), fmt::Error>;

/// A family of counters of integers.
fn counters<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    samples: impl IntoIterator<Item = ([(&'a str, String); N], u64)>,
) -> Encoded {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in samples {
        family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
    }
    Ok(())
}

fn seconds<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    samples: impl IntoIterator<Item = ([(&'a str, String); N], u64)>,
) -> Encoded {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, nanoseconds) in samples {
        let value = nanoseconds as f64 / 1e9;
        family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
    }
    Ok(())
}

fn gauges<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    samples: impl IntoIterator<Item = ([(&'a str, String); N], u64)>,
) -> Encoded {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in samples {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        family.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

impl Snapshot {
    fn vms(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let count = |wanted: &dyn Fn(&vmseal_api::host::VmState) -> bool| {
            self.state.vms.iter().filter(|vm| wanted(vm)).count() as u64
        };
        let powers = [
            (Power::Off, "off"),
            (Power::Starting, "starting"),
            (Power::Running, "running"),
            (Power::Stopping, "stopping"),
            (Power::Paused, "paused"),
            (Power::Suspending, "suspending"),
            (Power::Migrating, "migrating"),
            (Power::Suspended, "suspended"),
        ];
        gauges(
            to,
            ("vmseal_agent_vms", "VMs by power."),
            powers.map(|(power, word)| {
                ([("power", word.to_owned())], count(&|vm| vm.power == power))
            }),
        )?;
        let keys = [
            (KeyState::NotNeeded, "not_needed"),
            (KeyState::Held, "held"),
            (KeyState::Missing, "missing"),
        ];
        gauges(
            to,
            ("vmseal_agent_vm_keys", "VMs by whether their key is on this host."),
            keys.map(|(key, word)| ([("key", word.to_owned())], count(&|vm| vm.key == key))),
        )
    }

    fn processes(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let labelled = |name, pairs: [(&str, &Count); 2]| {
            pairs.map(|(word, count)| ([(name, word.to_owned())], count.get()))
        };
        counters(
            to,
            ("vmseal_agent_keys_offered", "Keys that the server offered, by outcome."),
            labelled("outcome", [("taken", &KEYS_TAKEN), ("refused", &KEYS_REFUSED)]),
        )?;
        counters(
            to,
            ("vmseal_agent_process_starts", "Processes started, by program."),
            labelled("program", [("qemu", &QEMU_STARTED), ("filter", &FILTERS_STARTED)]),
        )?;
        let ends = ENDS.iter().zip(&VM_ENDS);
        counters(
            to,
            ("vmseal_agent_vm_ends", "Ends of VMs, by reason."),
            ends.map(|((_, word), count)| ([("reason", (*word).to_owned())], count.get())),
        )?;
        for (name, what, count) in [
            (
                "vmseal_agent_filter_restarts",
                "Filters started for a running guest whose filter had died.",
                &FILTERS_RESTARTED,
            ),
            (
                "vmseal_agent_qmp_timeouts",
                "QMP commands and greetings that QEMU left unanswered.",
                &QMP_TIMEOUTS,
            ),
        ] {
            to.encode_descriptor(name, what, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, _, u64>(&count.get(), None)?;
        }
        let what = "Filters that did not tell their figures this time.";
        let silent = i64::try_from(self.silent).unwrap_or(i64::MAX);
        to.encode_descriptor("vmseal_agent_filters_silent", what, None, MetricType::Gauge)?
            .encode_gauge(&silent)
    }

    /// What was sent to other hosts and received from them.
    fn migrations(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let both = |of: fn(&Figures) -> u64| {
            let of = [("out", of(&figures::OUT)), ("in", of(&figures::IN))];
            of.map(|(word, value)| ([("direction", word.to_owned())], value))
        };
        let what = "VMs that are being sent to other hosts, and received from them.";
        gauges(to, ("vmseal_agent_migrations", what), both(Figures::running))?;
        let what = "Bytes of migrations that went to other hosts, and came from them.";
        counters(to, ("vmseal_agent_migration_bytes", what), both(Figures::bytes))?;
        let what = "CPU time of the threads that seal and open the streams of migrations.";
        let name = "vmseal_agent_migration_cpu_seconds";
        seconds(to, (name, what), both(Figures::cpu_nanoseconds))?;
        let Refused { crowded, hello, unknown_migration, proof, taken, timed_out, lost } =
            self.refused;
        let reasons = [
            ("crowded", crowded),
            ("hello", hello),
            ("unknown_migration", unknown_migration),
            ("proof", proof),
            ("taken", taken),
            ("timed_out", timed_out),
            ("lost", lost),
        ];
        let what = "Connections to the port for migrations that were closed, by reason.";
        counters(
            to,
            ("vmseal_agent_migration_connections_refused", what),
            reasons.map(|(reason, count)| ([("reason", reason.to_owned())], count)),
        )
    }

    /// What guests have received and sent by their network cards.
    fn network(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let by_direction = |of: fn(&NetworkCounters) -> [u64; 2]| {
            let both = self.nics.iter().flat_map(move |(vm, nic, counters)| {
                let [received, sent] = of(counters);
                [("received", received), ("sent", sent)].map(|(word, value)| {
                    let (vm, nic) = (vm.to_string(), nic.to_string());
                    ([("vm", vm), ("nic", nic), ("direction", word.to_owned())], value)
                })
            });
            both.collect::<Vec<_>>()
        };
        let what = "Bytes that guests have received and sent by network cards on bridges and taps.";
        let bytes = by_direction(|it| [it.received_bytes, it.sent_bytes]);
        counters(to, ("vmseal_nic_bytes", what), bytes)?;
        let what =
            "Packets that guests have received and sent by network cards on bridges and taps.";
        let packets = by_direction(|it| [it.received_packets, it.sent_packets]);
        counters(to, ("vmseal_nic_packets", what), packets)
    }

    /// The memory limits of filters.
    fn memory(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let limit = |(vm, figures): &(VmId, FilterFigures)| {
            Some(([("vm", vm.to_string())], figures.memory_limit_bytes?))
        };
        let what = "The most private memory that the filter of a VM can have.";
        gauges(
            to,
            ("vmseal_vm_filter_memory_limit_bytes", what),
            self.filters.iter().filter_map(limit),
        )
    }

    /// Every disk with its labels.
    fn disks(&self) -> impl Iterator<Item = ([(&'static str, String); 2], &DiskFigures)> {
        self.filters.iter().flat_map(|(vm, figures)| {
            figures
                .disks
                .iter()
                .map(move |disk| ([("vm", vm.to_string()), ("disk", disk.disk.to_string())], disk))
        })
    }

    /// Samples of several kinds for every disk.
    fn by(
        &self,
        label: &'static str,
        kinds: impl Fn(&DiskFigures) -> Vec<(&'static str, u64)>,
    ) -> Vec<([(&'static str, String); 3], u64)> {
        let mut samples = Vec::new();
        for ([vm, disk], figures) in self.disks() {
            for (word, value) in kinds(figures) {
                samples.push(([vm.clone(), disk.clone(), (label, word.to_owned())], value));
            }
        }
        samples
    }

    fn requests(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        counters(
            to,
            ("vmseal_disk_requests", "Requests answered well, by operation."),
            self.by("operation", |disk| {
                let counted = &disk.counters;
                vec![
                    ("read", counted.reads),
                    ("write", counted.writes),
                    ("flush", counted.flushes),
                    ("discard", counted.discards),
                ]
            }),
        )?;
        counters(
            to,
            ("vmseal_disk_bytes", "Bytes read and written by the guest."),
            self.by("operation", |disk| {
                vec![("read", disk.counters.read_bytes), ("write", disk.counters.written_bytes)]
            }),
        )?;
        counters(
            to,
            ("vmseal_disk_errors", "Requests answered with an error."),
            self.disks().map(|(labels, disk)| (labels, disk.counters.errors)),
        )?;
        let ciphers = self.by("work", |disk| match disk.cipher {
            None => vec![],
            Some(cipher) => vec![
                ("encrypt", cipher.encrypt_nanoseconds),
                ("decrypt", cipher.decrypt_nanoseconds),
            ],
        });
        seconds(
            to,
            (
                "vmseal_disk_cipher_cpu_seconds",
                "CPU time of encryption and decryption, estimated from samples.",
            ),
            ciphers,
        )
    }

    /// Requests that were delayed by the limits of disks.
    fn held(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let of_limits = |name: &'static str| {
            self.disks().filter_map(move |(labels, disk)| {
                let limit = disk.layers.iter().find(|layer| layer.kind == "limit")?;
                Some((labels, limit.counters.get(name).copied().unwrap_or_default()))
            })
        };
        counters(
            to,
            ("vmseal_disk_held_requests", "Requests that had to wait for a limit of their disk."),
            of_limits("held_requests"),
        )?;
        seconds(
            to,
            ("vmseal_disk_held_seconds", "How long requests waited for a limit of their disk."),
            of_limits("held_nanoseconds"),
        )
    }

    /// Requests that failed as storage did not answer.
    fn stalled(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let of_stalls = |name: &'static str| {
            self.disks().filter_map(move |(labels, disk)| {
                let stall = disk.layers.iter().find(|layer| layer.kind == "stall")?;
                Some((labels, stall.counters.get(name).copied().unwrap_or_default()))
            })
        };
        let what = "How often requests of a disk began to fail, as storage did not answer.";
        counters(to, ("vmseal_disk_stalls", what), of_stalls("stalls"))?;
        let what = "Requests that failed as storage did not answer.";
        counters(to, ("vmseal_disk_stalled_requests", what), of_stalls("failed_requests"))
    }

    /// The state of replicas. A replica that was never complete has no lag.
    fn replicated(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let replicas = || {
            self.disks().filter_map(|(labels, disk)| Some((labels, disk, disk.replica.as_ref()?)))
        };
        let what = "How much of a disk its replica may not have.";
        gauges(
            to,
            ("vmseal_disk_replica_dirty_bytes", what),
            replicas().map(|(labels, _, replica)| (labels, replica.dirty_bytes)),
        )?;
        let what = "All that was done on a disk so long ago is in its replica, durably.";
        let name = "vmseal_disk_replica_lag_seconds";
        let mut family = to.encode_descriptor(name, what, None, MetricType::Gauge)?;
        for (labels, _, replica) in replicas() {
            if let Some(milliseconds) = replica.lag_milliseconds {
                let seconds = milliseconds as f64 / 1e3;
                family.encode_family(&labels)?.encode_gauge(&seconds)?;
            }
        }
        let copied = replicas().map(|(labels, disk, _)| {
            let layer = disk.layers.iter().find(|layer| layer.kind == "replicate");
            let copied = layer.and_then(|layer| layer.counters.get("copied_bytes").copied());
            (labels, copied.unwrap_or_default())
        });
        let what = "Bytes written to a disk's replica, zeroes included.";
        counters(to, ("vmseal_disk_replica_copied_bytes", what), copied)
    }

    /// The figures of disk caches.
    fn cached(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let of_caches = |label, kinds: [(&'static str, &str); 3]| {
            self.by(label, |disk| {
                let cache = disk.layers.iter().find(|layer| layer.kind == "cache");
                let Some(cache) = cache else { return Vec::new() };
                let count = |name: &str| cache.counters.get(name).copied().unwrap_or_default();
                kinds.iter().map(|(word, name)| (*word, count(name))).collect()
            })
        };
        let reads =
            [("hit", "hit_requests"), ("missed", "missed_requests"), ("passed", "passed_requests")];
        let what = "Reads of disks with a cache: answered by it, missed by it, or passed as too long or too many.";
        counters(to, ("vmseal_disk_cache_reads", what), of_caches("outcome", reads))?;
        let blocks = [
            ("installed", "installed_blocks"),
            ("invalidated", "invalidated_blocks"),
            ("evicted", "evicted_blocks"),
        ];
        let what = "Blocks of 4096 bytes that caches took in, forgot as they changed, and gave up for others.";
        counters(to, ("vmseal_disk_cache_blocks", what), of_caches("event", blocks))
    }

    fn latencies(&self, to: &mut DescriptorEncoder<'_>) -> Encoded {
        let help = "How long requests took that were answered well, from the front end and back.";
        let mut family =
            to.encode_descriptor("vmseal_disk_latency_seconds", help, None, MetricType::Histogram)?;
        for ([vm, disk], figures) in self.disks() {
            let latencies = &figures.latencies;
            for (word, histogram) in [
                ("read", &latencies.read),
                ("write", &latencies.write),
                ("flush", &latencies.flush),
                ("discard", &latencies.discard),
            ] {
                let labels = [vm.clone(), disk.clone(), ("operation", word.to_owned())];
                let (sum, buckets) = samples_of(histogram);
                family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                    sum,
                    buckets.iter().map(|(_, count)| count).sum(),
                    &buckets,
                    None,
                )?;
            }
        }
        Ok(())
    }
}

/// The sum in seconds, and each bucket's end with its own count.
fn samples_of(histogram: &Histogram) -> (f64, Vec<(f64, u64)>) {
    let buckets = histogram.counts.iter().enumerate();
    let bounded = buckets
        .map(|(index, count)| (latency_bound_seconds(index).unwrap_or(f64::INFINITY), *count));
    (histogram.nanoseconds as f64 / 1e9, bounded.collect())
}

impl Collector for Snapshot {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> Encoded {
        self.vms(&mut to)?;
        self.processes(&mut to)?;
        self.migrations(&mut to)?;
        self.memory(&mut to)?;
        self.network(&mut to)?;
        self.requests(&mut to)?;
        self.held(&mut to)?;
        self.stalled(&mut to)?;
        self.cached(&mut to)?;
        self.replicated(&mut to)?;
        self.latencies(&mut to)
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::filter::{
        CipherFigures, DiskCounters, LatencyFigures, LayerFigures, ReplicaStatus,
    };
    use vmseal_api::id::{DiskId, Incarnation};

    use super::*;

    #[test]
    fn a_disks_figures_are_valid_openmetrics() {
        let layer = |kind: &str, counters: &[(&str, u64)]| LayerFigures {
            kind: kind.to_owned(),
            counters: counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        };
        let (vm, disk) = (VmId::new(), DiskId::new());
        let mut latencies = LatencyFigures::default();
        latencies.read.counts[0] = 2;
        latencies.read.counts[21] = 1;
        latencies.read.nanoseconds = 9_000_000_000;
        let figures = DiskFigures {
            disk,
            counters: DiskCounters { reads: 3, read_bytes: 12288, ..DiskCounters::default() },
            latencies,
            cipher: Some(CipherFigures {
                encrypt_nanoseconds: 0,
                decrypt_nanoseconds: 1_500_000_000,
            }),
            layers: vec![
                layer("limit", &[("held_requests", 5), ("held_nanoseconds", 500_000_000)]),
                layer("stall", &[("stalls", 1), ("failed_requests", 6)]),
                layer("cache", &[("hit_requests", 7), ("evicted_blocks", 9)]),
                layer("replicate", &[("copied_bytes", 11)]),
            ],
            replica: Some(ReplicaStatus {
                dirty_bytes: 12,
                lag_milliseconds: Some(1500),
                last_error: None,
            }),
        };
        let state = HostState { incarnation: Incarnation::new(), generation: 1, vms: vec![] };
        let refused = Refused { proof: 14, ..Refused::default() };
        let filters =
            vec![(vm, FilterFigures { disks: vec![figures], memory_limit_bytes: Some(13) })];
        let (nic, bytes) = (NicId::new(), 1 << 40);
        let counters =
            NetworkCounters { received_bytes: bytes, sent_packets: 15, ..Default::default() };
        let nics = vec![(vm, nic, counters)];
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Snapshot {
            state,
            filters,
            nics,
            silent: 1,
            refused,
        }));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let of = format!("vm=\"{vm}\",disk=\"{disk}\"");
        let of_nic = format!("vm=\"{vm}\",nic=\"{nic}\"");
        for line in [
            "# TYPE vmseal_disk_requests counter".to_owned(),
            format!("vmseal_disk_requests_total{{{of},operation=\"read\"}} 3"),
            format!("vmseal_disk_bytes_total{{{of},operation=\"read\"}} 12288"),
            format!("vmseal_disk_errors_total{{{of}}} 0"),
            format!("vmseal_disk_cipher_cpu_seconds_total{{{of},work=\"decrypt\"}} 1.5"),
            format!("vmseal_disk_held_requests_total{{{of}}} 5"),
            format!("vmseal_disk_stalls_total{{{of}}} 1"),
            format!("vmseal_disk_stalled_requests_total{{{of}}} 6"),
            format!("vmseal_disk_cache_reads_total{{{of},outcome=\"hit\"}} 7"),
            format!("vmseal_disk_cache_reads_total{{{of},outcome=\"missed\"}} 0"),
            format!("vmseal_disk_cache_blocks_total{{{of},event=\"evicted\"}} 9"),
            format!("vmseal_vm_filter_memory_limit_bytes{{vm=\"{vm}\"}} 13"),
            format!("vmseal_disk_replica_dirty_bytes{{{of}}} 12"),
            format!("vmseal_disk_replica_lag_seconds{{{of}}} 1.5"),
            format!("vmseal_disk_replica_copied_bytes_total{{{of}}} 11"),
            format!("vmseal_disk_held_seconds_total{{{of}}} 0.5"),
            "# TYPE vmseal_nic_bytes counter".to_owned(),
            format!("vmseal_nic_bytes_total{{{of_nic},direction=\"received\"}} {bytes}"),
            format!("vmseal_nic_bytes_total{{{of_nic},direction=\"sent\"}} 0"),
            format!("vmseal_nic_packets_total{{{of_nic},direction=\"sent\"}} 15"),
            "# TYPE vmseal_disk_latency_seconds histogram".to_owned(),
            format!("vmseal_disk_latency_seconds_count{{{of},operation=\"read\"}} 3"),
            format!("vmseal_disk_latency_seconds_sum{{{of},operation=\"read\"}} 9.0"),
            format!("vmseal_disk_latency_seconds_bucket{{le=\"+Inf\",{of},operation=\"read\"}} 3"),
            "vmseal_agent_migration_connections_refused_total{reason=\"proof\"} 14".to_owned(),
            "vmseal_agent_migration_connections_refused_total{reason=\"lost\"} 0".to_owned(),
            "# TYPE vmseal_agent_migration_cpu_seconds counter".to_owned(),
            "vmseal_agent_filters_silent 1".to_owned(),
            "vmseal_agent_vms{power=\"running\"} 0".to_owned(),
            "# EOF".to_owned(),
        ] {
            assert!(text.lines().any(|told| told == line), "no line '{line}' in\n{text}");
        }
        let first =
            text.lines().find(|line| line.starts_with("vmseal_disk_latency_seconds_bucket"));
        let (_, bound) = first.unwrap().split_once("le=\"").unwrap();
        let (bound, rest) = bound.split_once('"').unwrap();
        assert!((bound.parse::<f64>().unwrap() - 8.192e-6).abs() < 1e-12 && rest.ends_with("} 2"));
    }
}
