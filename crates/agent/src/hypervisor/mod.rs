//! QEMU: its command line, QMP, the serial console, and what accelerates it here.

pub mod accelerator;
pub(crate) mod boot;
pub(crate) mod cdrom;
pub(crate) mod console;
pub mod firmware;
pub(crate) mod guest_agent;
pub(crate) mod hardware;
pub(crate) mod network;
pub(crate) mod plug;
mod processor;
pub(crate) mod qemu;
pub mod qmp;
pub(crate) mod ram;
pub mod tpm;
pub(crate) mod usual_order;
