//! The program itself under a guest: killed, or hit by a power cut. What the guest sees is checked here;
//! `tests/replicate` checks replicas.

mod backends;
mod chains;
mod copied_away;
mod forgetful;
mod guest;
mod killed;
mod merged;
mod mirrored;
mod replaced;
mod to_a_server;
mod unplugged;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde_json::Value;
use vmseal_initiator::driver::Driver;

use self::backends::{BackendKind, SIZE};
use self::guest::{Failed, Guest};
use crate::successor::Filter;

/// How long a filter may work on its last requests before it ends.
const LONGEST_PAUSE: Duration = Duration::from_micros(300);

/// How many turns a guest may have until a request fails that one in 20 times does.
const MORE_TURNS: usize = 50;

/// Mostly short: a system call or two of a file in memory. A sleep would be longer than that.
fn pause(random: &mut fastrand::Rng) {
    let (begun, pause) = (Instant::now(), LONGEST_PAUSE / (1 << random.u32(..9)));
    while begun.elapsed() < pause {}
}

/// A disk, and the filters that serve it one after the other.
struct Program<'a> {
    kind: BackendKind,
    directory: &'a Path,
    chain: &'a [Value],
    /// With the files that it names.
    in_place: Value,
    /// How the filters that were ended in order ended.
    ended: Vec<ExitStatus>,
}

impl<'a> Program<'a> {
    /// Makes the disk, empty.
    fn new(kind: BackendKind, directory: &'a Path, chain: &'a [Value]) -> Self {
        kind.make(directory);
        let (in_place, ended) = (chains::in_place(chain, directory), Vec::new());
        Self { kind, directory, chain, in_place, ended }
    }

    /// Starts a filter, whose faults strike other requests than the last one's.
    fn start(&self, random: &mut fastrand::Rng) -> (Filter, UnixStream) {
        let chain = chains::seeded(&self.in_place, random);
        Filter::start(self.directory, &self.kind.backend(self.directory), SIZE, &chain)
    }

    /// Ends a filter in order.
    fn end(&mut self, filter: Filter) {
        self.ended.push(filter.end());
    }

    /// A guest that has written its initial data before anything is killed; no filter is left.
    fn guest(&mut self, mut random: fastrand::Rng) -> Guest {
        let (mut filter, socket) = self.start(&mut random);
        let driver = Driver::connect_with_record(socket, u64::MAX);
        let mut guest = Guest::new(driver, random.fork());
        guest.history.tears_beside_writes = self.kind.tears_beside_writes();
        if chains::holes(self.chain) == Some("ciphertext") || self.kind == BackendKind::Overlay {
            guest.write_all();
        }
        if self.kind == BackendKind::Overlay {
            self.end(filter);
            self.kind.lay_over(self.directory, "base");
            let socket;
            (filter, socket) = self.start(&mut random);
            guest.driver.reconnect(socket);
            guest.go_on();
            guest.finish();
            self.end(filter);
            self.kind.lay_over(self.directory, "middle");
        } else {
            self.end(filter);
        }
        guest
    }

    /// Lets the guest work until every kind of request has failed that a rule of the chain makes fail: few have a turn
    /// while filters are killed.
    fn meet_faults(&self, guest: &mut Guest) {
        let (reads, others) = self.expected_to_fail();
        let missing =
            |guest: &Guest| reads && guest.failed.reads == 0 || others && guest.failed.others == 0;
        for _ in 0..MORE_TURNS {
            if missing(guest) {
                guest.go_on();
            }
        }
    }

    /// Whether a rule of the chain makes reads fail, and whether any other requests.
    fn expected_to_fail(&self) -> (bool, bool) {
        let fails = |operations: &[&str]| chains::fails(self.chain, operations);
        (fails(&["read"]), fails(&["write", "discard", "flush"]))
    }

    /// Checks that filters ended well, and only requests failed that a rule of the chain may make fail.
    fn judge(&self, guest: &Guest) {
        let (log, ended) = (self.log(), &self.ended);
        assert!(!log.contains("not allowed"), "{log}");
        let fails = |operations: &[&str]| chains::fails(self.chain, operations);
        // A filter flushes at its end, and reports a failure.
        let well =
            |ended: &ExitStatus| ended.success() || fails(&["flush"]) && ended.code() == Some(1);
        assert!(ended.iter().all(well), "{ended:?}\n{log}");
        let Failed { reads, others } = guest.failed;
        let failed = format!("{reads} reads and {others} other requests failed");
        assert_eq!((reads > 0, others > 0), self.expected_to_fail(), "{failed}\n{log}");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap()
    }
}
