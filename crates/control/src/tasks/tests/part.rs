//! What a run tries of all that there is to try, which takes many minutes: another part each time. `VMSEAL_SEED=N` repeats a run, and
//! `VMSEAL_ALL=1`, as `scripts/soak` has it, tries all.

/// One of how many is tried.
const ONE_OF: u8 = 3;

/// See the module.
pub(super) struct Part {
    all: bool,
    random: fastrand::Rng,
}

impl Part {
    /// That of this run, which says how to repeat it.
    pub(super) fn of_run() -> Self {
        let seed = std::env::var("VMSEAL_SEED")
            .map_or_else(|_| fastrand::u64(..), |it| it.parse().unwrap());
        println!("VMSEAL_SEED={seed}");
        let all = std::env::var_os("VMSEAL_ALL").is_some();
        Self { all, random: fastrand::Rng::with_seed(seed) }
    }

    /// Whether the next one is tried.
    pub(super) fn has_next(&mut self) -> bool {
        self.all || self.random.u8(..ONE_OF) == 0
    }

    /// One of these, or all.
    pub(super) fn of<T: Copy>(&mut self, those: &[T]) -> Vec<T> {
        match self.all {
            true => those.to_vec(),
            false => vec![those[self.random.usize(..those.len())]],
        }
    }
}
