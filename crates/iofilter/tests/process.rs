//! The program itself: started as the agent starts it, watched over its control socket, ended.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmseal_api::filter::{
    BitmapChange, ControlReply, ControlRequest, DRAINED_MAX, Direct, DiskActivity, DiskStatus,
    DiskWaits, Holes, LINE_MAX,
};
use vmseal_api::problem::ErrorCode;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::Operation;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

const DATA: u64 = 16 << 20;
const SIZE: u64 = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(30);

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let place = Self { directory };
        std::fs::write(place.path("key"), (0..64u8).collect::<Vec<_>>()).unwrap();
        std::fs::set_permissions(place.path("key"), PermissionsExt::from_mode(0o600)).unwrap();
        File::create(place.path("disk")).unwrap().set_len(DATA + SIZE).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn config(&self) -> Value {
        json!({
            "version": 1,
            "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
            "control": { "path": self.path("control") },
            "disks": [{
                "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                "size": SIZE,
                "serial": "vmseal-0",
                "chain": [{ "kind": "crypt", "key": { "path": self.path("key") }, "holes": "zero" }],
                "backend": { "kind": "file", "file": { "path": self.path("disk") }, "offset": DATA },
                "front_end": {
                    "kind": "vhost_user_blk", "socket": { "path": self.path("vhost") }, "queues": 1
                }
            }]
        })
    }

    fn start(&self, config: &Value) -> Filter {
        self.start_with(config, &[])
    }

    /// Starts the program, which inherits `fds` under their numbers.
    fn start_with(&self, config: &Value, fds: &[&OwnedFd]) -> Filter {
        std::fs::write(self.path("config"), config.to_string()).unwrap();
        let numbers: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal-filter"));
        command.arg("--config").arg(self.path("config")).stderr(Stdio::piped());
        // SAFETY: fcntl is async-signal-safe, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                for &number in &numbers {
                    libc::fcntl(number, libc::F_SETFD, 0);
                }
                Ok(())
            });
        }
        Filter { child: command.spawn().unwrap(), control: self.path("control") }
    }

    /// The disk's content, decrypted.
    fn content(&self) -> Vec<u8> {
        let file = File::options().read(true).write(true).open(self.path("disk")).unwrap();
        let file = FileDisk::open(OwnedFd::from(file), DATA, SIZE, Direct::Off, false).unwrap();
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = Some(Encryption { key, holes: Holes::Zero });
        let mut chain =
            Disk::new(SIZE, true, encryption, DiskStorage::File(file), 1).chain().unwrap();
        let mut bytes = vec![1; SIZE as usize];
        let id = chain.begin().unwrap();
        // SAFETY: the buffer outlives the drained chain.
        chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
        chain.submit(id, Operation::Read, 0, 0, 0);
        blocking::drain(&mut chain).unwrap();
        bytes
    }
}

struct Filter {
    child: Child,
    control: PathBuf,
}

