//! Longer queues for connections to forwarded ports. QEMU's own network stack listens with a queue of one (libslirp, `listen(s, 1)`):
//! of several clients that connect at once the kernel refuses most, and they try again after one second, three, seven and so
//! on, for a minute and more on a busy host. The queue of a socket may be made longer at any time, by whoever has it.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::{Backlog, getsockopt, listen, sockopt};
use vmseal_api::host::NicState;
use vmseal_api::nic::Protocol;

use crate::process::Process;

/// Makes the queues of a QEMU's forwarded ports longer. A host that does not let the agent do that serves the ports
/// all the same: that is logged, and no error.
pub fn lengthen(qemu: &Process, cards: &[NicState]) {
    let forwards = cards.iter().flat_map(|card| &card.forwards);
    let ports: Vec<u16> =
        forwards.filter(|it| it.protocol == Protocol::Tcp).map(|it| it.host_port).collect();
    if ports.is_empty() {
        return;
    }
    match lengthen_all(qemu, &ports) {
        Ok(found) if found >= ports.len() => {}
        Ok(found) => tracing::warn!(
            found,
            ports = ports.len(),
            "some forwarded ports are not found in QEMU: many clients at once wait long there"
        ),
        Err(error) => tracing::warn!(
            %error,
            "the queues of forwarded ports stay short, as QEMU makes them: many clients at once wait long there"
        ),
    }
}

/// The number of sockets whose queue is longer now.
fn lengthen_all(qemu: &Process, ports: &[u16]) -> io::Result<usize> {
    let mut found = 0;
    for entry in fs::read_dir(format!("/proc/{}/fd", qemu.pid()))? {
        let entry = entry?;
        // QEMU may have closed it meanwhile.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let is_socket = target.to_str().is_some_and(|target| target.starts_with("socket:"));
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(number) = number.filter(|_| is_socket) else { continue };
        let copy = match qemu.descriptor(number) {
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => continue,
            other => other?,
        };
        if is_of(&copy, ports)? {
            listen(&copy, Backlog::MAXCONN)?;
            found += 1;
        }
    }
    Ok(found)
}

/// Whether a socket listens at one of the ports.
fn is_of(socket: &OwnedFd, ports: &[u16]) -> io::Result<bool> {
    if !getsockopt(socket, sockopt::AcceptConn)? {
        return Ok(false);
    }
    let listener = TcpListener::from(socket.as_fd().try_clone_to_owned()?);
    // One that is not of TCP has no such address.
    Ok(listener.local_addr().is_ok_and(|address| ports.contains(&address.port())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_that_listen_at_the_ports_are_meant() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        let local = client.local_addr().unwrap().port();
        let unix = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let named = std::os::unix::net::UnixListener::bind(directory.path().join("s")).unwrap();
        let ports = [address.port(), local];
        assert!(is_of(&listener.into(), &ports).unwrap());
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        for socket in [client.into(), unix.into(), named.into(), other.into()] {
            assert!(!is_of(&socket, &ports).unwrap(), "{socket:?}");
        }
    }
}
