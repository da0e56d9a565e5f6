//! vmseal-agent
pub mod accelerator;
mod atomic_file;
mod board;
mod console;
mod datastore;
mod disk;
mod filter;
pub mod host;
mod keys;
mod machine;
mod process;
mod qemu;
mod qmp;
mod rules;
mod run_dir;
mod users;
mod vm;
