//! The program, killed under load and started again: it resumes the copy, and in the end the replica equals
//! the disk.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use vmseal_api::filter::{ControlReply, ControlRequest, ReplicaStatus};
use vmseal_initiator::driver::Driver;

use crate::seed::seed;
use crate::successor::Filter;

const SIZE: u64 = 48 << 20;
const KILLS: usize = 12;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Slow enough that kills interrupt it.
const RATE: u64 = 64 << 20;

fn status(directory: &Path) -> ReplicaStatus {
    let until = Instant::now() + TIMEOUT;
    let mut stream = loop {
        match UnixStream::connect(directory.join("control")) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < until, "no control socket: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let ask = serde_json::to_vec(&ControlRequest::Status).unwrap();
    stream.write_all(&[&ask[..], b"\n"].concat()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    match serde_json::from_str(&answer).unwrap() {
        ControlReply::Status(mut status) => status.disks.remove(0).replica.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_filter_that_is_killed_goes_on_with_the_copy_until_the_replica_is_equal() {
    let mut random = fastrand::Rng::with_seed(seed());
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = place.path();
    let file = |name: &str, length| File::create(path.join(name)).unwrap().set_len(length).unwrap();
    for (name, length) in [("disk", SIZE), ("replica", 4096 + SIZE), ("map", 0)] {
        file(name, length);
    }
    let key = path.join("key");
    std::fs::write(&key, (0..64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    let chain = json!([
        { "kind": "crypt", "key": { "path": key }, "holes": "zero" },
        {
            "kind": "replicate", "replica": { "path": path.join("replica") }, "offset": 4096,
            "map": { "path": path.join("map") }, "bytes_per_second": RATE
        }
    ]);
    let backend = json!({ "kind": "file", "offset": 0 });
    let (mut filter, socket) = Filter::start(path, &backend, SIZE, &chain);
    let mut driver = Driver::connect_with_record(socket, u64::MAX);
    let mut went_on = 0;
    for _ in 0..KILLS {
        for _ in 0..random.usize(1..60) {
            let sectors = random.usize(1..64);
            let at = random.u64(..SIZE / 512 - 64);
            let data = vec![random.u8(..); sectors * 512];
            let kind = if random.u8(..8) == 0 { FLUSH } else { WRITE };
            let data = if kind == FLUSH { &[][..] } else { &data };
            assert_eq!(driver.request(kind, at, data).0, 0);
        }
        std::thread::sleep(Duration::from_millis(random.u64(..400)));
        filter.kill();
        let socket;
        (filter, socket) = Filter::start(path, &backend, SIZE, &chain);
        driver.reconnect(socket);
        let dirty = status(path).dirty_bytes;
        went_on += usize::from(0 < dirty && dirty < SIZE);
    }
    assert!(went_on > 0, "no filter was killed while it copied");
    let until = Instant::now() + TIMEOUT;
    while status(path).dirty_bytes > 0 {
        assert!(Instant::now() < until, "{:?}", status(path));
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = status(path);
    assert_eq!((status.last_error, status.lag_milliseconds), (None, Some(0)));
    filter.kill();
    let read = |name: &str| std::fs::read(path.join(name)).unwrap();
    assert!(read("disk") == read("replica")[4096..], "the replica counts as equal and differs");
    let log = std::fs::read_to_string(path.join("log")).unwrap();
    assert!(!log.contains("not allowed"), "{log}");
}

const WRITE: u32 = 1;
const FLUSH: u32 = 4;
