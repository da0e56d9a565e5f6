//! qcow2 images that are damaged, hostile or differ from their declared format: refused with the reason, or an
//! error of the requests that meet the damage; and the memory that an image costs.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::FilterConfig;
use vmseal_api::transfer::ImageFormat;
use vmseal_iofilter::disk::{Disk, DiskStorage};
use vmseal_iofilter::handle::Handles;
use vmseal_iofilter::process::Opened;
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::storage::qcow2::Qcow2Disk;

const SIZE: u64 = 4 << 20;
const CLUSTER: u64 = 65536;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Offsets in an image of `qemu-img create`.
const REFCOUNT_TABLE: u64 = CLUSTER;
const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let ran =
            Command::new(program).args(arguments).current_dir(self.0.path()).output().unwrap();
        let said = [ran.stdout, ran.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(ran.status.success(), "{program} {arguments:?}: {said}");
        said
    }

    fn create(&self, name: &str, options: &[&str]) {
        let create = ["create", "-q", "-f", "qcow2"];
        self.run("qemu-img", &[&create, options, &[name, "4M"]].concat());
    }

    /// Makes QEMU write to the image.
    fn write(&self, name: &str, what: &str) {
        self.run("qemu-io", &["-f", "qcow2", "-c", what, name]);
    }

    fn file(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    fn open(&self, below: &[(&str, ImageFormat)], read_only: bool) -> Result<Disk, String> {
        let below = below.iter().map(|&(name, format)| (OwnedFd::from(self.file(name)), format));
        let image = OwnedFd::from(self.file("image"));
        let opened = Qcow2Disk::open(image, below.collect(), 0, SIZE, read_only);
        let rest = DiskStorage::Qcow2(opened.map_err(|error| error.to_string())?);
        Ok(Disk::new(SIZE, read_only, None, rest, 1))
    }

    fn refusal(&self, below: &[(&str, ImageFormat)]) -> String {
        self.open(below, false).map(|_| ()).expect_err("it is opened")
    }
}

fn read_u64(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

/// Does one request; a read returns its data.
fn ask(chain: &mut Chain, what: Operation, at: u64, bytes: &mut [u8]) -> Result<(), IoError> {
    let id = chain.begin().unwrap();
    if matches!(what, Operation::Read | Operation::Write) {
        // SAFETY: the buffer outlives the drained chain.
        chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    }
    chain.submit(id, what, at, bytes.len() as u64, 0);
    blocking::drain(chain)
}

#[test]
fn an_image_is_refused_for_what_is_wrong_with_it() {
    let place = Place::new();
    let patches: [(&str, u64, &[u8], &str); 12] = [
        ("not qcow2", 0, b"RAW!", "not a qcow2 image"),
        ("an absurd size", 24, &[0x7f; 8], "too small for its disk"),
        ("an absurd L1 table", 36, &[0x10, 0, 0, 0], "L1 table is too large"),
        ("a truncated L1 table", 40, &[0, 0, 0, 1, 0, 0, 0, 0], "truncated"),
        ("its own encryption", 32, &[0, 0, 0, 1], "AES"),
        ("another file's data", 79, &[4], "another file"),
        ("unknown features", 72, &[0x80], "unknown incompatible features"),
        ("the dirty bit", 79, &[1], "not closed properly"),
        ("the corrupt bit", 79, &[2], "marked as corrupt"),
        ("a refcount block nowhere", REFCOUNT_TABLE, &[0, 0, 0, 1], "beyond the end of the file"),
        ("a table that is not counted", REFCOUNT_BLOCK + 6, &[0, 0], "not counted"),
        ("two tables in one place", L1, &[0x80, 0, 0, 0, 0, 1, 0, 0], "lie over each other"),
    ];
    for (what, at, bytes, reason) in patches {
        place.create("image", &[]);
        place.file("image").write_all_at(bytes, at).unwrap();
        let refusal = place.refusal(&[]);
        assert!(refusal.contains(reason), "{what}: {refusal}");
    }
    place.create("image", &["-o", "extended_l2=on"]);
    assert!(place.refusal(&[]).contains("extended L2"));
    place.create("image", &["-o", "cluster_size=512,preallocation=metadata"]);
    place.file("image").set_len(20_000).unwrap();
    assert!(place.refusal(&[]).contains("beyond"), "{}", place.refusal(&[]));
    place.create("image", &[]);
    place.run("qemu-img", &["bitmap", "--add", "image", "backup"]);
    assert!(place.refusal(&[]).contains("dirty bitmaps"));
    assert!(place.open(&[], true).is_ok());
    place.run("qemu-img", &["bitmap", "--remove", "image", "backup"]);
    assert!(place.open(&[], false).is_ok());
    place.run("qemu-img", &["snapshot", "-c", "before", "image"]);
    assert!(place.refusal(&[]).contains("1 internal snapshots"));
    place.run("qemu-img", &["resize", "--shrink", "-f", "qcow2", "image", "4M"]);
    place.create("image", &[]);
    let image = OwnedFd::from(place.file("image"));
    let short = Qcow2Disk::open(image, Vec::new(), 4096, SIZE, false).map(|_| ()).unwrap_err();
    assert!(short.to_string().contains("4198400 are needed"), "{short}");
    let device = File::options().read(true).write(true).open("/dev/null").unwrap();
    let refused = Qcow2Disk::open(device.into(), Vec::new(), 0, SIZE, false).map(|_| ());
    assert!(refused.unwrap_err().to_string().contains("not a regular file"));
    let read_only = OwnedFd::from(File::open(place.path("image")).unwrap());
    let refused = Qcow2Disk::open(read_only, Vec::new(), 0, SIZE, false).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("open for reading only"), "{refused}");
}