impl Filter {
    fn connect(&self) -> UnixStream {
        let until = Instant::now() + TIMEOUT;
        loop {
            match UnixStream::connect(&self.control) {
                Ok(stream) => return stream,
                Err(error) => assert!(Instant::now() < until, "no control socket: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ask(&self, request: &ControlRequest) -> ControlReply {
        self.send(&serde_json::to_vec(request).unwrap())
    }

    fn send(&self, line: &[u8]) -> ControlReply {
        let mut stream = self.connect();
        stream.write_all(&[line, b"\n"].concat()).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    fn disk(&self) -> DiskStatus {
        let ControlReply::Status(mut status) = self.ask(&ControlRequest::Status) else {
            panic!("not a status")
        };
        status.disks.remove(0)
    }

    /// Waits until the disk no longer imports or exports.
    fn settled(&self) -> DiskActivity {
        let until = Instant::now() + TIMEOUT;
        loop {
            match self.disk().state {
                DiskActivity::Importing { .. } | DiskActivity::Exporting { .. } => {
                    assert!(Instant::now() < until);
                }
                state => return state,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ended(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + TIMEOUT;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "the filter does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self.child.wait().unwrap();
        let log = std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap();
        (status.code(), log)
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A sparse image of odd length with data in some places.
fn image(path: &Path) -> Vec<u8> {
    let mut bytes = vec![0; (20 << 20) + 1234];
    for (at, length) in [(0, 5000), (3 << 20, 70_000), ((9 << 20) - 3, 6), ((20 << 20) + 1000, 234)]
    {
        bytes[at..at + length].iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8 | 1);
    }
    let file = File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (index, chunk) in bytes.chunks(4096).enumerate() {
        if chunk.iter().any(|&byte| byte != 0) {
            file.write_all_at(chunk, index as u64 * 4096).unwrap();
        }
    }
    bytes
}

#[test]
fn an_image_is_imported_encrypted_sparse_and_whole_and_the_filter_ends_on_request() {
    let place = Place::new();
    let bytes = image(&place.path("image"));
    let mut config = place.config();
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "raw" });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    let (code, log) = filter.ended();
    assert_eq!(code, Some(0), "{log}");
    let content = place.content();
    assert!(content[..bytes.len()] == bytes[..], "the import differs");
    assert!(content[bytes.len()..].iter().all(|&byte| byte == 0), "the rest is zero");
    let used = std::fs::metadata(place.path("disk")).unwrap().blocks() * 512;
    assert!(used < 512 * 1024, "{used} bytes are allocated; the image's holes stay holes");
    let raw = std::fs::read(place.path("disk")).unwrap();
    assert!(raw.windows(64).all(|window| *window != bytes[..64]), "plaintext is in the image");
}

/// Holes and clusters of zeroes in the source allocate nothing in the destination, whatever a
/// compressed cluster contains.
#[test]
fn a_qcow2_image_is_imported_as_its_disk_and_stays_sparse() {
    let place = Place::new();
    let bytes = image(&place.path("image"));
    let convert = |to: &str, options: &[&str]| {
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "raw", "-O", "qcow2"]).args(options);
        command.arg(place.path("image")).arg(place.path(to));
        assert!(command.status().unwrap().success());
    };
    convert("plain.qcow2", &[]);
    convert("compressed.qcow2", &["-c"]);
    // Clusters that are marked as zero, and clusters full of zeroes.
    convert("zeroed.qcow2", &["-S", "0", "-o", "cluster_size=4096"]);
    let zero = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write -z 5M 3M"])
        .arg(place.path("zeroed.qcow2"))
        .output()
        .unwrap();
    assert!(zero.status.success());
    for name in ["plain.qcow2", "compressed.qcow2", "zeroed.qcow2"] {
        File::create(place.path("disk")).unwrap().set_len(DATA + SIZE).unwrap();
        let before = std::fs::read(place.path(name)).unwrap();
        let mut config = place.config();
        config["disks"][0]["import"] =
            json!({ "source": { "path": place.path(name) }, "format": "qcow2" });
        let filter = place.start(&config);
        assert_eq!(filter.settled(), DiskActivity::Idle, "{name}");
        assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
        assert_eq!(filter.ended().0, Some(0));
        let content = place.content();
        assert!(content[..bytes.len()] == bytes[..], "{name}: the import differs");
        assert!(content[bytes.len()..].iter().all(|&byte| byte == 0), "the rest is zero");
        let used = std::fs::metadata(place.path("disk")).unwrap().blocks() * 512;
        println!("{name}: {used} bytes are allocated of {}", content.len());
        assert!(used < 512 * 1024, "{name}: {used} bytes are allocated");
        assert!(std::fs::read(place.path(name)).unwrap() == before, "{name} was changed");
    }
}

#[test]
fn a_damaged_qcow2_image_is_refused_by_its_reason() {
    let place = Place::new();
    std::fs::write(place.path("image"), b"QFI\xfb and nothing more").unwrap();
    let mut config = place.config();
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "qcow2" });
    let filter = place.start(&config);
    let DiskActivity::Failed { message } = filter.settled() else { panic!("it did not fail") };
    assert!(message.contains("cannot be imported"), "{message}");
}

#[test]
fn an_import_resumes_at_the_given_place_and_reports_what_is_flushed() {
    let place = Place::new();
    let bytes = image(&place.path("image"));
    let mut config = place.config();
    let from = |from: u64| json!({ "source": { "path": place.path("image") }, "format": "raw", "from": from });
    config["disks"][0]["import"] = from(8 << 20);
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    let content = place.content();
    assert!(content[..8 << 20].iter().all(|&byte| byte == 0), "what is before was written again");
    assert!(content[8 << 20..bytes.len()] == bytes[8 << 20..]);
    for nowhere in [8 << 30, 4095] {
        config["disks"][0]["import"] = from(nowhere);
        let filter = place.start(&config);
        let DiskActivity::Failed { message } = filter.settled() else { panic!("it did not fail") };
        assert!(message.contains("cannot resume"), "{message}");
    }
}

#[test]
fn an_import_over_old_data_leaves_none_of_it() {
    let place = Place::new();
    let file = File::options().write(true).open(place.path("disk")).unwrap();
    file.write_all_at(&vec![0x77; SIZE as usize], DATA).unwrap();
    let bytes = image(&place.path("image"));
    let mut config = place.config();
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "raw" });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    kill(Pid::from_raw(filter.child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(filter.ended().0, Some(0), "SIGTERM is a clean end");
    let content = place.content();
    assert!(content[..bytes.len()] == bytes[..] && content[bytes.len()..].iter().all(|&b| b == 0));
}

#[test]
fn a_failed_import_is_reported() {
    let place = Place::new();
    File::create(place.path("image")).unwrap().set_len(SIZE + 4096).unwrap();
    let mut config = place.config();
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "raw" });
    let filter = place.start(&config);
    let DiskActivity::Failed { message } = filter.settled() else { panic!("it did not fail") };
    assert!(message.contains("does not fit"), "{message}");
    assert!(matches!(filter.ask(&ControlRequest::Shutdown), ControlReply::Error { .. }));
    assert_eq!(filter.ended().0, Some(1));
}

