//! Checks the filters of a chain, each and together, and where the data is stored.

use vmseal_api::filter::{
    BACKING_MAX, BackendSpec, Budget, CHAIN_MAX, CRYPT_SECTOR, DELAY_MAX, DelaySpec,
    FAULT_RULES_MAX, FaultKind, FaultRule, FaultSpec, FilterSpec, Handle, LimitSpec, MirrorSpec,
    NBD_SOCKETS_MAX, OperationKind, REPLICATE_RATE_MIN, ReplicateSpec, StackSpec,
};
use vmseal_api::transfer::ImageFormat;

use crate::storage::nbd::negotiation::NAME_MAX;

/// The largest error number of Linux (`MAX_ERRNO`).
const ERRNO_MAX: i32 = 4095;

/// Checks the filters of a chain, each and together.
pub(super) fn check_chain(chain: &[FilterSpec]) -> Result<(), String> {
    let is_crypt = |link: &FilterSpec| matches!(link, FilterSpec::Crypt { .. });
    if chain.len() > CHAIN_MAX {
        return Err(format!("{} filters; at most {CHAIN_MAX} are possible", chain.len()));
    }
    if chain.iter().filter(|link| is_crypt(link)).count() > 1 {
        return Err("it is encrypted more than once".into());
    }
    chain.iter().try_for_each(|link| match link {
        FilterSpec::Crypt { .. } | FilterSpec::Bounce {} => Ok(()),
        FilterSpec::Limit(limit) => check_limit(limit),
        FilterSpec::Delay(delay) => check_delay(delay),
        FilterSpec::Fault(fault) => check_fault(fault),
        FilterSpec::Stall(stall) if stall.milliseconds == 0 => {
            Err("a disk that fails at once would never work: give `milliseconds` of at least 1"
                .into())
        }
        // Its place is checked with those of the others.
        FilterSpec::Stall(_) => Ok(()),
        // Its memory is checked with that of the other disks.
        FilterSpec::Cache(_) => Ok(()),
        FilterSpec::Replicate(replica) => check_replica(replica),
        FilterSpec::Mirror(mirror) => check_copy(mirror),
    })?;
    check_place_of_replica(chain)?;
    check_place_of_stall(chain)?;
    let is_cache = |link: &FilterSpec| matches!(link, FilterSpec::Cache(_));
    if chain.iter().filter(|link| is_cache(link)).count() > 1 {
        return Err("it is cached more than once".into());
    }
    // Without encryption all filters are in the order that the guest sees.
    let above = chain.split(is_crypt).next().unwrap_or(chain);
    if chain.iter().any(is_crypt) && above.iter().any(is_cache) {
        return Err("a cache above the encryption would keep plaintext: put it below".into());
    }
    let is_bounce = |link: &FilterSpec| matches!(link, FilterSpec::Bounce {});
    if chain.iter().filter(|link| is_bounce(link)).count()
        != above.iter().filter(|link| is_bounce(link)).count()
    {
        return Err(
            "below the encryption `bounce` would still leave ciphertext to the guest: put it above"
                .into(),
        );
    }
    let reorders = |link: &FilterSpec| match link {
        FilterSpec::Delay(delay) => delay.jitter_microseconds > 0 && !delay.reorders,
        _ => false,
    };
    if above.iter().any(reorders) {
        return Err(
            "a delay with jitter reorders what it is given: put it below the encryption, or \
                    say `reorders`"
                .into(),
        );
    }
    Ok(())
}

/// A filter that keeps requests back, or answers them itself, may not stand between the guest and what says how long storage takes.
fn check_place_of_stall(chain: &[FilterSpec]) -> Result<(), String> {
    let is_stall = |link: &FilterSpec| matches!(link, FilterSpec::Stall(_));
    let is_limit = |link: &FilterSpec| matches!(link, FilterSpec::Limit(_));
    let mut parts = chain.split(is_stall);
    let (above, Some(below)) = (parts.next().unwrap_or_default(), parts.next()) else {
        return Ok(());
    };
    if parts.next().is_some() {
        return Err("it has more than one `stall`".into());
    }
    if !above.iter().all(is_limit) || below.iter().any(is_limit) {
        return Err("only `limit` may stand above `stall`, and none below it".into());
    }
    Ok(())
}

/// Only filters that imitate a datastore may be below: with others the copier would get faults meant for the guest.
fn check_place_of_replica(chain: &[FilterSpec]) -> Result<(), String> {
    let is_replica = |link: &FilterSpec| matches!(link, FilterSpec::Replicate(_));
    let mut after = chain.split(is_replica).skip(1);
    let Some(below) = after.next() else { return Ok(()) };
    if after.next().is_some() {
        return Err("it is replicated more than once".into());
    }
    if below.iter().any(|link| matches!(link, FilterSpec::Crypt { .. })) {
        return Err("a replica above the encryption would be plaintext: put it below".into());
    }
    let harmless = |link: &FilterSpec| matches!(link, FilterSpec::Delay(_) | FilterSpec::Fault(_));
    if !below.iter().all(harmless) {
        return Err("only `delay` and `fault` may stand below `replicate`".into());
    }
    Ok(())
}

fn check_replica(replica: &ReplicateSpec) -> Result<(), String> {
    if replica.bytes_per_second < REPLICATE_RATE_MIN {
        return Err(format!(
            "a replica that gets {} bytes a second: give at least {REPLICATE_RATE_MIN}",
            replica.bytes_per_second
        ));
    }
    let to = &replica.to;
    check_leg(to, "replicated")?;
    let for_readers =
        |link: &FilterSpec| matches!(link, FilterSpec::Cache(_) | FilterSpec::Bounce {});
    if to.chain.iter().any(for_readers) {
        return Err("nobody reads a replica: it needs neither `cache` nor `bounce`".into());
    }
    if let BackendSpec::File { offset, .. } = &to.backend {
        check_offset(*offset).map_err(|what| format!("its replica: {what}"))?;
    }
    match &to.backend {
        BackendSpec::File { file, .. } | BackendSpec::Qcow2 { file, .. }
            if *file == replica.map =>
        {
            Err("its replica and the map of the replica are the same file".into())
        }
        _ => Ok(()),
    }
}

