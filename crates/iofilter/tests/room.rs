//! The space that a disk takes on its datastore: a thin one gives back what the guest discards, a preallocated
//! one never does, with either file engine, encrypted and not.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use vmseal_api::filter::{Direct, Holes};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::Operation;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

const SIZE: u64 = 4 << 20;
const HALF: u64 = SIZE / 2;

/// File systems count some blocks of their own.
const SLACK: u64 = 64 << 10;

struct Image {
    file: tempfile::NamedTempFile,
    chain: Chain,
}

impl Image {
    fn new(directory: &str, holes: Option<Holes>, keeps_room: bool) -> Self {
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        file.as_file().set_len(SIZE).unwrap();
        if keeps_room {
            // SAFETY: a plain system call on our descriptor.
            let taken = unsafe { libc::fallocate(file.as_file().as_raw_fd(), 0, 0, SIZE as i64) };
            assert_eq!(taken, 0);
        }
        let fd = File::options().read(true).write(true).open(file.path()).unwrap();
        let disk = FileDisk::open(OwnedFd::from(fd), 0, SIZE, Direct::Auto, false).unwrap();
        if keeps_room {
            disk.keep_room();
        }
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = holes.map(|holes| Encryption { key, holes });
        let chain = Disk::new(SIZE, false, encryption, DiskStorage::File(disk), 1).chain().unwrap();
        Self { file, chain }
    }

    fn ask(&mut self, what: Operation, at: u64, bytes: &mut [u8]) {
        let id = self.chain.begin().unwrap();
        if matches!(what, Operation::Read | Operation::Write) {
            // SAFETY: the buffer outlives the drained chain.
            let segment = unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) };
            self.chain.data_mut(id).push(segment);
        }
        self.chain.submit(id, what, at, bytes.len() as u64, 0);
        blocking::drain(&mut self.chain).unwrap();
    }

    fn half(&mut self, what: Operation, at: u64) {
        self.ask(what, at, &mut vec![7; HALF as usize]);
    }

    fn reads_zero(&mut self, at: u64) -> bool {
        let mut bytes = vec![1; HALF as usize];
        self.ask(Operation::Read, at, &mut bytes);
        bytes.iter().all(|&byte| byte == 0)
    }

    fn room(&mut self) -> u64 {
        blocking::flush(&mut self.chain).unwrap();
        self.file.as_file().metadata().unwrap().blocks() * 512
    }
}

#[test]
fn a_thin_disk_takes_what_the_guest_uses_and_a_preallocated_one_all_of_it() {
    for directory in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        for holes in [None, Some(Holes::Zero)] {
            let mut thin = Image::new(directory, holes, false);
            assert!(thin.room() < SLACK, "{directory} {holes:?}");
            thin.half(Operation::Write, 0);
            assert!((HALF..HALF + SLACK).contains(&thin.room()), "{directory} {holes:?}");
            thin.half(Operation::WriteZeroes { unmap: false }, HALF);
            assert!((SIZE..SIZE + SLACK).contains(&thin.room()), "{directory} {holes:?}");
            assert!(thin.reads_zero(HALF));
            thin.half(Operation::Discard, 0);
            assert!((HALF..HALF + SLACK).contains(&thin.room()), "{directory} {holes:?}");
            thin.half(Operation::WriteZeroes { unmap: true }, HALF);
            assert!(thin.room() < SLACK, "{directory} {holes:?}");
            assert!(thin.reads_zero(0) && thin.reads_zero(HALF));

            let mut full = Image::new(directory, holes, true);
            for operation in
                [Operation::Write, Operation::Discard, Operation::WriteZeroes { unmap: true }]
            {
                full.half(operation, 0);
                assert!(full.room() >= SIZE, "{directory} {holes:?} {operation:?}");
            }
            assert!(full.reads_zero(0));
        }
    }
}

#[test]
fn where_a_hole_is_ciphertext_none_is_made() {
    let mut image = Image::new("/dev/shm", Some(Holes::Ciphertext), false);
    image.half(Operation::Write, 0);
    for operation in [Operation::Discard, Operation::WriteZeroes { unmap: true }] {
        image.half(operation, 0);
        assert!(image.room() >= HALF, "{operation:?}");
    }
    assert!(image.reads_zero(0));
}
