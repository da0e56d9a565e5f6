//! libFuzzer with the target that the environment variable `VMSEAL_FUZZ_TARGET` names; scripts/fuzz
//! sets it.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use vmseal_fuzz::{Run, TARGETS};

static TARGET: OnceLock<Run> = OnceLock::new();

fn chosen() -> Run {
    let name = std::env::var("VMSEAL_FUZZ_TARGET").unwrap_or_default();
    let Some((_, run)) = TARGETS.iter().find(|(known, _)| *known == name) else {
        eprintln!("'{name}' is no target; these are:");
        TARGETS.iter().for_each(|(known, _)| eprintln!("  {known}"));
        std::process::exit(2);
    };
    *run
}

fuzz_target!(|data: &[u8]| TARGET.get_or_init(chosen)(data));
