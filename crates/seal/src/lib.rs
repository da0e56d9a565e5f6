//! What leaves a VM as a stream is sealed here: into frames of AES-256-GCM ([`frame`]), for a file that is kept into a sealed file
//! ([`file`]), which says which key opens it, and for a connection between hosts into a stream of a migration ([`wire`]).
//!
//! Nothing here opens a file or a socket. The formats are described in docs/formats/sealed-file.md and migration-wire.md.

pub mod file;
pub mod frame;
pub mod slot;
pub mod stream;
pub mod wire;
