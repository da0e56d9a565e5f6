//! Storage on the other side of an NBD connection. When the power of the server fails, its connections end.

use vmseal_api::filter::Holes;
use vmseal_iofilter::stack::chain::{Chain, Storage};
use vmseal_iofilter::storage::nbd::NbdDisk;

use crate::history::checker::Wrong;
use crate::history::guest::{Forgets, QUEUES};
use crate::history::{BLOCK, Kind, SECTOR, SIZE, cache, jitter, limit, run_on};
use crate::nbd_server::NbdServer;
use crate::platter::{Fault, Platter};
use crate::seed::seed;

struct Served {
    platter: Platter,
    server: Option<(NbdServer, NbdDisk)>,
}

impl Forgets for Served {
    fn queue(&mut self) -> Box<dyn Storage> {
        let platter = &self.platter;
        let (_, disk) = self.server.get_or_insert_with(|| {
            let chain = |_| Chain::new(SIZE, false, Vec::new(), platter.queue()).unwrap();
            let server = NbdServer::start((0..QUEUES).map(chain).collect());
            let disk = NbdDisk::open(server.connect(QUEUES), "", 0, SIZE, false).unwrap();
            (server, disk)
        });
        disk.queue().unwrap()
    }

    fn cut(&mut self) {
        // What it has begun it does; then nobody uses the platter.
        self.server = None;
        self.platter.cut();
    }
}

fn served(kind: &Kind, fault: Fault, random: &mut fastrand::Rng) -> Served {
    let platter = Platter::new(SIZE as usize, kind.granule, fault, random.fork());
    Served { platter, server: None }
}

#[test]
fn through_a_server_only_what_was_not_flushed_goes_with_the_power() {
    let sealed = || Kind::new(Some(Holes::Zero), SECTOR);
    let chains = [
        ("plain", Kind::new(None, BLOCK)),
        ("crypt", sealed()),
        ("limit, crypt, delay", Kind { above: vec![limit()], below: vec![jitter()], ..sealed() }),
        ("crypt, cache", Kind { below: vec![cache()], ..sealed() }),
    ];
    for (name, kind) in chains {
        for round in 0..8 {
            let mut random = fastrand::Rng::with_seed(seed() ^ round);
            let mut storage = served(&kind, Fault::Nothing, &mut random);
            let findings = run_on(&kind, &mut storage, BLOCK, random, 4);
            let first: Vec<_> = findings.iter().take(5).collect();
            assert!(first.is_empty(), "{name}: {} wrong: {first:?}", findings.len());
        }
    }
}

#[test]
fn a_server_that_does_not_flush_is_detected() {
    let kind = Kind::new(None, BLOCK);
    let found = (0..64).any(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut storage = served(&kind, Fault::IgnoresFlushes, &mut random);
        let findings = run_on(&kind, &mut storage, BLOCK, random, 6);
        findings.iter().any(|finding| finding.wrong == Wrong::Unflushed)
    });
    assert!(found, "data that was not flushed is not missed");
}