#[test]
fn the_files_below_are_those_given_and_never_those_the_image_names() {
    let place = Place::new();
    std::fs::write(place.path("secret"), vec![0x11; SIZE as usize]).unwrap();
    std::fs::write(place.path("base"), vec![0x22; SIZE as usize]).unwrap();
    // QEMU would read the named file.
    place.create("image", &["-b", "secret", "-F", "raw"]);
    let refusal = place.refusal(&[]);
    assert!(refusal.contains("an overlay of another file (secret)"), "{refusal}");
    let disk = place.open(&[("base", ImageFormat::Raw)], false).unwrap();
    let mut bytes = vec![0; 8192];
    ask(&mut disk.chain().unwrap(), Operation::Read, 4096, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0x22));
    drop(disk);
    // A raw file is read as raw, whatever a guest has written to its start.
    place.create("evil", &["-b", "secret", "-F", "raw"]);
    let evil = std::fs::read(place.path("evil")).unwrap();
    place.file("base").write_all_at(&evil, 0).unwrap();
    let disk = place.open(&[("base", ImageFormat::Raw)], false).unwrap();
    ask(&mut disk.chain().unwrap(), Operation::Read, 0, &mut bytes).unwrap();
    assert!(bytes == evil[..8192]);
    drop(disk);
    let refusal = place.refusal(&[("evil", ImageFormat::Qcow2)]);
    assert!(
        refusal.contains("file 1 below the image") && refusal.contains("(secret)"),
        "{refusal}"
    );
    let refusal = place.refusal(&[("image", ImageFormat::Raw)]);
    assert!(refusal.contains("in the chain already"), "{refusal}");
    place.create("image", &[]);
    let refusal = place.refusal(&[("base", ImageFormat::Raw)]);
    assert!(refusal.contains("no backing file, but one is given"), "{refusal}");
}