/// Checks a stack that a filter owns: a place where the disk is to be `done`.
fn check_leg(to: &StackSpec, done: &str) -> Result<(), String> {
    let has_leg =
        |link: &FilterSpec| matches!(link, FilterSpec::Mirror(_) | FilterSpec::Replicate(_));
    if to.chain.iter().any(|link| matches!(link, FilterSpec::Stall(_))) {
        return Err(format!("no guest waits for what a disk is {done} to: it needs no `stall`"));
    }
    if to.chain.iter().any(has_leg) {
        return Err(format!("what a disk is {done} to can be neither mirrored nor replicated"));
    }
    if to.backend == (BackendSpec::Mem {}) {
        return Err(format!("a disk cannot be {done} to memory"));
    }
    check_chain(&to.chain).and_then(|()| check_backend(&to.backend))
}

pub(super) fn check_backend(backend: &BackendSpec) -> Result<(), String> {
    let (backing, offset) = match backend {
        BackendSpec::Qcow2 { backing, offset, .. } => (backing, offset),
        BackendSpec::Nbd { sockets, export, offset } => {
            return check_nbd(sockets, export).and_then(|()| check_offset(*offset));
        }
        BackendSpec::File { .. } | BackendSpec::Mem {} => return Ok(()),
    };
    if backing.len() > BACKING_MAX {
        let count = backing.len();
        return Err(format!("{count} files below its image; at most {BACKING_MAX} are possible"));
    }
    if backing.iter().rev().skip(1).any(|file| file.format == ImageFormat::Raw) {
        return Err("a raw file is the last of its chain: nothing can be below it".into());
    }
    check_offset(*offset)
}

fn check_offset(offset: u64) -> Result<(), String> {
    if !offset.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        return Err(format!(
            "its data begins at {offset}, which is not a multiple of {CRYPT_SECTOR}"
        ));
    }
    Ok(())
}

fn check_nbd(sockets: &[Handle], export: &str) -> Result<(), String> {
    if !(1..=NBD_SOCKETS_MAX).contains(&sockets.len()) {
        let count = sockets.len();
        return Err(format!(
            "{count} connections to its NBD server; 1 to {NBD_SOCKETS_MAX} are possible"
        ));
    }
    if export.len() > NAME_MAX {
        return Err(format!("the name of its export is longer than {NAME_MAX} bytes"));
    }
    Ok(())
}

fn check_limit(limit: &LimitSpec) -> Result<(), String> {
    let budgets = [limit.requests, limit.bytes];
    if budgets.iter().all(Option::is_none) {
        return Err("a limit limits nothing: give `requests`, `bytes` or both".into());
    }
    let empty = |budget: &Budget| budget.per_second == 0 || budget.burst == 0;
    if budgets.iter().flatten().any(empty) {
        return Err(
            "a limit of 0 would stop the disk: `per_second` and `burst` are at least 1".into()
        );
    }
    Ok(())
}

fn check_delay(delay: &DelaySpec) -> Result<(), String> {
    if delay.microseconds.max(delay.jitter_microseconds) > DELAY_MAX {
        return Err(format!("a delay of more than {DELAY_MAX} microseconds"));
    }
    Ok(())
}

fn check_fault(fault: &FaultSpec) -> Result<(), String> {
    if fault.rules.len() > FAULT_RULES_MAX {
        let count = fault.rules.len();
        return Err(format!("{count} fault rules; at most {FAULT_RULES_MAX} are possible"));
    }
    let only = |rule: &FaultRule, kinds: &[OperationKind]| {
        !rule.operations.is_empty() && rule.operations.iter().all(|kind| kinds.contains(kind))
    };
    fault.rules.iter().try_for_each(|rule| match rule.kind {
        _ if rule.one_in == 0 => Err("a fault rule's `one_in` is at least 1".into()),
        FaultKind::Error { errno } if !(1..=ERRNO_MAX).contains(&errno) => {
            Err(format!("{errno} is no error number of Linux"))
        }
        FaultKind::Torn if !only(rule, &[OperationKind::Write]) => {
            Err("only writes can be torn: give `operations` as [\"write\"]".into())
        }
        FaultKind::Lost
            if rule.operations.is_empty() || rule.operations.contains(&OperationKind::Read) =>
        {
            Err("a read cannot be lost, the guest would be given memory that nobody filled: name \
                 the other `operations`"
                .into())
        }
        FaultKind::Error { .. } | FaultKind::Torn | FaultKind::Lost => Ok(()),
    })
}

/// Checks what a disk is copied to.
pub(super) fn check_copy(mirror: &MirrorSpec) -> Result<(), String> {
    let MirrorSpec { to, pace, .. } = mirror;
    pace.check().map_err(|wrong| format!("a copy that gets {wrong}"))?;
    check_leg(to, "mirrored")?;
    // What is below it at another host, that host says.
    let elsewhere = mirror.stays && matches!(to.backend, BackendSpec::Nbd { .. });
    if mirror.same_below && !elsewhere && !has_files_below(&to.backend) {
        return Err("its copy has nothing below it that could be the same".into());
    }
    Ok(())
}

pub(super) fn has_files_below(backend: &BackendSpec) -> bool {
    matches!(backend, BackendSpec::Qcow2 { backing, .. } if !backing.is_empty())
}
