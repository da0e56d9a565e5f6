//! The seed of a test's random choices, and how much of all that there is to try a run tries.

use std::hash::{BuildHasher, RandomState};

/// The seed of this run, which is printed: `VMSEAL_SEED` repeats a run.
pub fn seed() -> u64 {
    let seed = match std::env::var("VMSEAL_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => RandomState::new().hash_one(()),
    };
    println!("VMSEAL_SEED={seed}");
    seed
}

/// Whether a run tries all that there is to try, which takes many minutes: with `VMSEAL_ALL`, as `scripts/soak` has it.
pub fn tries_all() -> bool {
    std::env::var_os("VMSEAL_ALL").is_some()
}

/// How often a run tries what `scripts/soak` tries this often: a third of it.
pub fn rounds(all: u32) -> u32 {
    if tries_all() { all } else { all.div_ceil(3) }
}