#[test]
fn with_a_file_below_what_is_discarded_or_zeroed_reads_as_zeroes() {
    let place = Place::new();
    std::fs::write(place.path("base"), vec![0x22; SIZE as usize]).unwrap();
    place.create("image", &["-b", "base", "-F", "raw"]);
    let mut chain = place.open(&[("base", ImageFormat::Raw)], false).unwrap().chain().unwrap();
    let far = 8 * CLUSTER;
    ask(&mut chain, Operation::Write, 0, &mut [7; 2 * CLUSTER as usize]).unwrap();
    for (operation, at, length) in [
        (Operation::Discard, 4096, CLUSTER),
        (Operation::Discard, far, CLUSTER),
        (Operation::WriteZeroes { unmap: true }, far + 3 * CLUSTER - 512, 1024),
    ] {
        ask(&mut chain, operation, at, &mut vec![0; length as usize]).unwrap();
        let mut read = vec![1; length as usize];
        ask(&mut chain, Operation::Read, at, &mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == 0), "{operation:?} at {at}");
    }
    let mut beside = [0; 512];
    ask(&mut chain, Operation::Read, far + 3 * CLUSTER + 512, &mut beside).unwrap();
    assert_eq!(beside, [0x22; 512]);
    drop(chain);
    place.run("qemu-img", &["check", "-f", "qcow2", "image"]);
}

#[test]
fn requests_that_meet_damage_fail_and_others_succeed() {
    let place = Place::new();
    place.create("image", &[]);
    place.write("image", "write -P 7 0 256k");
    let file = place.file("image");
    let l2 = read_u64(&file, L1) & 0x00ff_ffff_ffff_fe00;
    // A cluster that is beyond the end, and one that is marked as compressed, but is not.
    file.write_all_at(&(1u64 << 63 | 1 << 40).to_be_bytes(), l2).unwrap();
    file.write_all_at(&(1u64 << 62 | (5 * CLUSTER)).to_be_bytes(), l2 + 16).unwrap();
    let mut chain = place.open(&[], false).unwrap().chain().unwrap();
    let mut bytes = vec![0; 4096];
    let mut read =
        |cluster: u64, bytes: &mut [u8]| ask(&mut chain, Operation::Read, cluster * CLUSTER, bytes);
    assert_eq!(read(0, &mut bytes), Err(IoError::Truncated));
    assert_eq!(read(2, &mut bytes), Err(IoError::Damaged));
    assert_eq!(read(3, &mut bytes), Ok(()));
    assert!(bytes.iter().all(|&byte| byte == 7));
    drop(chain);
    // A cluster that is not at a cluster boundary.
    file.write_all_at(&(1u64 << 63 | 0x1200).to_be_bytes(), l2).unwrap();
    let mut chain = place.open(&[], false).unwrap().chain().unwrap();
    assert_eq!(ask(&mut chain, Operation::Read, 0, &mut bytes), Err(IoError::Damaged));
    drop(chain);
    // A table that is not in the file.
    place.create("image", &[]);
    place.write("image", "write -P 7 0 256k");
    let mut chain = place.open(&[], true).unwrap().chain().unwrap();
    place.file("image").write_all_at(&(1u64 << 63 | 1 << 40).to_be_bytes(), L1).unwrap();
    assert_eq!(ask(&mut chain, Operation::Read, 0, &mut bytes), Ok(()), "it was checked before");
    drop(chain);
    let mut chain = place.open(&[], true).unwrap().chain().unwrap();
    assert_eq!(ask(&mut chain, Operation::Read, 0, &mut bytes), Err(IoError::Damaged));
    drop(chain);
    assert!(place.refusal(&[]).contains("beyond the end of the file"));
}

