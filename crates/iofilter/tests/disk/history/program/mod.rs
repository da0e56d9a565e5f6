//! The program itself under a guest: killed, and cut off from its power. What the guest sees is judged here;
//! `tests/replicate` judges replicas.

mod chains;
mod forgetful;
mod guest;
mod killed;
mod rests;
mod unplugged;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde_json::Value;
use vmseal_initiator::driver::Driver;

use self::guest::{Failed, Guest};
use self::rests::{Rests, SIZE};
use crate::successor::Filter;

/// How long a filter may work on what it was asked for last before it ends.
const LONGEST_PAUSE: Duration = Duration::from_micros(300);

/// Mostly short: a system call or two of a file in memory. A sleep would be longer than that.
fn pause(random: &mut fastrand::Rng) {
    let (begun, pause) = (Instant::now(), LONGEST_PAUSE / (1 << random.u32(..9)));
    while begun.elapsed() < pause {}
}

/// A disk, and the filters that serve it one after the other.
struct Program<'a> {
    rests: Rests,
    directory: &'a Path,
    chain: &'a [Value],
    /// With the files that it names.
    in_place: Value,
    /// How those ended that ended in order.
    ended: Vec<ExitStatus>,
}

impl<'a> Program<'a> {
    /// Makes the disk, empty.
    fn new(rests: Rests, directory: &'a Path, chain: &'a [Value]) -> Self {
        rests.make(directory);
        let (in_place, ended) = (chains::in_place(chain, directory), Vec::new());
        Self { rests, directory, chain, in_place, ended }
    }

    /// A filter, whose faults strike other requests than the last one's.
    fn start(&self, random: &mut fastrand::Rng) -> (Filter, UnixStream) {
        let chain = chains::seeded(&self.in_place, random);
        Filter::start(self.directory, &self.rests.backend(self.directory), SIZE, &chain)
    }

    /// Ends a filter in order.
    fn end(&mut self, filter: Filter) {
        self.ended.push(filter.end());
    }

    /// A guest that has written all that it has to before anything is cut off; no filter is left.
    fn guest(&mut self, mut random: fastrand::Rng) -> Guest {
        let (mut filter, socket) = self.start(&mut random);
        let driver = Driver::connect_with_record(socket, u64::MAX);
        let mut guest = Guest::new(driver, random.fork());
        if chains::holes(self.chain) == Some("ciphertext") || self.rests == Rests::Overlay {
            guest.write_all();
        }
        if self.rests == Rests::Overlay {
            self.end(filter);
            self.rests.lay_over(self.directory, "base");
            let socket;
            (filter, socket) = self.start(&mut random);
            guest.driver.reconnect(socket);
            guest.go_on();
            guest.finish();
            self.end(filter);
            self.rests.lay_over(self.directory, "middle");
        } else {
            self.end(filter);
        }
        guest
    }

    /// That filters ended well, and only those requests failed that a rule of the chain lets fail.
    fn judge(&self, guest: &Guest) {
        let (log, ended) = (self.log(), &self.ended);
        assert!(!log.contains("not allowed"), "{log}");
        let fails = |operations: &[&str]| chains::fails(self.chain, operations);
        // A filter flushes at its end, and says when that fails.
        let well =
            |ended: &ExitStatus| ended.success() || fails(&["flush"]) && ended.code() == Some(1);
        assert!(ended.iter().all(well), "{ended:?}\n{log}");
        let Failed { reads, others } = guest.failed;
        let expected = (fails(&["read"]), fails(&["write", "discard", "flush"]));
        let failed = format!("{reads} reads and {others} other requests failed");
        assert_eq!((reads > 0, others > 0), expected, "{failed}\n{log}");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap()
    }
}