#[test]
fn keys_come_by_inherited_memory_and_their_descriptor_is_closed() {
    let place = Place::new();
    let mut bytes: Vec<u8> = (0..64).collect();
    let carried = SecretBytes::from_wiped(&mut bytes).unwrap().to_memfd().unwrap();
    let key = carried.as_fd().try_clone_to_owned().unwrap();
    std::fs::write(place.path("image"), vec![0x42; 1 << 20]).unwrap();
    let source = OwnedFd::from(File::open(place.path("image")).unwrap());
    let mut config = place.config();
    config["disks"][0]["chain"][0]["key"] = json!({ "fd": key.as_raw_fd() });
    config["disks"][0]["import"] =
        json!({ "source": { "fd": source.as_raw_fd() }, "format": "raw" });
    let filter = place.start_with(&config, &[&key, &source]);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    let descriptor = format!("/proc/{}/fd/{}", filter.child.id(), key.as_raw_fd());
    let link = std::fs::read_link(descriptor).map(|link| link.display().to_string());
    let closed = !link.unwrap_or_default().contains("secretmem");
    assert!(closed, "the key's descriptor is closed once it was read");
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    assert_eq!(filter.ended().0, Some(0));
    assert!(place.content()[..1 << 20].iter().all(|&byte| byte == 0x42));
}