#[test]
fn an_image_that_is_cut_while_in_use_is_not_made_longer() {
    let place = Place::new();
    place.create("image", &[]);
    let mut chain = place.open(&[], false).unwrap().chain().unwrap();
    ask(&mut chain, Operation::Write, 0, &mut vec![7; 1 << 20]).unwrap();
    place.file("image").set_len(CLUSTER).unwrap();
    let mut bytes = vec![8; 4096];
    let refused = ask(&mut chain, Operation::Write, 2 << 20, &mut bytes);
    assert_eq!(refused, Err(IoError::Truncated));
    assert_eq!(ask(&mut chain, Operation::Read, 0, &mut bytes), Err(IoError::Truncated));
    assert_eq!(place.path("image").metadata().unwrap().len(), CLUSTER);
}

#[test]
fn an_image_that_was_cut_is_not_opened_and_loses_nothing_more() {
    let place = Place::new();
    place.create("image", &[]);
    place.write("image", "write -P 7 0 2M");
    let whole = std::fs::read(place.path("image")).unwrap();
    place.file("image").set_len(whole.len() as u64 - (1 << 20)).unwrap();
    for read_only in [false, true] {
        let refusal = place.open(&[], read_only).map(|_| ()).expect_err("it is opened");
        assert!(refusal.contains("truncated: data of its disk"), "{refusal}");
    }
    let image = place.path("image").metadata().unwrap();
    assert_eq!(image.len(), whole.len() as u64 - (1 << 20), "it was extended");
    // With the truncated part put back it is whole again.
    std::fs::write(place.path("image"), &whole).unwrap();
    place.open(&[], false).unwrap();
    // As a layer below another one, too.
    place.run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "image", "-F", "qcow2", "over"]);
    std::fs::rename(place.path("image"), place.path("base")).unwrap();
    std::fs::rename(place.path("over"), place.path("image")).unwrap();
    let below = [("base", ImageFormat::Qcow2)];
    place.open(&below, false).unwrap();
    place.file("base").set_len(whole.len() as u64 - (1 << 20)).unwrap();
    let refusal = place.refusal(&below);
    assert!(refusal.contains("file 1 below the image cannot be used"), "{refusal}");
}

#[test]
fn room_is_given_back_where_the_guest_discards() {
    let place = Place::new();
    place.create("image", &[]);
    let mut chain = place.open(&[], false).unwrap().chain().unwrap();
    ask(&mut chain, Operation::Write, 0, &mut vec![7; 4 << 20]).unwrap();
    let room = || place.path("image").metadata().unwrap().blocks() * 512;
    let full = room();
    assert!(full >= 4 << 20);
    ask(&mut chain, Operation::Discard, 0, &mut vec![0; 2 << 20]).unwrap();
    assert!(room() <= full - (2 << 20), "{} of {full}", room());
    let zero = Operation::WriteZeroes { unmap: true };
    ask(&mut chain, zero, 2 << 20, &mut vec![0; 1 << 20]).unwrap();
    assert!(room() <= full - (3 << 20), "{} of {full}", room());
    let kept = room();
    let zero = Operation::WriteZeroes { unmap: false };
    ask(&mut chain, zero, 3 << 20, &mut vec![0; 1 << 20]).unwrap();
    assert_eq!(room(), kept);
    drop(chain);
    place.run("qemu-img", &["check", "-f", "qcow2", "image"]);
}

/// Whether an open file of this process is used past the page cache.
fn is_direct(path: &Path) -> bool {
    let of = |entry: std::fs::DirEntry| {
        let is = std::fs::read_link(entry.path()).is_ok_and(|target| target == path);
        let info = format!("/proc/self/fdinfo/{}", entry.file_name().to_string_lossy());
        let info = if is { std::fs::read_to_string(info).ok()? } else { return None };
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        i32::from_str_radix(flags.trim(), 8).ok()
    };
    let mut flags = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| of(entry.ok()?));
    flags.any(|flags| flags & libc::O_DIRECT != 0)
}

/// Whether the file system takes direct I/O at all.
fn takes_direct(at: &Path) -> bool {
    let mut open = File::options();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut open, libc::O_DIRECT);
    let probe = at.join("probe");
    File::create(&probe).unwrap();
    open.read(true).open(probe).is_ok()
}

