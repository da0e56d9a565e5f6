//! No write is lost, torn, done twice or misplaced, no read is stale, and flushed data survives
//! a power cut: through every chain, judged by the history of what a guest did and saw.

mod bad_histories;
mod driver;
mod guest;
mod over_channel;
mod over_nbd;
mod over_server;
mod program;

use std::collections::HashSet;
use std::sync::Arc;

use vmseal_api::filter::{
    BackendSpec, Budget, CacheSpec, DelaySpec, FaultKind, FaultRule, FaultSpec, FilterSpec, Handle,
    Holes, LimitSpec, OperationKind, ReplicateSpec, StackSpec,
};
use vmseal_history::{checker, stamp};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers;
use vmseal_iofilter::stack::layer::Layer;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::history::checker::{Finding, Wrong};
use crate::history::guest::{Forgets, Guest};
use crate::platter::{Fault, Platter};
use crate::replicated::Replicated;
use crate::seed::{rounds, seed};

const SIZE: u64 = 192 << 10;
const SECTOR: usize = 4096;
const BLOCK: usize = 512;

/// How a disk is made, and the unit that its storage writes whole or not at all.
#[derive(Clone)]
struct Kind {
    holes: Option<Holes>,
    above: Vec<FilterSpec>,
    below: Vec<FilterSpec>,
    granule: usize,
}

impl Kind {
    fn new(holes: Option<Holes>, granule: usize) -> Self {
        Self { holes, above: Vec::new(), below: Vec::new(), granule }
    }

    fn disk(&self) -> Disk {
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = self.holes.map(|holes| Encryption { key, holes });
        let layers = |specs: &[FilterSpec]| -> Vec<Arc<dyn Layer>> {
            let layer = |spec: &FilterSpec| match spec {
                FilterSpec::Replicate(_) => Arc::new(Replicated::new(SIZE)),
                other => layers::of(other).unwrap(),
            };
            specs.iter().map(layer).collect()
        };
        // As if 100 queues shared the budget: buffers run out, and requests have to wait for them.
        Disk::new(SIZE, false, encryption, DiskStorage::Mem(MemDisk::new(0)), 100)
            .with_layers(layers(&self.above), layers(&self.below))
    }
}

fn limit() -> FilterSpec {
    let requests = Some(Budget { per_second: 100_000, burst: 4 });
    FilterSpec::Limit(LimitSpec { requests, bytes: None })
}

fn jitter() -> FilterSpec {
    FilterSpec::Delay(DelaySpec {
        operations: Vec::new(),
        microseconds: 0,
        jitter_microseconds: 30,
        reorders: true,
        seed: 0,
    })
}

/// The smallest cache: blocks must be evicted.
fn cache() -> FilterSpec {
    FilterSpec::Cache(CacheSpec { bytes: 0 })
}

/// Its files are not opened: it stands for [`Replicated`].
fn replicate() -> FilterSpec {
    let to = StackSpec { chain: Vec::new(), backend: BackendSpec::Mem {} };
    let map = Handle::Fd(0);
    FilterSpec::Replicate(Box::new(ReplicateSpec { to, map, bytes_per_second: u64::MAX }))
}

fn faults(kinds: &[FaultKind], operations: &[OperationKind], one_in: u64) -> FilterSpec {
    let rule = |kind: &FaultKind| FaultRule {
        kind: *kind,
        operations: operations.to_vec(),
        range: None,
        one_in,
        after: 0,
        times: None,
    };
    FilterSpec::Fault(FaultSpec { seed: 1, rules: kinds.iter().map(rule).collect() })
}

/// Runs a guest until the power has failed this often; returns what is wrong.
fn run(kind: &Kind, unit: usize, fault: Fault, seed: u64, cuts: usize) -> Vec<Finding> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut platter = Platter::new(SIZE as usize, kind.granule, fault, random.fork());
    run_on(kind, &mut platter, unit, random, cuts)
}

/// The same over other storage.
fn run_on(
    kind: &Kind,
    storage: &mut dyn Forgets,
    unit: usize,
    mut random: fastrand::Rng,
    cuts: usize,
) -> Vec<Finding> {
    let disk = || kind.disk();
    let mut guest = Guest::new(&disk, storage, unit, random.fork());
    if kind.holes.is_some() && kind.granule < SECTOR {
        // Where a part of a sector can be written, a hole becomes noise: there must be none.
        guest.fill();
    }
    let mut findings = Vec::new();
    for _ in 0..cuts {
        guest.run(random.usize(1..400));
        findings.extend(guest.lose_power());
    }
    guest.run(200);
    guest.finish();
    findings.extend(guest.history.check());
    findings
}

