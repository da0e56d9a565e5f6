//! A disk that is copied for another host while its guest reads and writes: it stays where it is, its copy is complete when it
//! is told so, and the copy ends with the disk's stack, complete or not.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::{
    BackendSpec, ControlReply, ControlRequest, Direct, Handle, NewCopy, NewStack, PIVOT_BYTES_MAX,
};
use vmseal_initiator::driver::Driver;
use vmseal_secret::SecretBytes;

use super::backends::SIZE;
use super::guest::Guest;
use super::replaced::{Agent, OFFSET, id};
use crate::history::checker::Finding;
use crate::seed::seed;
use crate::successor::Filter;

const TIMEOUT: Duration = Duration::from_secs(30);
const ROUNDS: usize = 6;
/// The keys of the disk and of its copy.
const KEYS: [(&str, u8); 2] = [("own", 0), ("other", 100)];

fn open(directory: &Path, name: &str) -> File {
    File::options().read(true).write(true).open(directory.join(name)).unwrap()
}

fn make(directory: &Path) {
    for name in ["disk", "copy"] {
        File::create(directory.join(name)).unwrap().set_len(OFFSET + SIZE).unwrap();
    }
}

fn crypt(directory: &Path, key: usize) -> Value {
    use std::os::unix::fs::PermissionsExt;
    let (name, first) = KEYS[key];
    let path = directory.join(name);
    std::fs::write(&path, (first..first + 64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    json!([{ "kind": "crypt", "key": { "path": path }, "holes": "zero" }])
}

/// A copy with a new map, in the file `copy`, which is empty again.
fn copy(directory: &Path) -> (NewCopy, Vec<OwnedFd>) {
    let file = open(directory, "copy");
    file.set_len(0).unwrap();
    file.set_len(OFFSET + SIZE).unwrap();
    let first = KEYS[1].1;
    let mut key: Vec<u8> = (first..first + 64).collect();
    let key = SecretBytes::from_wiped(&mut key).unwrap().to_memfd().unwrap();
    let map = tempfile::tempfile().unwrap();
    let fds = vec![file.into(), map.into(), key.as_fd().try_clone_to_owned().unwrap()];
    let mirror = json!({
        "to": {
            "chain": [{ "kind": "crypt", "key": { "fd": 2 }, "holes": "zero" }],
            "backend": { "kind": "file", "file": { "fd": 0 }, "offset": OFFSET }
        },
        "map": { "fd": 1 },
        "stays": true
    });
    (NewCopy { disk: id(), mirror: serde_json::from_value(mirror).unwrap() }, fds)
}

/// The stack that the disk has, once more.
fn same(directory: &Path) -> (NewStack, Vec<OwnedFd>) {
    let backend = BackendSpec::File {
        file: Handle::Fd(0),
        offset: OFFSET,
        direct: Direct::Auto,
        keeps_room: false,
        channel: None,
    };
    let stack = NewStack { disk: id(), chain: None, backend, size: None };
    (stack, vec![open(directory, "disk").into()])
}

struct Run<'a> {
    directory: &'a Path,
    guest: Guest,
}

impl Run<'_> {
    fn agent(&self) -> Agent {
        Agent::connect(self.directory, &AtomicBool::new(false)).unwrap()
    }

    fn ask(&self, agent: &mut Agent, request: &ControlRequest, fds: &[OwnedFd]) -> ControlReply {
        agent.ask(request, fds).unwrap_or_else(|| {
            panic!("{}", std::fs::read_to_string(self.directory.join("log")).unwrap())
        })
    }

    fn done(&self, agent: &mut Agent, request: &ControlRequest, fds: &[OwnedFd]) {
        assert_eq!(self.ask(agent, request, fds), ControlReply::Done, "{request:?}");
    }

    fn refused(&self, agent: &mut Agent, request: &ControlRequest, why: &str) {
        match self.ask(agent, request, &[]) {
            ControlReply::Error { message, .. } if message.contains(why) => {}
            other => panic!("{request:?}: {other:?}, not {why}"),
        }
    }

    fn lacking(&self) -> Option<u64> {
        match self.ask(&mut self.agent(), &ControlRequest::Status, &[]) {
            ControlReply::Status(mut status) => {
                assert!(status.completes);
                status.disks.remove(0).mirror.map(|mirror| mirror.dirty_bytes)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Has the disk copied while its guest works.
    fn begin(&mut self) {
        let (copy, fds) = copy(self.directory);
        let request = ControlRequest::Mirror { copies: vec![copy.clone()] };
        self.guest.go_on();
        let mut agent = self.agent();
        self.done(&mut agent, &request, &fds);
        self.guest.go_on();
        // It is copied already, and stays.
        let again = ControlRequest::Mirror { copies: vec![copy] };
        assert!(matches!(self.ask(&mut agent, &again, &fds), ControlReply::Error { .. }));
        self.refused(&mut agent, &ControlRequest::Pivot { disk: id() }, "stays here");
        // Not without having drained it.
        self.refused(&mut agent, &ControlRequest::Complete { disks: vec![id()] }, "no disk waits");
    }

    /// Ends the copy; complete, if it is to be.
    fn end(&mut self, complete: bool) {
        let mut agent = self.agent();
        self.done(&mut agent, &ControlRequest::Drain { disks: vec![id()] }, &[]);
        if complete {
            self.done(&mut agent, &ControlRequest::Complete { disks: vec![id()] }, &[]);
            assert_eq!(self.lacking(), Some(0));
        }
        let (stack, fds) = same(self.directory);
        self.done(&mut agent, &ControlRequest::Replace { stacks: vec![stack] }, &fds);
        if complete {
            // Nothing copies it any more.
            self.refused(
                &mut agent,
                &ControlRequest::Complete { disks: vec![id()] },
                "not mirrored",
            );
        }
        self.done(&mut agent, &ControlRequest::Resume, &[]);
        assert_eq!(self.lacking(), None);
        self.guest.go_on();
    }

    fn until_small(&mut self) {
        let until = Instant::now() + TIMEOUT;
        while self.lacking().unwrap() > PIVOT_BYTES_MAX / 4 {
            assert!(Instant::now() < until, "the disk is not copied");
            self.guest.go_on();
        }
    }
}

/// Reads all of a disk from the file with this name.
fn read_all(run: &mut Run<'_>, filter: Filter, (name, key): (&str, usize)) -> Vec<Finding> {
    assert!(filter.end().success());
    let backend = json!({ "kind": "file", "offset": OFFSET });
    let chain = crypt(run.directory, key);
    let (filter, socket): (Filter, UnixStream) =
        Filter::start_on(run.directory, name, &backend, SIZE, &chain);
    run.guest.driver.reconnect(socket);
    run.guest.read_all();
    assert!(filter.end().success());
    run.guest.history.check()
}

#[test]
fn the_copy_for_another_host_is_complete_when_the_guest_stands_still_and_ends_at_any_time() {
    let mut random = fastrand::Rng::with_seed(seed());
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    make(directory);
    let backend = json!({ "kind": "file", "offset": OFFSET });
    let (filter, socket) = Filter::start(directory, &backend, SIZE, &crypt(directory, 0));
    let guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random.fork());
    let mut run = Run { directory, guest };
    for _ in 0..ROUNDS {
        run.begin();
        let complete = random.bool();
        if complete {
            run.until_small();
        }
        run.end(complete);
    }
    run.begin();
    run.until_small();
    run.guest.finish();
    run.end(true);
    run.guest.finish();
    let log = std::fs::read_to_string(directory.join("log")).unwrap();
    assert!(!log.contains("not allowed"), "{log}");
    // What the guest has done since the copy was complete is in the disk alone.
    let findings = read_all(&mut run, filter, ("disk", 0));
    assert!(findings.is_empty(), "{:?}", findings.first());
}

#[test]
fn a_complete_copy_has_all_that_the_guest_wrote() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    make(directory);
    let backend = json!({ "kind": "file", "offset": OFFSET });
    let (filter, socket) = Filter::start(directory, &backend, SIZE, &crypt(directory, 0));
    let random = fastrand::Rng::with_seed(seed());
    let guest = Guest::new(Driver::connect_with_record(socket, u64::MAX), random);
    let mut run = Run { directory, guest };
    run.begin();
    run.until_small();
    run.guest.go_on();
    run.guest.finish();
    let mut agent = run.agent();
    run.done(&mut agent, &ControlRequest::Drain { disks: vec![id()] }, &[]);
    run.done(&mut agent, &ControlRequest::Complete { disks: vec![id()] }, &[]);
    drop(agent);
    let findings = read_all(&mut run, filter, ("copy", 1));
    assert!(findings.is_empty(), "{:?}", findings.first());
}