/// Many requests at a time, within and across clusters of an image over others with smaller clusters, the last of which
/// ends within a block: the disk is what a list of bytes is, and QEMU reads the same.
fn agrees_with_a_list_of_bytes(at: &Path) {
    const STRIPS: usize = 8;
    const STRIP: usize = SIZE as usize / STRIPS;
    let place = Place(tempfile::tempdir_in(at).unwrap());
    let mut random = fastrand::Rng::with_seed(7);
    let mut model: Vec<u8> = (0..SIZE).map(|_| random.u8(..)).collect();
    model[SIZE as usize - 1000..].fill(0);
    std::fs::write(place.path("base"), &model[..SIZE as usize - 1000]).unwrap();
    let over = |below, format, size| ["-b", below, "-F", format, "-o", size];
    place.create("below", &over("base", "raw", "cluster_size=4k"));
    for _ in 0..40 {
        let (first, with) = (random.usize(0..1000), random.u8(..));
        place.write("below", &format!("write -P {with} {} 4k", first * 4096));
        model[first * 4096..][..4096].fill(with);
    }
    place.create("image", &over("below", "qcow2", "cluster_size=64k"));
    let below = [("below", ImageFormat::Qcow2), ("base", ImageFormat::Raw)];
    for _ in 0..2 {
        let disk = place.open(&below, false).unwrap();
        if at != Path::new("/dev/shm") && takes_direct(at) {
            let all = ["image", "below", "base"].map(|name| is_direct(&place.path(name)));
            assert_eq!(all, [true; 3], "the page cache is used");
        }
        let mut chain = disk.chain().unwrap();
        for _ in 0..60 {
            let mut asked = Vec::new();
            for strip in 0..STRIPS {
                let first = random.usize(0..STRIP / 512);
                let most = if random.bool() { 16 } else { 400 };
                let count = random.usize(1..=most);
                let length = count.min(STRIP / 512 - first) * 512;
                let (what, with) = match random.u8(..5) {
                    0 => (Operation::WriteZeroes { unmap: random.bool() }, 0),
                    1..3 => (Operation::Write, random.u8(..)),
                    _ => (Operation::Read, 0),
                };
                let at = strip * STRIP + first * 512;
                asked.push((what, at, vec![with; length]));
            }
            for (what, at, bytes) in &mut asked {
                let id = chain.begin().unwrap();
                if matches!(what, Operation::Read | Operation::Write) {
                    // SAFETY: the buffers outlive the drained chain.
                    chain
                        .data_mut(id)
                        .push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
                }
                chain.submit(id, *what, *at as u64, bytes.len() as u64, 0);
            }
            blocking::drain(&mut chain).unwrap();
            for (what, at, bytes) in asked {
                let there = &mut model[at..at + bytes.len()];
                match what {
                    Operation::Read => assert!(there == bytes, "a read of {} at {at}", bytes.len()),
                    _ => there.copy_from_slice(&bytes),
                }
            }
        }
        drop((chain, disk));
        place.run("qemu-img", &["check", "-q", "-f", "qcow2", "image"]);
        place.run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", "image", "content"]);
        assert!(
            std::fs::read(place.path("content")).unwrap() == model,
            "QEMU reads something else"
        );
    }
}

#[test]
fn layers_on_storage_agree_with_a_list_of_bytes() {
    agrees_with_a_list_of_bytes(Path::new(env!("CARGO_TARGET_TMPDIR")));
}

#[test]
fn layers_in_memory_agree_with_a_list_of_bytes() {
    agrees_with_a_list_of_bytes(Path::new("/dev/shm"));
}

/// A filter that is served over NBD.
struct Filter(Child);

impl Filter {
    fn start(at: &Path, size: u64, backend: &Value) -> Self {
        Self::start_with(at, size, backend, |_| ())
    }

