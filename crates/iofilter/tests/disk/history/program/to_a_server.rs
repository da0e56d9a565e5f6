//! A disk that is copied to an NBD server while its guest reads and writes, pivots there, and gets other connections when the
//! server was away: the guest sees one disk, and what the server has is that.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::{ControlReply, ControlRequest, Direct, DiskStatus, Holes};
use vmseal_initiator::driver::Driver;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::request::Operation;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

use super::backends::{BackendKind, SIZE};
use super::guest::Guest;
use super::replaced::{Agent, id};
use crate::nbd_server::NbdServer;
use crate::seed::seed;
use crate::successor::Filter;

const OFFSET: u64 = 16 << 10;
const TIMEOUT: Duration = Duration::from_secs(30);

/// One for the disk's queue, one for what copies it.
const CONNECTIONS: usize = 2;

fn image(path: &Path, offset: u64) -> DiskStorage {
    let file = File::options().read(true).write(true).open(path).unwrap();
    DiskStorage::File(FileDisk::open(file.into(), offset, SIZE, Direct::Off, false).unwrap())
}

fn key(directory: &Path, name: &str) -> SecretBytes {
    SecretBytes::from_wiped(&mut std::fs::read(directory.join(name)).unwrap()).unwrap()
}

/// All that a disk in this file holds, decrypted.
fn content(directory: &Path, name: &str, offset: u64, key_file: Option<&str>) -> Vec<u8> {
    let encryption =
        key_file.map(|name| Encryption { key: key(directory, name), holes: Holes::Zero });
    let disk = Disk::new(SIZE, true, encryption, image(&directory.join(name), offset), 1);
    let mut bytes = vec![0xee; SIZE as usize];
    blocking::move_bytes(&mut disk.chain().unwrap(), Operation::Read, &mut bytes, 0).unwrap();
    bytes
}

fn serve(directory: &Path) -> NbdServer {
    let below = Disk::new(SIZE, false, None, image(&directory.join("copy"), 0), CONNECTIONS);
    NbdServer::start((0..CONNECTIONS).map(|_| below.chain().unwrap()).collect())
}

fn backend() -> Value {
    json!({ "kind": "nbd", "sockets": [{ "fd": 0 }, { "fd": 1 }] })
}

fn done(agent: &mut Agent, request: Value, fds: &[OwnedFd]) {
    let request: ControlRequest = serde_json::from_value(request).unwrap();
    assert_eq!(agent.ask(&request, fds), Some(ControlReply::Done));
}

fn status(agent: &mut Agent) -> DiskStatus {
    match agent.ask(&ControlRequest::Status, &[]) {
        Some(ControlReply::Status(mut status)) => status.disks.remove(0),
        other => panic!("{other:?}"),
    }
}

fn run(from: Option<&str>, to: Option<&str>, mut random: fastrand::Rng) {
    let kind = BackendKind::Storage;
    let place = tempfile::tempdir_in(kind.directory()).unwrap();
    let directory = place.path();
    kind.make(directory);
    File::create(directory.join("copy")).unwrap().set_len(SIZE).unwrap();
    let map = File::options().read(true).write(true).create_new(true).open(directory.join("map"));
    for (name, first) in [("old", 0), ("new", 100)] {
        let path = directory.join(name);
        std::fs::write(&path, (first..first + 64u8).collect::<Vec<_>>()).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    }
    let crypt = |key: Value| json!({ "kind": "crypt", "key": key, "holes": "zero" });
    let chain: Value =
        from.map(|name| crypt(json!({ "path": directory.join(name) }))).into_iter().collect();
    let (filter, socket) = Filter::start(directory, &kind.backend(directory), SIZE, &chain);
    let mut guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random.fork());
    guest.write_all();
    let server = serve(directory);
    let mut fds = server.connect(CONNECTIONS);
    fds.push(map.unwrap().into());
    let keys = to.map(|name| {
        let key = key(directory, name).to_memfd().unwrap();
        fds.push(key.as_fd().try_clone_to_owned().unwrap());
        crypt(json!({ "fd": 3 }))
    });
    let mirror = json!({
        "to": { "chain": keys.into_iter().collect::<Vec<_>>(), "backend": backend() },
        "map": { "fd": 2 }
    });
    let mut agent = Agent::connect(directory, &AtomicBool::new(false)).unwrap();
    let copies = json!([{ "disk": id(), "mirror": mirror }]);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            done(&mut agent, json!({ "do": "mirror", "copies": copies }), &fds);
        });
        while !asked.is_finished() {
            guest.go_on();
        }
    });
    let until = Instant::now() + TIMEOUT;
    while status(&mut agent).mirror.unwrap().copied_bytes < SIZE / 2 {
        guest.go_on();
        assert!(Instant::now() < until, "{:?}", status(&mut agent));
    }
    // Nothing is written while both are compared.
    guest.go_on();
    guest.finish();
    done(&mut agent, json!({ "do": "pivot", "disk": id() }), &[]);
    let former = content(directory, "disk", OFFSET, from);
    assert!(former == content(directory, "copy", 0, to), "the copy is another one");
    assert!(to.is_none() || content(directory, "copy", 0, None) != former, "it is not encrypted");
    guest.go_on();
    guest.finish();
    assert!(content(directory, "disk", OFFSET, from) == former, "it still writes there");
    // The server goes when everything is flushed, and comes again.
    done(&mut agent, json!({ "do": "drain", "disks": [id()] }), &[]);
    done(&mut agent, json!({ "do": "resume" }), &[]);
    drop(server);
    let server = serve(directory);
    let stack = json!({ "disk": id(), "backend": backend() });
    let mut agent = Agent::connect(directory, &AtomicBool::new(false)).unwrap();
    done(&mut agent, json!({ "do": "drain", "disks": [id()] }), &[]);
    let fds = server.connect(CONNECTIONS);
    done(&mut agent, json!({ "do": "replace", "stacks": [stack] }), &fds);
    drop(fds);
    done(&mut agent, json!({ "do": "resume" }), &[]);
    guest.go_on();
    guest.finish();
    guest.read_all();
    let log = || std::fs::read_to_string(directory.join("log")).unwrap();
    assert!(filter.end().success(), "{}", log());
    let findings = guest.history.check();
    let first: Vec<_> = findings.iter().take(5).collect();
    assert!(first.is_empty(), "{} wrong: {first:?}\n{}", findings.len(), log());
    assert!(!log().contains("not allowed"), "{}", log());
}

#[test]
fn a_disk_is_copied_to_a_server_and_pivots_there() {
    let mut random = fastrand::Rng::with_seed(seed());
    for (from, to) in [(None, Some("new")), (Some("old"), None), (Some("old"), Some("new"))] {
        run(from, to, random.fork());
    }
}
