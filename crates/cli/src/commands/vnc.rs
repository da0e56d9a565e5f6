//! `vmseal vm vnc`: a guest's screen as a VNC server on this machine's loopback, for as long as the command runs.
//!
//! Every user of a machine can connect to its loopback. So a connection of another user than the one who runs this
//! is closed at once, by what the kernel says of the other end's socket.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;

use anyhow::Context;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use vmseal_api::carry::MESSAGE_MAX;
use vmseal_api::client::ServerClient;

use super::console::EndSignals;
use crate::arguments::Vnc;
use crate::print;

/// The most viewers at a time; more wait.
const VIEWERS_MAX: usize = 8;

/// The kernel's list of connections.
const CONNECTIONS: &str = "/proc/net/tcp";

pub async fn run(server: ServerClient, options: &Vnc) -> anyhow::Result<()> {
    let vm = &options.name;
    let mut ends = EndSignals::listen().context("cannot listen for signals")?;
    // Whether there is a screen is known before an address is given.
    drop(server.screen(vm).await?);
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, options.port);
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("--port: cannot listen at {address}"))?;
    let address = listener.local_addr()?;
    print::line(&address.to_string())?;
    print::say(format_args!("the screen of {vm} is at {address} (VNC) until Ctrl-C"));
    let server = Arc::new(server);
    let places = Arc::new(Semaphore::new(VIEWERS_MAX));
    loop {
        let (viewer, from) = tokio::select! {
            accepted = listener.accept() => accepted?,
            () = ends.any() => return Ok(()),
        };
        if !is_own(from, address) {
            print::say(format_args!("a connection of another user from {from} was refused"));
            continue;
        }
        let place = Arc::clone(&places).acquire_owned().await?;
        let (server, vm) = (Arc::clone(&server), vm.clone());
        tokio::spawn(async move {
            let _place = place;
            if let Err(problem) = show(viewer, &server, &vm).await {
                print::say(format_args!("a connection was ended: {problem}"));
            }
        });
    }
}

async fn show(
    mut viewer: TcpStream,
    server: &ServerClient,
    vm: &str,
) -> Result<(), vmseal_api::problem::Problem> {
    // Key strokes are small and must not wait. If the socket refuses this it still works.
    let _ = viewer.set_nodelay(true);
    let mut screen = server.screen(vm).await?;
    // The viewer sees an error as the end of its connection.
    let _ = copy_bidirectional_with_sizes(&mut viewer, &mut screen, MESSAGE_MAX, MESSAGE_MAX).await;
    Ok(())
}

/// Whether the socket at the other end of a connection to `to` is of the user who runs this.
fn is_own(from: SocketAddr, to: SocketAddr) -> bool {
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else { return false };
    let list = std::fs::read_to_string(CONNECTIONS).unwrap_or_default();
    user_of(&list, from, to) == Some(nix::unistd::geteuid().as_raw())
}

/// The user of the socket that is connected from one address to the other, in the kernel's list: number, local address,
/// the other one, state, queues, timer, retransmissions, user. Both addresses count: users may share a local one.
fn user_of(list: &str, from: SocketAddrV4, to: SocketAddrV4) -> Option<u32> {
    // As the kernel prints the four bytes: a number of this machine's byte order.
    let shown = |address: SocketAddrV4| {
        format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port())
    };
    let ends = [shown(from), shown(to)];
    let line = list.lines().find(|line| line.split_whitespace().skip(1).take(2).eq(&ends))?;
    line.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_user_of_a_connection_is_known() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _viewer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (_stream, from) = listener.accept().await.unwrap();
        assert!(is_own(from, listener.local_addr().unwrap()));
        let list = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   0: 0100007F:1F90 0100007F:0050 01 00000000:00000000 00:00000000 00000000     5        0 1\n   1: 0100007F:1F90 0100007F:170C 01 00000000:00000000 00:00000000 00000000  1000        0 1\n";
        let at = |port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        let user = |from, to| user_of(list, at(from), at(to));
        // Two users share the local address.
        assert_eq!([user(8080, 80), user(8080, 5900)], [Some(5), Some(1000)]);
        assert_eq!([user(8081, 5900), user(8080, 5901)], [None, None]);
    }
}