    fn start_with(at: &Path, size: u64, backend: &Value, more: impl Fn(&mut Value)) -> Self {
        let mut config = json!({
            "version": 1,
            "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
            "control": { "path": at.join("control") },
            "disks": [{
                "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                "size": size,
                "serial": "vmseal-0",
                "chain": [],
                "backend": backend,
                "front_end": { "kind": "nbd", "listen": { "path": at.join("nbd") } }
            }]
        });
        more(&mut config["disks"][0]);
        std::fs::write(at.join("config"), config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal-filter"));
        command.arg("--config").arg(at.join("config")).stderr(Stdio::null());
        let filter = Self(command.spawn().unwrap());
        let until = Instant::now() + TIMEOUT;
        while !at.join("nbd").exists() {
            assert!(Instant::now() < until, "it does not serve");
            std::thread::sleep(Duration::from_millis(5));
        }
        filter
    }

    /// Its private memory, in KiB.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    fn end(mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0.id().try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn by_nbd(place: &Place, commands: &[String]) {
    let uri = format!("nbd+unix:///?socket={}", place.path("nbd").display());
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    let said = place.run("qemu-io", &arguments);
    assert!(!said.contains("fail"), "{said}");
}

#[test]
fn a_process_with_an_image_stays_small_however_large_the_image_is() {
    for options in ["cluster_size=64k", "cluster_size=2M"] {
        let place = Place::new();
        let size = 1u64 << 40;
        let create = ["create", "-q", "-f", "qcow2", "-o", options, "image", "1T"];
        place.run("qemu-img", &create);
        let file = json!({ "path": place.path("image") });
        let backend = json!({ "kind": "qcow2", "file": file, "offset": 0 });
        let filter = Filter::start(place.0.path(), size, &backend);
        // Each in an L2 table of its own, with clusters of 64 KiB.
        let writes =
            (0..400u64).map(|n| format!("write -P 5 {} 4k", n * (size / 400) / 4096 * 4096));
        by_nbd(&place, &writes.collect::<Vec<_>>());
        let reads = (0..400u64).map(|n| format!("read -P 5 {} 4k", n * (size / 400) / 4096 * 4096));
        by_nbd(&place, &reads.collect::<Vec<_>>());
        let memory = filter.memory();
        println!("{options}: {memory} KiB");
        assert!(memory < 32 << 10, "{options}: {memory} KiB");
        filter.end();
        place.run("qemu-img", &["check", "-f", "qcow2", "image"]);
    }
}

#[test]
fn an_image_is_imported_to_an_encrypted_qcow2_disk_and_only_ciphertext_is_in_it() {
    let place = Place::new();
    place.create("image", &[]);
    let mut content = vec![0; SIZE as usize];
    content[1 << 20..2 << 20].fill(0x5a);
    std::fs::write(place.path("source"), &content).unwrap();
    std::fs::write(place.path("key"), (0..64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(place.path("key"), PermissionsExt::from_mode(0o600)).unwrap();
    let path = |name: &str| json!({ "path": place.path(name) });
    let backend = json!({ "kind": "qcow2", "file": path("image"), "offset": 0 });
    let filter = Filter::start_with(place.0.path(), SIZE, &backend, |disk| {
        disk["chain"] = json!([{ "kind": "crypt", "key": path("key"), "holes": "zero" }]);
        disk["import"] = json!({ "source": path("source"), "format": "raw" });
    });
    by_nbd(&place, &["read -P 0x5a 1M 1M".into(), "read -P 0 0 1M".into(), "flush".into()]);
    filter.end();
    place.run("qemu-img", &["check", "-f", "qcow2", "image"]);
    place.run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", "image", "raw"]);
    let raw = std::fs::read(place.path("raw")).unwrap();
    assert!(raw[..1 << 20].iter().all(|&byte| byte == 0), "a hole became data");
    assert!(!raw.windows(16).any(|window| window == [0x5a; 16]));
    assert!(place.path("image").metadata().unwrap().blocks() * 512 < 2 << 20, "holes take room");
}

#[test]
fn block_status_shows_what_an_image_has_not_allocated() {
    let place = Place::new();
    place.create("image", &[]);
    place.write("image", "write -P 7 1M 128k");
    let disk = place.open(&[], true).unwrap();
    let allocation = disk.allocation();
    let extents = |mut at: u64| {
        let mut found = Vec::new();
        while at < SIZE {
            let extent = allocation.extent(at, SIZE).unwrap();
            assert!(extent.end > at, "{extent:?}");
            found.push((extent.data, extent.end));
            at = extent.end;
        }
        found
    };
    let whole = [(false, 1 << 20), (true, (1 << 20) + (128 << 10)), (false, SIZE)];
    assert_eq!(extents(0), whole);
    assert_eq!(extents(512), whole, "from within a hole");
    // From several threads at once, and while others read.
    let mut chain = disk.chain().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..20).for_each(|_| assert_eq!(extents(0), whole)));
        }
        let mut bytes = vec![0; 4096];
        for _ in 0..50 {
            ask(&mut chain, Operation::Read, 1 << 20, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 7));
        }
    });
}

