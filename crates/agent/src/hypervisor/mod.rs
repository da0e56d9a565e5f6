//! QEMU: its command line, QMP, the serial console, and what accelerates it here.

pub mod accelerator;
pub(crate) mod console;
pub(crate) mod network;
pub(crate) mod qemu;
pub mod qmp;
