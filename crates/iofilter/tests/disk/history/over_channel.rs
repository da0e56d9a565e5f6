//! Storage on the other side of a queue in shared memory. When the power of the server's storage fails, its requests fail: that the
//! server itself is gone would end this process.

use vmseal_api::filter::Holes;
use vmseal_iofilter::stack::chain::{Chain, Storage};

use crate::channel_server::ChannelServer;
use crate::history::checker::Wrong;
use crate::history::guest::{Forgets, QUEUES};
use crate::history::{BLOCK, Kind, SECTOR, SIZE, cache, jitter, limit, run_on};
use crate::platter::{Fault, Platter};
use crate::seed::seed;

struct Served {
    platter: Platter,
    server: Option<ChannelServer>,
}

impl Forgets for Served {
    fn queue(&mut self) -> Box<dyn Storage> {
        let platter = &self.platter;
        let server = self.server.get_or_insert_with(|| {
            let chain = |_| Chain::new(SIZE, false, Vec::new(), platter.queue()).unwrap();
            ChannelServer::start((0..QUEUES).map(chain).collect(), SIZE)
        });
        server.queue()
    }

    fn cut(&mut self) {
        if let Some(server) = self.server.take() {
            server.fail();
        }
        self.platter.cut();
    }
}

fn served(kind: &Kind, fault: Fault, random: &mut fastrand::Rng) -> Served {
    let platter = Platter::new(SIZE as usize, kind.granule, fault, random.fork());
    Served { platter, server: None }
}

#[test]
fn through_a_channel_only_what_was_not_flushed_goes_with_the_power() {
    let sealed = || Kind::new(Some(Holes::Zero), SECTOR);
    let chains = [
        ("plain", Kind::new(None, BLOCK)),
        ("crypt", sealed()),
        ("crypt without holes", Kind::new(Some(Holes::Ciphertext), BLOCK)),
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
fn storage_behind_a_channel_that_does_not_flush_is_detected() {
    let kind = Kind::new(None, BLOCK);
    let found = (0..64).any(|seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut storage = served(&kind, Fault::IgnoresFlushes, &mut random);
        let findings = run_on(&kind, &mut storage, BLOCK, random, 6);
        findings.iter().any(|finding| finding.wrong == Wrong::Unflushed)
    });
    assert!(found, "data that was not flushed is not missed");
}