#[test]
fn holes_of_a_raw_file_below_show_through_an_image() {
    let place = Place::new();
    let below = File::create(place.path("below")).unwrap();
    below.set_len(SIZE).unwrap();
    // One part is hidden by the image, and in another one the image is zeroes.
    for at in [1 << 20, 2 << 20, 3 << 20] {
        below.write_all_at(&[5; 2 * CLUSTER as usize], at).unwrap();
    }
    place.create("image", &["-b", "below", "-F", "raw"]);
    place.write("image", "write -P 7 1M 64k");
    place.write("image", "write -z 3M 128k");
    let disk = place.open(&[("below", ImageFormat::Raw)], true).unwrap();
    let (allocation, mut at, mut data) = (disk.allocation(), 0, Vec::new());
    while at < SIZE {
        let extent = allocation.extent(at, SIZE).unwrap();
        assert!(extent.end > at, "{extent:?}");
        if extent.data {
            data.extend(at / CLUSTER..extent.end.div_ceil(CLUSTER));
        }
        at = extent.end;
    }
    assert_eq!(data, [16, 17, 32, 33], "clusters with data");
    // What is missing of the file is no hole.
    below.set_len(2 << 20).unwrap();
    let missing = allocation.extent(5 << 19, SIZE).unwrap_err();
    assert_eq!(missing.kind(), std::io::ErrorKind::UnexpectedEof, "{missing}");
}

/// Makes random changes of an image: data, zeroes and discards, of whole sectors.
fn change(place: &Place, image: &str, random: &mut fastrand::Rng) {
    let commands: Vec<_> = std::iter::repeat_with(|| {
        let (at, length) = (random.u64(..SIZE / 4096 - 64) * 4096, random.u64(1..48) * 4096);
        let what = ["write -P 7", "write -z", "discard"][random.usize(..3)];
        format!("{what} {at} {length}")
    })
    .take(12)
    .collect();
    let commands = commands.iter().flat_map(|command| ["-c", command.as_str()]);
    let options = ["-f", "qcow2", "-d", "unmap"].into_iter();
    let arguments: Vec<_> = options.chain(commands).chain([image]).collect();
    place.run("qemu-io", &arguments);
}

