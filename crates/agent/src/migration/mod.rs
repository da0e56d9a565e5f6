//! Moving running VMs between hosts.

pub mod transport;
