//! The filter reads data that cryptsetup encrypts with the same key, and the reverse: aes-xts-plain64
//! with 4096-byte sectors, exactly as in dm-crypt.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use vmseal_api::filter::{Direct, Holes};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::Operation;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

const DATA: u64 = 16 * 1024 * 1024;
const SIZE: usize = 4 * 1024 * 1024;

fn plain() -> Vec<u8> {
    (0..SIZE).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

fn key() -> Vec<u8> {
    (0..64u8).map(|at| at.wrapping_mul(91) ^ 0x5a).collect()
}

/// Makes cryptsetup encrypt a file that begins with `plain`, in place, without device-mapper.
fn encrypt_with_cryptsetup(directory: &Path, plain: &[u8]) -> std::path::PathBuf {
    let path = |name: &str| directory.join(name);
    std::fs::write(path("key"), key()).unwrap();
    std::fs::write(path("passphrase"), "not secret").unwrap();
    std::fs::write(path("image"), plain).unwrap();
    File::options()
        .write(true)
        .open(path("image"))
        .unwrap()
        .set_len(SIZE as u64 + 2 * DATA)
        .unwrap();
    let done = Command::new("cryptsetup")
        .args(["reencrypt", "--encrypt", "--force-offline-reencrypt", "--batch-mode"])
        .args(["--reduce-device-size", "32M", "--type", "luks2", "--cipher", "aes-xts-plain64"])
        .args(["--key-size", "512", "--sector-size", "4096"])
        .args(["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"])
        .arg("--volume-key-file")
        .arg(path("key"))
        .arg("--key-file")
        .arg(path("passphrase"))
        .arg(path("image"))
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .expect("cryptsetup is installed (scripts/prerequisites)");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    path("image")
}

fn transfer(image: &Path, operation: Operation, buffer: &mut [u8]) {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let file = FileDisk::open(OwnedFd::from(file), DATA, SIZE as u64, Direct::Auto, false).unwrap();
    let key = SecretBytes::from_wiped(&mut key()).unwrap();
    let encryption = Encryption { key, holes: Holes::Ciphertext };
    let disk = Disk::new(SIZE as u64, false, Some(encryption), DiskStorage::File(file), 1);
    let mut chain = disk.chain().unwrap();
    let id = chain.begin().unwrap();
    // SAFETY: the buffer outlives the drained chain.
    chain.data_mut(id).push(unsafe { Segment::new(buffer.as_mut_ptr(), buffer.len()) });
    chain.submit(id, operation, 0, 0, 0);
    blocking::drain(&mut chain).unwrap();
}

#[test]
fn the_filter_reads_and_writes_what_cryptsetup_does() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = encrypt_with_cryptsetup(directory.path(), &plain());
    let mut read = vec![0; SIZE];
    transfer(&image, Operation::Read, &mut read);
    assert!(read == plain(), "the filter reads something else than cryptsetup encrypted");

    let mut theirs = vec![0; SIZE];
    let file = File::options().read(true).write(true).open(&image).unwrap();
    file.read_exact_at(&mut theirs, DATA).unwrap();
    file.write_all_at(&vec![0xee; SIZE], DATA).unwrap();
    transfer(&image, Operation::Write, &mut plain());
    let mut ours = vec![0; SIZE];
    file.read_exact_at(&mut ours, DATA).unwrap();
    assert!(ours == theirs, "the filter's ciphertext differs from cryptsetup's");
}