#[test]
fn what_is_called_a_hole_is_zeroes_through_all_layers() {
    // Where the disk begins in the image's, which is no multiple of a cluster, and where the lowest file ends.
    const OFFSET: u64 = 5 * 4096;
    const BELOW: u64 = 3 * (SIZE / 4) + 512;
    let (place, mut random) = (Place::new(), fastrand::Rng::with_seed(7));
    for round in 0..6 {
        let below = File::create(place.path("below")).unwrap();
        below.set_len(BELOW).unwrap();
        for _ in 0..12 {
            below.write_all_at(&[5; 700], random.u64(..BELOW - 700)).unwrap();
        }
        place.create("middle", &["-o", "cluster_size=4096", "-b", "below", "-F", "raw"]);
        place.create("image", &["-b", "middle", "-F", "qcow2"]);
        change(&place, "middle", &mut random);
        change(&place, "image", &mut random);
        let layers = [("middle", ImageFormat::Qcow2), ("below", ImageFormat::Raw)];
        let layers = layers.map(|(name, format)| (OwnedFd::from(place.file(name)), format));
        let (image, size) = (OwnedFd::from(place.file("image")), SIZE - OFFSET);
        let image = Qcow2Disk::open(image, layers.into(), OFFSET, size, true).unwrap();
        let disk = Disk::new(size, true, None, DiskStorage::Qcow2(image), 1);
        let (allocation, mut chain) = (disk.allocation(), disk.chain().unwrap());
        let (mut at, mut holes) = (0, 0);
        while at < size {
            let extent = allocation.extent(at, size).unwrap();
            assert!(extent.end > at && extent.end <= size, "{extent:?}");
            if !extent.data {
                let mut bytes = vec![1; (extent.end - at) as usize];
                for (index, part) in bytes.chunks_mut(CLUSTER as usize).enumerate() {
                    ask(&mut chain, Operation::Read, at + index as u64 * CLUSTER, part).unwrap();
                }
                let lost = bytes.iter().position(|byte| *byte != 0);
                assert!(lost.is_none(), "round {round}: data {lost:?} bytes behind {at}");
                holes += extent.end - at;
            }
            at = extent.end;
        }
        assert!((1..size).contains(&holes), "round {round}: {holes} bytes in holes");
    }
}

#[test]
fn a_disk_in_memory_is_served_sparse() {
    let place = Place::new();
    let filter = Filter::start(place.0.path(), 1 << 40, &json!({ "kind": "mem" }));
    let far = 1u64 << 39;
    by_nbd(&place, &[format!("write -P 5 {far} 1M"), format!("read -P 5 {far} 1M")]);
    by_nbd(&place, &["read -P 0 0 1M".into(), format!("discard {far} 1M")]);
    by_nbd(&place, &[format!("read -P 0 {far} 1M")]);
    filter.end();
}

/// Locks a file as agents do; false if somebody has it locked.
fn lock(file: &File) -> bool {
    let whole = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole)).is_ok()
}

#[test]
fn the_file_with_a_disks_lock_is_kept_open_also_where_the_stack_cannot_be_exchanged() {
    let place = Place::new();
    place.create("image", &[]);
    File::create(place.path("header")).unwrap();
    let header = place.file("header");
    assert!(lock(&header));
    let backend = json!({ "kind": "qcow2", "file": { "fd": 0 }, "offset": 0, "lock": { "fd": 1 } });
    // Nobody serves it, so it is not exchanged.
    let config = json!({
        "version": 1,
        "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
        "control": { "path": "not opened here" },
        "disks": [{
            "disk": "01890a5d-ac96-774b-bcce-b302099a8058", "size": SIZE, "serial": "",
            "chain": [], "backend": backend
        }]
    });
    let config: FilterConfig = serde_json::from_value(config).unwrap();
    let mut handles = Handles::passed(vec![place.file("image").into(), header.into()]);
    let opened = Opened::open(&config, &mut handles).unwrap();
    drop(handles);
    assert!(!lock(&place.file("header")), "another process could have the disk");
    drop(opened);
    // A child that another test has forked may keep it for a moment.
    let until = Instant::now() + TIMEOUT;
    while !lock(&place.file("header")) {
        assert!(Instant::now() < until, "the lock stays");
        std::thread::sleep(Duration::from_millis(1));
    }
}
