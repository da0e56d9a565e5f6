//! A file that is read and written in parts, as a server of files may do it (FUSE, NFS): the engines ask for the
//! rest, and every byte is where it belongs.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, WriteFlags,
};
use nix::mount::{MntFlags, umount2};
use vmseal_api::filter::{Direct, Holes};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

use crate::model::SIZE;
use crate::model::ask::{self, Ask, What, submit};

const ROOT: u64 = 1;
const IMAGE: u64 = 2;

/// The kernel caches nothing.
const KEPT: Duration = Duration::ZERO;

struct Inside {
    bytes: Vec<u8>,
    random: fastrand::Rng,
    short: u64,
}

/// A file system with one file.
#[derive(Clone)]
struct InParts(Arc<Mutex<Inside>>);

impl InParts {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap()
    }

    fn attributes(&self, ino: u64) -> FileAttr {
        let root = ino == ROOT;
        FileAttr {
            ino: INodeNo(ino),
            size: self.inside().bytes.len() as u64,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if root { FileType::Directory } else { FileType::RegularFile },
            perm: if root { 0o755 } else { 0o666 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Inside {
    /// How much of a request of this many bytes is done: whole sectors, at least one.
    fn part(&mut self, asked: usize) -> usize {
        let sectors = (asked / 512).max(1);
        let part = self.random.usize(1..=sectors) * 512;
        self.short += u64::from(part < asked);
        part.min(asked)
    }
}

impl Filesystem for InParts {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "image" {
            reply.entry(&KEPT, &self.attributes(IMAGE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&KEPT, &self.attributes(ino.into()));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Through the page cache a part of a read would mean the end of the file.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut inside = self.inside();
        let start = (offset as usize).min(inside.bytes.len());
        let there = (size as usize).min(inside.bytes.len() - start);
        let end = start + inside.part(there);
        reply.data(&inside.bytes[start..end]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut inside = self.inside();
        let part = inside.part(data.len());
        let start = offset as usize;
        inside.bytes[start..start + part].copy_from_slice(&data[..part]);
        reply.written(part as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _data: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// Mounts the file system for the test; dropping the result unmounts it. An error where mounting is forbidden.
fn mount(at: &std::path::Path, seed: u64) -> io::Result<(fuser::BackgroundSession, InParts)> {
    let random = fastrand::Rng::with_seed(seed);
    let inside = Inside { bytes: vec![0; SIZE as usize], random, short: 0 };
    let files = InParts(Arc::new(Mutex::new(inside)));
    Ok((fuser::spawn_mount(files.clone(), at, &Config::default())?, files))
}

#[test]
fn a_file_that_is_served_in_parts_is_read_and_written_whole() {
    let directory = tempfile::tempdir().unwrap();
    let (mounted, files) = match mount(directory.path(), crate::seed::seed()) {
        Ok(mounted) => mounted,
        Err(error) => {
            // Not by a macro, whose output the harness hides when a test passes.
            let message = format!("skipped: no file system of our own here: {error}\n");
            return io::Write::write_all(&mut io::stderr(), message.as_bytes()).unwrap();
        }
    };
    for holes in [None, Some(Holes::Zero)] {
        for direct in [Direct::Off, Direct::Auto] {
            let file = File::options().read(true).write(true).open(directory.path().join("image"));
            let file = FileDisk::open(file.unwrap().into(), 0, SIZE, direct, false).unwrap();
            let key = SecretBytes::from_wiped(&mut (0..64).collect::<Vec<u8>>()).unwrap();
            let encryption = holes.map(|holes| Encryption { key, holes });
            let disk = Disk::new(SIZE, false, encryption, DiskStorage::File(file), 1);
            let mut chain = disk.chain().unwrap();
            // One request at a time: nothing else wakes the thread that waits for it.
            for round in 0..20u64 {
                let (start, blocks) = (round * 40, 256 + round * 8);
                let write =
                    Ask { what: What::Write, start, blocks, fill: round as u8 + 1, cut: 5000 };
                let mut bytes = write.content();
                submit(&mut chain, &write, &mut bytes, 0);
                ask::drain(&mut chain);
                let read = Ask { what: What::Read, ..write.clone() };
                let mut found = vec![0xee; bytes.len()];
                submit(&mut chain, &read, &mut found, 0);
                ask::drain(&mut chain);
                assert!(found == bytes, "{holes:?} {direct:?} round {round}: not what was written");
            }
        }
    }
    assert!(files.inside().short > 100, "nothing came in parts: the test proves nothing");
    // The kernel may keep the file open for a moment.
    umount2(directory.path(), MntFlags::MNT_DETACH).unwrap();
    drop(mounted);
}
