//! The setup of a server: its data directory, its authority, its certificate.
pub mod authority;
pub(crate) mod expiry;
pub mod identity;
pub mod initialise;
