//! Storage on the other side of an NBD connection. When the power of the server fails, its connections end.

use vmseal_iofilter::stack::chain::{Chain, Storage};
use vmseal_iofilter::storage::nbd::NbdDisk;

use super::over_server;
use crate::history::SIZE;
use crate::history::guest::{Forgets, QUEUES};
use crate::nbd_server::NbdServer;
use crate::platter::Platter;

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

fn serve(platter: Platter) -> Served {
    Served { platter, server: None }
}

#[test]
fn through_a_server_only_what_was_not_flushed_goes_with_the_power() {
    over_server::only_what_was_not_flushed_goes_with_the_power(serve);
}

#[test]
fn a_server_that_does_not_flush_is_detected() {
    over_server::one_that_does_not_flush_is_detected(serve);
}
