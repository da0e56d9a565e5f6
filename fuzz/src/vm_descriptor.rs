//! The descriptor of a VM on a datastore, of any version. What is read is what a VM can have, is written so that it reads
//! the same, and its authenticated bytes are those of what was read; what is not says why.

use vmseal_api::host::descriptor::{LENGTH_MAX, VmDescriptor, parse};
use vmseal_api::request::DISKS_MAX;

/// See the module.
pub fn run(data: &[u8]) {
    match parse(data) {
        Ok(descriptor) => {
            assert!(data.len() <= LENGTH_MAX && descriptor.disks.len() <= DISKS_MAX);
            let written = serde_json::to_vec(&descriptor).unwrap();
            // JSON can be longer than what was read, as it escapes what others need not.
            if written.len() <= LENGTH_MAX {
                assert_eq!(parse(&written).unwrap(), descriptor);
            }
            let unsigned = VmDescriptor { mac: None, ..descriptor.clone() };
            assert_eq!(
                descriptor.authenticated().unwrap(),
                serde_json::to_vec(&unsigned).unwrap(),
                "the MAC is over itself"
            );
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
