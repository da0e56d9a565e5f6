//! No key is left in this process's ordinary memory: not in buffers of TLS, not in freed memory. The only
//! test of its file, as it searches the whole process; the server is another process.

#![allow(clippy::unwrap_used)] // in tests a panic is the report

mod server;

use std::fs::File;
use std::os::unix::fs::FileExt;

use vmseal_kmip::client::NewKey;
use vmseal_secret::{Backing, SecretBytes};

/// What is read at once, in bytes.
const CHUNK: usize = 1 << 20;

/// The length of the search pattern, in bytes: half a key.
const HALF: usize = 16;

/// Where half of a key begins in readable memory. `/proc/self/mem` does not give the memory of secrets.
fn places(half: &[u8]) -> Vec<String> {
    let memory = File::open("/proc/self/mem").unwrap();
    let mut chunk = vec![0; CHUNK + HALF];
    let mut found = Vec::new();
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        if !rest.starts_with('r') {
            continue;
        }
        let (from, to) = range.split_once('-').unwrap();
        let (mut at, to) =
            (u64::from_str_radix(from, 16).unwrap(), u64::from_str_radix(to, 16).unwrap());
        while at < to {
            let len = chunk.len().min((to - at) as usize);
            let read = memory.read_at(&mut chunk[..len], at).unwrap_or(0);
            if chunk[..read].windows(HALF).any(|window| window == half) {
                found.push(format!("{at:x} {rest}"));
            }
            at += CHUNK as u64;
        }
    }
    found
}

#[tokio::test]
async fn keys_pass_only_through_secret_memory() {
    if Backing::of_this_machine() == Backing::LockedMemory {
        // The search would find the keys themselves.
        // Not by a macro, whose output the harness hides when a test passes.
        let message = b"skipped: the kernel has no memfd_secret, so nothing is proven here\n";
        return std::io::Write::write_all(&mut std::io::stderr(), message).unwrap();
    }
    // The search works.
    let mut plain = vec![0; HALF];
    plain.copy_from_slice(SecretBytes::random(HALF).unwrap().expose());
    assert!(!places(&plain).is_empty());

    let client = server::client();
    let mut keys = Vec::new();
    for _ in 0..3 {
        let id = client.create_key(NewKey::default()).await.unwrap().id;
        keys.push(client.get_key(&id).await.unwrap());
    }
    for key in &keys {
        for half in key.expose().chunks(HALF) {
            assert_eq!(places(half), Vec::<String>::new());
        }
    }
}
