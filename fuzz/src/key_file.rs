//! A native provider's key file, or its backup. It opens unchanged only; a demand that is within the
//! limits is brought down to the cheapest, so that the fuzzer gets on.

use vmseal_secret::passphrase::{
    LANES_MAX, MEMORY_KIB_MAX, MEMORY_KIB_MIN, PASSES_MAX, open_with_passphrase,
};

use crate::secret;

const GOLDEN: &[u8] = include_bytes!("../../crates/secret/tests/golden/passphrase-v1.bin");

/// Where memory, passes and lanes are, and what is left of them.
const COSTS: [(usize, std::ops::RangeInclusive<u32>, u32); 3] = [
    (12, MEMORY_KIB_MIN..=MEMORY_KIB_MAX, MEMORY_KIB_MIN),
    (16, 1..=PASSES_MAX, 1),
    (20, 1..=LANES_MAX, 1),
];

/// See the module.
pub fn run(data: &[u8]) {
    let mut file = data.to_vec();
    for (at, allowed, cheapest) in COSTS {
        let Some(field) = file.get_mut(at..at + 4).and_then(<[u8]>::first_chunk_mut::<4>) else {
            break;
        };
        if data != GOLDEN && allowed.contains(&u32::from_be_bytes(*field)) {
            *field = cheapest.to_be_bytes();
        }
    }
    let passphrase = secret(b"correct horse".to_vec());
    match open_with_passphrase(&file, &passphrase, b"golden") {
        Ok(opened) => {
            assert!(file == GOLDEN, "a changed file opens");
            assert!(opened == secret((0..32).collect()), "another secret");
        }
        Err(_) => assert!(file != GOLDEN, "the golden file does not open"),
    }
    assert!(open_with_passphrase(&file, &passphrase, b"other").is_err());
}
