//! One PyKMIP for all tests of a file, and clients of it.
#![allow(dead_code, reason = "each file of tests uses a part")]

use std::sync::LazyLock;

use vmseal_kmip::client::{Client, Settings};
use vmseal_kmip::testing::{Authority, PyKmip, Validity};

pub static AUTHORITY: LazyLock<Authority> = LazyLock::new(|| Authority::new("vmseal tests"));

pub fn server() -> &'static PyKmip {
    static SERVER: LazyLock<PyKmip> = LazyLock::new(|| PyKmip::start(&AUTHORITY));
    &SERVER
}

/// Settings of a client with a name.
pub fn settings(name: &str) -> Settings {
    let identity = AUTHORITY.client(name, Validity::Now).identity();
    Settings::new(server().endpoint(), AUTHORITY.trust(), identity)
}

pub fn client_as(name: &str) -> Client {
    Client::new(settings(name)).unwrap()
}

pub fn client() -> Client {
    client_as("vmseal")
}