#[test]
fn through_every_chain_only_what_was_not_flushed_goes_with_the_power() {
    use FaultKind::{Error, Torn};
    let writes = [OperationKind::Write, OperationKind::Discard, OperationKind::Flush];
    let broken = || faults(&[Error { errno: libc::EIO }], &writes, 12);
    let torn = || faults(&[Torn], &[OperationKind::Write], 12);
    let sealed = || Kind::new(Some(Holes::Zero), SECTOR);
    let full = Kind::new(Some(Holes::Ciphertext), BLOCK);
    let chains = [
        ("plain", Kind::new(None, BLOCK)),
        ("crypt", sealed()),
        ("crypt without holes", full),
        ("limit, delay", Kind { above: vec![limit(), jitter()], ..Kind::new(None, BLOCK) }),
        ("limit, crypt, delay", Kind { above: vec![limit()], below: vec![jitter()], ..sealed() }),
        ("fault", Kind { above: vec![broken(), torn()], ..Kind::new(None, BLOCK) }),
        ("fault, crypt", Kind { above: vec![broken()], ..sealed() }),
        ("cache, delay", Kind { above: vec![cache(), jitter()], ..Kind::new(None, BLOCK) }),
        ("cache, fault", Kind { above: vec![cache(), broken(), torn()], ..Kind::new(None, BLOCK) }),
        ("crypt, cache", Kind { below: vec![cache()], ..sealed() }),
        ("crypt, cache, delay", Kind { below: vec![cache(), jitter()], ..sealed() }),
        ("crypt, cache, fault", Kind { below: vec![cache(), broken(), torn()], ..sealed() }),
        ("replicate, delay", Kind { above: vec![replicate(), jitter()], ..Kind::new(None, BLOCK) }),
        ("crypt, replicate", Kind { below: vec![replicate()], ..sealed() }),
        (
            "crypt, replicate, fault",
            Kind { below: vec![replicate(), broken(), torn()], ..sealed() },
        ),
        ("crypt, fault", Kind { below: vec![broken(), torn()], ..sealed() }),
    ];
    let seed = seed();
    for (name, kind) in chains {
        let units = if kind.granule == SECTOR { &[BLOCK, SECTOR][..] } else { &[BLOCK] };
        for (round, unit) in (0..u64::from(rounds(24)))
            .flat_map(|round| units.iter().map(move |unit| (round, *unit)))
        {
            let findings = run(&kind, unit, Fault::Nothing, seed ^ round, 4);
            let first: Vec<_> = findings.iter().take(5).collect();
            assert!(
                first.is_empty(),
                "{name}, units of {unit}: {} wrong: {first:?}",
                findings.len()
            );
        }
    }
}

/// Asserts that the checker finds this error on a disk with this fault.
fn is_found_out(kind: &Kind, fault: Fault, wrong: Wrong) {
    let findings = || (0..64).flat_map(|seed| run(kind, BLOCK, fault, seed, 6));
    if findings().all(|finding| finding.wrong != wrong) {
        let found: HashSet<Wrong> = findings().map(|finding| finding.wrong).collect();
        panic!("{fault:?}: {wrong:?} is not found, but {found:?}");
    }
}

#[test]
fn storage_that_misbehaves_is_detected() {
    let expected = [
        (Fault::IgnoresFlushes, Wrong::Unflushed),
        (Fault::FlushesAllButOne, Wrong::Unflushed),
        (Fault::Loses, Wrong::Lost),
        (Fault::Repeats, Wrong::Doubled),
        (Fault::Tears, Wrong::Torn),
        (Fault::Misplaces, Wrong::Misplaced),
        (Fault::ReadsTheOld, Wrong::Stale),
    ];
    for (fault, wrong) in expected {
        is_found_out(&Kind::new(None, BLOCK), fault, wrong);
    }
}

#[test]
fn filters_that_lose_answered_writes_are_detected() {
    let loses = |operation| faults(&[FaultKind::Lost], &[operation], 4);
    let sealed = || Kind::new(Some(Holes::Zero), SECTOR);
    for (operation, wrong) in
        [(OperationKind::Write, Wrong::Lost), (OperationKind::Flush, Wrong::Unflushed)]
    {
        for above in [false, true] {
            let layers = |here| if here { vec![loses(operation)] } else { Vec::new() };
            let kind = Kind { above: layers(above), below: layers(!above), ..sealed() };
            is_found_out(&kind, Fault::Nothing, wrong);
        }
    }
}

#[test]
fn a_cache_over_storage_that_loses_or_misplaces_hides_nothing() {
    let kind = Kind { above: vec![cache()], ..Kind::new(None, BLOCK) };
    is_found_out(&kind, Fault::Misplaces, Wrong::Misplaced);
    is_found_out(&kind, Fault::Loses, Wrong::Lost);
}

/// Why storage must write sectors whole: a hole is a sector of zeroes, not a block of zeroes. Sectors that are no
/// holes are torn as on a plain disk (the chain "crypt without holes" above).
#[test]
fn where_storage_tears_sectors_a_hole_becomes_noise() {
    is_found_out(&Kind::new(Some(Holes::Zero), BLOCK), Fault::Nothing, Wrong::Torn);
}
