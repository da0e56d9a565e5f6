//! The seed of a test's random choices.

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
