//! A qcow2 image, as a disk is served from it: judged by its header and its tables, then read, written,
//! discarded and flushed. Whatever it holds: answers, and never a defect that had to be contained.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};
use vmseal_api::transfer::ImageFormat;
use vmseal_iofilter::disk::{Disk, DiskStorage};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::storage::qcow2::{Qcow2Disk, Qcow2Error};

/// How much of the disk is used.
const SIZE_MAX: u64 = 256 * 1024;

/// How much is asked for at once.
const LENGTH: u64 = 8 * 1024;

fn file(data: &[u8]) -> OwnedFd {
    let file = File::from(memfd_create(c"fuzz-image", MFdFlags::MFD_CLOEXEC).unwrap());
    file.write_all_at(data, 0).unwrap();
    file.into()
}

/// See the module. An image that names a backing file gets one.
pub fn run(data: &[u8]) {
    let Ok(layout) = vmseal_qcow2::parse_for(
        data,
        data.len() as u64,
        vmseal_qcow2::Use::Disk { backing: names_another(data), writable: true },
    ) else {
        return;
    };
    let size = (layout.header.size / 512 * 512).min(SIZE_MAX);
    let below = if names_another(data) {
        vec![(file(&[0x5a; 10_000]), ImageFormat::Raw)]
    } else {
        Vec::new()
    };
    let image = match Qcow2Disk::open(file(data), below, 0, size, false) {
        Ok(image) => image,
        Err(Qcow2Error::Defect) => panic!("a defect when it was opened"),
        Err(_) => return,
    };
    let disk = Disk::new(size, false, None, DiskStorage::Qcow2(image), 1);
    let mut chain = disk.chain().unwrap();
    let mut buffer = vec![7; LENGTH as usize];
    let operations = [
        Operation::Read,
        Operation::Write,
        Operation::Discard,
        Operation::WriteZeroes { unmap: true },
        Operation::Write,
        Operation::Flush,
        Operation::Read,
    ];
    for (index, operation) in operations.into_iter().cycle().take(28).enumerate() {
        let at = (index as u64 * 7 * 512) % size.max(512);
        let length = LENGTH.min(size.saturating_sub(at));
        let Some(id) = chain.begin() else { return };
        if matches!(operation, Operation::Read | Operation::Write) {
            let part = &mut buffer[..length as usize];
            // SAFETY: the buffer outlives the drained chain.
            chain.data_mut(id).push(unsafe { Segment::new(part.as_mut_ptr(), part.len()) });
        }
        chain.submit(id, operation, at, length, 0);
        let outcome = blocking::drain(&mut chain);
        assert_ne!(outcome, Err(IoError::Defect), "{operation:?} at {at}");
    }
}

fn names_another(data: &[u8]) -> bool {
    data.get(8..16).is_some_and(|offset| offset != [0; 8])
}
