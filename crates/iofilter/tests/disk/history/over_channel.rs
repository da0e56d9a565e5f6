//! Storage on the other side of a queue in shared memory. When the power of the server's storage fails, its requests fail: that the
//! server itself is gone would end this process.

use vmseal_iofilter::stack::chain::{Chain, Storage};

use super::over_server;
use crate::channel_server::ChannelServer;
use crate::history::SIZE;
use crate::history::guest::{Forgets, QUEUES};
use crate::platter::Platter;

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

fn serve(platter: Platter) -> Served {
    Served { platter, server: None }
}

#[test]
fn through_a_channel_only_what_was_not_flushed_goes_with_the_power() {
    over_server::only_what_was_not_flushed_goes_with_the_power(serve);
}

#[test]
fn storage_behind_a_channel_that_does_not_flush_is_detected() {
    over_server::one_that_does_not_flush_is_detected(serve);
}