#[test]
fn an_imported_image_is_served_over_nbd() {
    let place = Place::new();
    let bytes = image(&place.path("image"));
    let mut config = place.config();
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "raw" });
    config["disks"][0]["front_end"] =
        json!({ "kind": "nbd", "listen": { "path": place.path("nbd") } });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    let mode = std::fs::metadata(place.path("nbd")).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600, "the socket is for its owner");
    let uri = format!("nbd+unix:///?socket={}", place.path("nbd").display());
    let copied = Command::new("nbdcopy").arg(&uri).arg(place.path("copy")).status().unwrap();
    assert!(copied.success());
    let copy = std::fs::read(place.path("copy")).unwrap();
    assert!(copy[..bytes.len()] == bytes[..] && copy.len() as u64 == SIZE, "the copy differs");
    let disk = filter.disk();
    let read = disk.counters.read_bytes;
    assert!(read > 0 && read < SIZE && disk.counters.errors == 0, "holes are not read: {disk:?}");
    config["disks"][0]["front_end"]["peer_uid"] = json!(4242);
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    assert_eq!(filter.ended().0, Some(0));
    config["disks"][0]["import"] = Value::Null;
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    let refused = Command::new("nbdinfo").arg(&uri).output().unwrap();
    assert!(!refused.status.success(), "another user's socket");
    kill(Pid::from_raw(filter.child.id() as i32), Signal::SIGTERM).unwrap();
    let (code, log) = filter.ended();
    assert!(code == Some(0) && log.contains("may not connect"), "{log}");
}

#[test]
fn a_disk_with_a_cache_is_imported_served_over_nbd_and_exported_as_any_other() {
    let place = Place::new();
    let bytes = image(&place.path("image"));
    let mut config = place.config();
    config["disks"][0]["chain"]
        .as_array_mut()
        .unwrap()
        .push(json!({ "kind": "cache", "bytes": SIZE / 2 }));
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "raw" });
    config["disks"][0]["front_end"] =
        json!({ "kind": "nbd", "listen": { "path": place.path("nbd") } });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    let uri = format!("nbd+unix:///?socket={}", place.path("nbd").display());
    let copy = || {
        let request = format!("--request-size={}", 32 << 10);
        let (uri, to) = (&uri, place.path("copy"));
        let copied =
            Command::new("nbdcopy").args(["--no-extents", &request, uri]).arg(&to).status();
        assert!(copied.unwrap().success());
        std::fs::read(to).unwrap()
    };
    let first = copy();
    assert!(first[..bytes.len()] == bytes[..] && first.len() as u64 == SIZE);
    let write = ["-f", "raw", "-c", "write -P 9 12345344 1M", "-c", "discard 20M 64k", &uri];
    assert!(Command::new("qemu-io").args(write).status().unwrap().success());
    let mut expected = first;
    expected[12_345_344..][..1 << 20].fill(9);
    expected[20 << 20..][..64 << 10].fill(0);
    assert!(copy() == expected, "what was there before is read");
    let ControlReply::Figures(figures) = filter.ask(&ControlRequest::Figures) else {
        panic!("not figures")
    };
    assert!(figures.memory_limit_bytes.is_some());
    let cache = &figures.disks[0].layers[0];
    assert_eq!(cache.kind, "cache");
    for counter in ["hit_requests", "installed_blocks", "invalidated_blocks", "evicted_blocks"] {
        assert!(cache.counters[counter] > 0, "{counter}: {cache:?}");
    }
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    assert_eq!(filter.ended().0, Some(0));
    config["disks"][0]["import"] = Value::Null;
    config["disks"][0]["front_end"] = Value::Null;
    config["disks"][0]["read_only"] = json!(true);
    let out = place.path("out");
    File::create(&out).unwrap().set_len(SIZE).unwrap();
    config["disks"][0]["export"] =
        json!({ "target": { "path": out }, "format": { "kind": "raw" } });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    assert!(std::fs::read(out).unwrap() == expected);
}

