//! What `vmseal-filter` is told at its start. What is accepted is within the limits, and is written as
//! it was read.

use vmseal_api::filter::{CRYPT_SECTOR, DISKS_MAX, FilterConfig};
use vmseal_iofilter::process::config::{self, ALL_QUEUES_MAX};

/// See the module.
pub fn run(data: &[u8]) {
    let Ok(config) = config::read(data) else { return };
    assert!((1..=DISKS_MAX).contains(&config.disks.len()));
    let queues: usize = config.disks.iter().map(config::queues).sum();
    assert!((1..=ALL_QUEUES_MAX).contains(&queues));
    let sector = u64::from(CRYPT_SECTOR);
    assert!(config.disks.iter().all(|disk| disk.size > 0 && disk.size.is_multiple_of(sector)));
    let written = serde_json::to_vec(&config).unwrap();
    let again: FilterConfig = config::read(&written[..]).unwrap();
    assert_eq!(again, config);
}
