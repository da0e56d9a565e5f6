//! A second network for a Ceph cluster, and the cable that joins it to the network of a test. When the cable is cut, packets are lost,
//! and nobody is told: no connection ends, and all daemons live.
//!
//! ```text
//!  [ the test, server, agent, vmseal-rbd  10.98.0.2 ] ────── cable ────── [ 10.98.0.1  the cluster's address and daemons ]
//! ```
//! The cluster's address is one of loopback, as `vmseal lab ceph` takes no other. Packets to such an address may go over this cable
//! (`route_localnet`), and from the network of the test those to the cluster's do.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::Ipv4Addr;
use std::panic::resume_unwind;

use vmseal_lab::network::Network;

use crate::network::ip;

/// The ends of the cable, and their addresses.
const NEAR: &str = "cable-near";
const FAR: &str = "cable-far";
const NEAR_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 2);
const FAR_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);

/// The hardware address of the far end. The near one is told it, and does not ask: else, while the cable is cut, the kernel would soon say
/// that nobody has the address.
const FAR_HARDWARE: &str = "02:00:0a:62:00:01";

/// The cable, and the network at its far end.
pub struct Cable(Network);

impl Cable {
    /// Makes another network, and lays a cable to it from that of this thread, which is of the test's own
    /// ([`own_namespace`](crate::network::own_namespace)).
    #[must_use]
    pub fn lay() -> Self {
        let cable = Self(Network::new().unwrap());
        run(&format!("link add {NEAR} type veth peer name {FAR} address {FAR_HARDWARE}"));
        // By the descriptor of this process: the other network has no name.
        let descriptor = cable.0.descriptor();
        run(&format!("link set {FAR} netns /proc/{}/fd/{descriptor}", std::process::id()));
        cable.at_far_end(|| {
            run("link set lo up");
            set_up(FAR, FAR_ADDRESS);
        });
        set_up(NEAR, NEAR_ADDRESS);
        run(&format!("neigh add {FAR_ADDRESS} lladdr {FAR_HARDWARE} dev {NEAR} nud permanent"));
        cable
    }

    /// Does something in the network at the far end, as do the programs that it starts. If it panics, so does this, with the same message.
    pub fn at_far_end<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let there = || {
            self.0.enter().unwrap();
            work()
        };
        match std::thread::scope(|scope| scope.spawn(there).join()) {
            Ok(done) => done,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Has packets to this address, which is one of loopback at the far end, go over the cable.
    pub fn add_route(&self, address: Ipv4Addr) {
        let way = format!("via {FAR_ADDRESS} dev {NEAR} src {NEAR_ADDRESS}");
        // Before the route by which all addresses of loopback are this network's own.
        run(&format!("route add {address} {way} table local"));
    }

    /// Cuts it, until this is dropped.
    #[must_use]
    pub fn cut(&self) -> Cut<'_> {
        self.set_far_end("down").unwrap();
        Cut(self)
    }

    /// Not the near end: without it there would be no route, and programs here would be told so.
    fn set_far_end(&self, state: &str) -> anyhow::Result<()> {
        self.at_far_end(|| ip(&format!("link set {FAR} {state}")).map(drop))
    }
}

/// A cut, until this is dropped.
pub struct Cut<'a>(&'a Cable);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let joined = self.0.set_far_end("up");
        // A test that fails has said why, and a second panic would end all others.
        if !std::thread::panicking() {
            joined.unwrap();
        }
    }
}

/// Gives an end its address, and lets packets to and from addresses of loopback through.
fn set_up(end: &str, address: Ipv4Addr) {
    run(&format!("addr add {address}/30 dev {end}"));
    std::fs::write(format!("/proc/sys/net/ipv4/conf/{end}/route_localnet"), "1").unwrap();
    run(&format!("link set {end} up"));
}

fn run(arguments: &str) {
    ip(arguments).unwrap();
}
