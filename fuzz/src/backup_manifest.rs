//! The manifest of a backup. What is read is what a backup can have, is written so that it reads the same, and names no file
//! elsewhere; its authenticated bytes are those of what was read; what is not says why.

use vmseal_api::host::backup::{BackupManifest, LENGTH_MAX, parse};
use vmseal_api::request::DISKS_MAX;

/// See the module.
pub fn run(data: &[u8]) {
    match parse(data) {
        Ok(manifest) => {
            assert!(data.len() <= LENGTH_MAX && manifest.disks.len() <= DISKS_MAX);
            for disk in &manifest.disks {
                let of_tpm = disk.tpm.as_ref().map(|tpm| &tpm.file);
                for name in [&disk.file, &disk.sums].into_iter().chain(of_tpm) {
                    assert!(!name.contains('/') && !name.starts_with('.'), "{name}");
                }
            }
            let written = serde_json::to_vec(&manifest).unwrap();
            // JSON can be longer than what was read, as it escapes what others need not.
            if written.len() <= LENGTH_MAX {
                assert_eq!(parse(&written).unwrap(), manifest);
            }
            let unsigned = BackupManifest { mac: None, ..manifest.clone() };
            let authenticated = manifest.authenticated().unwrap();
            assert_eq!(authenticated, serde_json::to_vec(&unsigned).unwrap());
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
