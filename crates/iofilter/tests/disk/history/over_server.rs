//! Storage that another process serves: what is flushed outlives its power, and what is not goes with it.

use vmseal_api::filter::Holes;

use crate::history::checker::Wrong;
use crate::history::guest::Forgets;
use crate::history::{BLOCK, Kind, SECTOR, SIZE, cache, jitter, limit, run_on};
use crate::platter::{Fault, Platter};
use crate::seed::seed;

/// Makes a server over a platter.
type Serve<S> = fn(Platter) -> S;

fn platter(kind: &Kind, fault: Fault, random: &mut fastrand::Rng) -> Platter {
    Platter::new(SIZE as usize, kind.granule, fault, random.fork())
}

/// Only what was not flushed goes with the power, under every chain.
pub(super) fn only_what_was_not_flushed_goes_with_the_power<S: Forgets>(serve: Serve<S>) {
    let sealed = || Kind::new(Some(Holes::Zero), SECTOR);
    let chains = [
        ("plain", Kind::new(None, BLOCK)),
        ("crypt", sealed()),
        ("crypt without holes", Kind::new(Some(Holes::Ciphertext), BLOCK)),
        ("limit, crypt, delay", Kind { above: vec![limit()], below: vec![jitter()], ..sealed() }),
        ("crypt, cache", Kind { below: vec![cache()], ..sealed() }),
    ];
    for (name, kind) in chains {
        for round in 0..8 {
            let mut random = fastrand::Rng::with_seed(seed() ^ round);
            let mut storage = serve(platter(&kind, Fault::Nothing, &mut random));
            let findings = run_on(&kind, &mut storage, BLOCK, random, 4);
            let first: Vec<_> = findings.iter().take(5).collect();
            assert!(first.is_empty(), "{name}: {} wrong: {first:?}", findings.len());
        }
    }
}

/// A server that does not flush is found out.
pub(super) fn one_that_does_not_flush_is_detected<S: Forgets>(serve: Serve<S>) {
    let kind = Kind::new(None, BLOCK);
    let found = (0..64).any(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut storage = serve(platter(&kind, Fault::IgnoresFlushes, &mut random));
        let findings = run_on(&kind, &mut storage, BLOCK, random, 6);
        findings.iter().any(|finding| finding.wrong == Wrong::Unflushed)
    });
    assert!(found, "data that was not flushed is not missed");
}