/// Runs a filter that exports the disk as `format` to the file `out`.
/// Runs a program to its end; whether it went well, and what it said.
fn ran(program: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn a_disk_in_use_is_read_beside_its_front_end_and_knows_what_has_changed() {
    let place = Place::new();
    let mut config = place.config();
    config["disks"][0]["front_end"] =
        json!({ "kind": "nbd", "listen": { "path": place.path("guest") } });
    config["disks"][0]["beside"] = json!({ "listen": { "path": place.path("backup") } });
    let uri = |name: &str| format!("nbd+unix:///?socket={}", place.path(name).display());
    let (guest, backup) = (uri("guest"), uri("backup"));
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    let writes = |commands: &[&str]| {
        let commands: Vec<&str> = commands.iter().flat_map(|command| ["-c", *command]).collect();
        let (well, said) = ran("qemu-io", &[&["-f", "raw"], &commands[..], &[&guest]].concat());
        assert!(well, "{said}");
    };
    let change = |name: &str, change| {
        let (disk, name) = (filter.disk().disk, name.to_owned());
        filter.ask(&ControlRequest::Bitmap { disk, name, change })
    };
    let image = place.path("copy").display().to_string();
    let nbdcopy = |arguments: &[&str]| {
        let (well, said) = ran("nbdcopy", arguments);
        assert!(well, "{said}");
        std::fs::read(&image).unwrap()
    };
    writes(&["write -P 5 0 256k"]);
    let ControlReply::Bitmaps { bitmaps } = change("monday", BitmapChange::Start) else {
        panic!("not started")
    };
    assert_eq!((bitmaps.len(), bitmaps[0].dirty_bytes), (1, 0), "{bitmaps:?}");
    let ControlReply::Error { code, message } = change("monday", BitmapChange::Start) else {
        panic!("started twice")
    };
    assert!(code == ErrorCode::AlreadyExists && message.contains("monday"), "{code:?} {message}");
    let first = nbdcopy(&[&backup, &image]);
    assert!(first == place.content(), "the copy differs");
    writes(&["write -P 6 128k 4k", "write -z 1M 64k"]);
    let status = filter.disk();
    assert_eq!(status.bitmaps[0].dirty_bytes, 128 << 10, "{status:?}");
    let map = "--map=qemu:dirty-bitmap:monday";
    let (well, dirty) = ran("nbdinfo", &[map, &backup]);
    assert!(well && dirty.lines().filter(|line| line.contains("dirty")).count() == 2, "{dirty}");
    // Reading is all that works, for any client.
    let (well, said) = ran("nbdinfo", &[&backup]);
    assert!(well && said.contains("is_read_only: true"), "{said}");
    let commands = ["-f", "raw", "-c", "write 0 4k", &backup];
    assert!(!ran("qemu-io", &commands).0, "written beside the guest");
    assert_eq!(filter.disk().counters.errors, 0, "what is beside counts apart");
    // The bitmap changes as the guest continues, and the filter's end does not wait for readers.
    let held = UnixStream::connect(place.path("backup")).unwrap();
    assert!(nbdcopy(&["--connections=3", &backup, &image]) == place.content());
    let shutdown = filter.ask(&ControlRequest::Shutdown);
    assert_eq!((shutdown, filter.ended().0), (ControlReply::Done, Some(0)));
    drop(held);
    // Changes made while there was no filter are not known: nothing is reported as clean.
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    assert!(!ran("nbdinfo", &[map, &backup]).0, "a lost bitmap is reported");
    assert!(filter.disk().bitmaps.is_empty());
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
}

#[test]
fn the_truncated_part_of_an_image_is_an_error_to_every_reader_and_never_zeroes() {
    let place = Place::new();
    std::fs::write(place.path("disk"), vec![7; (DATA + SIZE) as usize]).unwrap();
    let mut config = place.config();
    config["disks"][0]["front_end"] =
        json!({ "kind": "nbd", "listen": { "path": place.path("guest") } });
    config["disks"][0]["beside"] = json!({ "listen": { "path": place.path("backup") } });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    let disk = File::options().write(true).open(place.path("disk")).unwrap();
    disk.set_len(DATA + SIZE / 2).unwrap();
    let copy = place.path("copy").display().to_string();
    let uri = |name: &str| format!("nbd+unix:///?socket={}", place.path(name).display());
    // Beside the guest first: errors there are the disk's, too.
    for name in ["backup", "guest"] {
        let uri = uri(name);
        let (well, said) = ran("nbdcopy", &[&uri, &copy]);
        assert!(!well, "{name}: nbdcopy takes what is lost for zeroes: {said}");
        let last_error = filter.disk().last_error.unwrap_or_default();
        assert!(last_error.contains("truncated"), "{name}: {last_error:?}");
        let (well, said) = ran("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
        assert!(!well, "{name}: qemu-img takes what is lost for zeroes: {said}");
    }
    disk.set_len(DATA + SIZE).unwrap();
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
}

fn export(place: &Place, format: Value) -> DiskActivity {
    let mut config = place.config();
    let disk = &mut config["disks"][0];
    disk["front_end"] = Value::Null;
    disk["read_only"] = json!(true);
    disk["export"] = json!({ "target": { "path": place.path("out") }, "format": format });
    let filter = place.start(&config);
    let settled = filter.settled();
    filter.ask(&ControlRequest::Shutdown);
    filter.ended();
    settled
}

fn compare(place: &Place, format: &str) {
    let image = place.path("plain");
    let mut command = Command::new("qemu-img");
    command.args(["compare", "-f", "raw", "-F", format]).arg(image).arg(place.path("out"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_disk_leaves_byte_for_byte_and_sparse() {
    let place = Place::new();
    let bytes = image(&place.path("image"));
    let mut config = place.config();
    config["disks"][0]["import"] =
        json!({ "source": { "path": place.path("image") }, "format": "raw" });
    let filter = place.start(&config);
    assert_eq!(filter.settled(), DiskActivity::Idle);
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    filter.ended();
    // The disk's content, as a file to compare with.
    std::fs::write(place.path("plain"), place.content()).unwrap();
    let before = std::fs::read(place.path("disk")).unwrap();
    let used = || std::fs::metadata(place.path("out")).unwrap().blocks() * 512;

    File::create(place.path("out")).unwrap().set_len(SIZE).unwrap();
    assert_eq!(export(&place, json!({ "kind": "raw" })), DiskActivity::Idle);
    compare(&place, "raw");
    println!("raw: {} bytes are allocated of {SIZE}", used());
    assert!(used() < 512 * 1024, "raw: {} bytes are allocated", used());

    File::create(place.path("out")).unwrap();
    assert_eq!(export(&place, json!({ "kind": "qcow2" })), DiskActivity::Idle);
    compare(&place, "qcow2");
    println!("qcow2: {} bytes are allocated of {SIZE}", used());
    assert!(used() < 2 << 20, "qcow2: {} bytes are allocated", used());
    let checked = Command::new("qemu-img")
        .args(["check", "-f", "qcow2"])
        .arg(place.path("out"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success() && said.contains("No errors"), "{said}");

    // The data of a volume: another key, nothing left as a hole.
    std::fs::write(place.path("key2"), (100..164u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(place.path("key2"), PermissionsExt::from_mode(0o600)).unwrap();
    File::create(place.path("out")).unwrap().set_len(DATA + SIZE).unwrap();
    let volume = json!({ "kind": "luks2", "key": { "path": place.path("key2") }, "offset": DATA });
    assert_eq!(export(&place, volume), DiskActivity::Idle);
    let raw = std::fs::read(place.path("out")).unwrap();
    let hole = raw[DATA as usize..].chunks(4096).any(|sector| sector.iter().all(|&b| b == 0));
    assert!(!hole, "a sector of the volume was left as a hole");
    assert!(raw.windows(64).all(|window| *window != bytes[..64]), "plaintext is in the volume");
    assert!(std::fs::read(place.path("disk")).unwrap() == before, "the disk was changed");
}

#[test]
fn what_is_logged_changes_while_it_serves_and_only_to_what_is_understood() {
    let place = Place::new();
    let mut config = place.config();
    config["log_levels"] = json!("vmseal_iofilter=debug");
    config["request_id"] = json!("r-1");
    let filter = place.start(&config);
    let set = |levels: &str| filter.ask(&ControlRequest::SetLogLevel { levels: levels.to_owned() });
    let ControlReply::Error { message, .. } = set("debg") else { panic!("taken") };
    assert!(message.contains("\"debg\" is no log level"), "{message}");
    assert_eq!(set("off"), ControlReply::Done);
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    let (code, log) = filter.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("logging=info,vmseal_iofilter=debug"), "{log}");
    assert!(
        log.lines().any(|line| line.contains("request_id=r-1") && line.contains("serving")),
        "{log}"
    );
    assert!(log.contains("DEBUG") && log.contains("logging at other levels"), "{log}");
    assert!(!log.contains("finished and flushed"), "{log}");
}

#[test]
fn invalid_input_on_the_control_socket_is_answered_or_ended() {
    let place = Place::new();
    let filter = place.start(&place.config());
    let ControlReply::Error { message, .. } = filter.send(b"{\"do\":\"fly\"}") else { panic!() };
    assert!(message.contains("fly"), "{message}");
    let ControlReply::Error { message, .. } = filter.send(&vec![b'x'; LINE_MAX + 1]) else {
        panic!()
    };
    assert!(message.contains("longer"), "{message}");
    assert_eq!(filter.disk().state, DiskActivity::Idle);
}

#[test]
fn a_truncated_image_a_wrong_key_and_a_bad_config_are_refused_by_name() {
    let place = Place::new();
    let refused = |config: &Value, reason: &str| {
        let (code, log) = place.start(config).ended();
        assert_eq!(code, Some(1), "{log}");
        assert!(log.contains(reason), "{reason}: {log}");
    };
    let mut config = place.config();
    config["disks"][0]["size"] = json!(SIZE * 2);
    refused(&config, "truncated");
    std::fs::write(place.path("key"), [7; 64]).unwrap();
    refused(&place.config(), "halves must differ");
    std::fs::write(place.path("key"), [7; 63]).unwrap();
    refused(&place.config(), "64 bytes");
    let mut config = place.config();
    config["disks"][0]["backend"]["file"] = json!({ "fd": 999 });
    refused(&config, "descriptor 999");
    refused(&json!({}), "not understood");
}

#[test]
fn two_filters_that_are_started_by_hand_do_not_share_an_image() {
    let place = Place::new();
    let first = place.start(&place.config());
    assert_eq!(first.settled(), DiskActivity::Idle);
    let mut config = place.config();
    config["control"] = json!({ "path": place.path("second") });
    config["disks"][0]["front_end"]["socket"] = json!({ "path": place.path("other") });
    for read_only in [false, true] {
        config["disks"][0]["read_only"] = json!(read_only);
        let (code, log) = place.start(&config).ended();
        assert!(code == Some(1) && log.contains("is in use: another process"), "{log}");
    }
    assert_eq!(first.ask(&ControlRequest::Shutdown), ControlReply::Done);
    assert_eq!(first.ended().0, Some(0));
}

/// The variables of a guest's firmware: clients are disconnected, and find the disk as they left it when they come again.
#[test]
fn a_disk_that_is_served_over_nbd_gets_another_stack() {
    let place = Place::new();
    let mut config = place.config();
    config["disks"][0]["front_end"] =
        json!({ "kind": "nbd", "listen": { "path": place.path("nbd") } });
    let filter = place.start(&config);
    filter.disk();
    let export = format!("nbd+unix:///?socket={}", place.path("nbd").display());
    let qemu_io = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let ran = Command::new("qemu-io").args(["-f", "raw"]).args(commands).arg(&export).output();
        let ran = ran.unwrap();
        let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
        assert!(ran.status.success() && !said.contains("failed"), "{said}");
    };
    qemu_io(&["write -P 7 0 64k", "write -P 8 1M 64k"]);
    let layer = place.path("layer");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(place.path("disk"));
    assert!(create.arg(&layer).arg((DATA + SIZE).to_string()).status().unwrap().success());

    let mut idle = UnixStream::connect(place.path("nbd")).unwrap();
    let mut stream = BufReader::new(filter.connect());
    let mut ask = |request: &ControlRequest, fds: &[i32]| -> ControlReply {
        use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
        let line = [&serde_json::to_vec(request).unwrap()[..], b"\n"].concat();
        let (rights, bytes) = ([ControlMessage::ScmRights(fds)], [std::io::IoSlice::new(&line)]);
        let rights = if fds.is_empty() { &[] } else { &rights[..] };
        let socket = stream.get_ref().as_raw_fd();
        sendmsg::<()>(socket, &bytes, rights, MsgFlags::empty(), None).unwrap();
        let mut answer = String::new();
        stream.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    };
    let disk = filter.disk().disk;
    let drain = ControlRequest::Drain { disks: vec![disk] };
    assert!(matches!(ask(&ControlRequest::Resume, &[]), ControlReply::Error { .. }));
    let nobody = ControlRequest::Drain { disks: vec![vmseal_api::id::DiskId::new()] };
    assert!(matches!(ask(&nobody, &[]), ControlReply::Error { code: ErrorCode::NotFound, .. }));
    assert_eq!(ask(&drain, &[]), ControlReply::Done);
    assert!(matches!(ask(&drain, &[]), ControlReply::Error { .. }), "drained twice");
    // Its greeting, and then the end.
    std::io::Read::read_to_end(&mut idle, &mut Vec::new()).unwrap();
    assert_eq!(filter.disk().waits, Some(DiskWaits::Drained));
    let open = |path: &Path, write| File::options().read(true).write(write).open(path).unwrap();
    let (top, below) = (open(&layer, true), open(&place.path("disk"), false));
    let backend = json!({
        "kind": "qcow2", "file": { "fd": 0 }, "offset": DATA,
        "backing": [{ "file": { "fd": 1 }, "format": "raw" }]
    });
    let stack = json!({ "do": "replace", "stacks": [{ "disk": disk, "backend": backend }] });
    let stack: ControlRequest = serde_json::from_value(stack).unwrap();
    assert!(matches!(ask(&stack, &[]), ControlReply::Error { .. }), "without descriptors");
    assert_eq!(ask(&stack, &[top.as_raw_fd(), below.as_raw_fd()]), ControlReply::Done);
    let before = std::fs::read(place.path("disk")).unwrap();
    assert_eq!(ask(&ControlRequest::Resume, &[]), ControlReply::Done);
    qemu_io(&["read -P 7 0 64k", "write -P 9 0 4k", "read -P 9 0 4k", "read -P 8 1M 64k"]);
    assert!(std::fs::read(place.path("disk")).unwrap() == before, "the image was written");
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    assert_eq!(filter.ended().0, Some(0));
}

/// A client that has disks wait may disconnect, or never let them go on: they go on after a while in any case.
#[test]
fn drained_disks_go_on_when_nobody_resumes_them() {
    let place = Place::new();
    let filter = place.start(&place.config());
    let disk = filter.disk().disk;
    let drained = |how: &str| {
        let mut stream = filter.connect();
        let drain = json!({ "do": "drain", "disks": [disk] });
        stream.write_all(format!("{drain}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer).unwrap();
        assert_eq!(answer, "{\"answer\":\"done\"}\n", "{how}");
        stream
    };
    let until_it_goes_on = |limit: Duration| {
        let begun = Instant::now();
        while filter.disk().waits.is_some() {
            assert!(begun.elapsed() < limit, "it waits for good");
            std::thread::sleep(Duration::from_millis(10));
        }
        begun.elapsed()
    };
    drop(drained("the connection ends"));
    until_it_goes_on(DRAINED_MAX / 2);
    let stays = drained("nothing more is said");
    assert!(until_it_goes_on(DRAINED_MAX * 2) > DRAINED_MAX / 2);
    drop(stays);
    // A shutdown does not wait for it.
    let _stays = drained("the filter is to end");
    let begun = Instant::now();
    assert_eq!(filter.ask(&ControlRequest::Shutdown), ControlReply::Done);
    assert!(begun.elapsed() < DRAINED_MAX / 2);
    assert_eq!(filter.ended().0, Some(0));
}
