//! A qcow2 image, as an import reads it: judged by its header, then read to its end. Extents follow each
//! other without a gap, and reading one of them gives its bytes or an error.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

use vmseal_api::transfer::ImageFormat;
use vmseal_iofilter::copy::source::{Source, SourceError};

/// The most extents of one image that are looked at: a disk of a petabyte may be in clusters of 512 bytes.
const EXTENTS_MAX: usize = 256;

/// How much is read of an extent.
const READ_MAX: u64 = 64 * 1024;

thread_local! {
    /// One file is enough: its content is all that an input leaves, and the next replaces it.
    static FILE: RefCell<File> = RefCell::new(file());
}

fn file() -> File {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    File::from(nix::sys::memfd::memfd_create(c"fuzz-image", flags).unwrap())
}

/// See the module.
pub fn run(data: &[u8]) {
    let judged = vmseal_qcow2::parse(data, data.len() as u64);
    let file = FILE.with_borrow(|file| {
        file.set_len(0).unwrap();
        file.write_all_at(data, 0).unwrap();
        file.try_clone().unwrap()
    });
    let source = match (Source::open(file, ImageFormat::Qcow2), judged) {
        (Ok(source), Ok(header)) => {
            assert_eq!(source.size(), header.size);
            source
        }
        (Err(SourceError::Refused(_)), Err(_)) | (Err(SourceError::Read(_)), Ok(_)) => return,
        (opened, judged) => panic!("{:?} although {judged:?}", opened.map(|source| source.size())),
    };
    let mut at = 0;
    for _ in 0..EXTENTS_MAX {
        if at == source.size() {
            break;
        }
        let Ok(extent) = source.extent(at) else { break };
        assert!(extent.end > at && extent.end <= source.size(), "{extent:?} at {at}");
        if extent.data {
            let mut bytes = vec![0; (extent.end - at).min(READ_MAX) as usize];
            let _ = source.read(&mut bytes, at);
        }
        at = extent.end;
    }
}
