//! What is sent to a filter's control socket. Every line is answered, until one that is too long or
//! that asks for the end.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;

use vmseal_api::filter::{Confinement, ControlReply, ControlRequest, FilesConfined};
use vmseal_api::id::{DiskId, VmId};
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::process::control::{self, Control, Event};

use vmseal_iofilter::process::RunningDisk;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;

use crate::INPUT_MAX;

/// A control socket that is served until the process ends.
static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| {
    let name = format!("vmseal-fuzz-control-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let (events, asked) = mpsc::channel();
    let (state, stop) = (DiskState::new(DiskId::new(), 1), Stop::new().unwrap());
    let orders = Arc::new(Orders::new(Arc::new(stop)).unwrap());
    let disks =
        vec![RunningDisk { state: Arc::new(state), orders, pivot: Arc::default(), stack: None }];
    let uid = nix::unistd::geteuid().as_raw();
    let confinement = Confinement { files: FilesConfined::No, memory_bytes: 0 };
    let control = Arc::new(Control { vm: VmId::new(), uid, disks, confinement, events });
    thread::spawn(move || control::serve(&listener, &control));
    thread::spawn(move || {
        for Event::Shutdown { reply, .. } in asked {
            reply.unwrap().send(ControlReply::Done).unwrap();
        }
    });
    address
});

/// How many of the lines are to be answered.
fn answered(data: &[u8]) -> usize {
    let lines: Vec<&[u8]> = data.split_inclusive(|&byte| byte == b'\n').collect();
    let ends = |line: &&[u8]| matches!(serde_json::from_slice(line), Ok(ControlRequest::Shutdown));
    lines.iter().position(ends).map_or(lines.len(), |last| last + 1)
}

/// See the module.
pub fn run(data: &[u8]) {
    let data = &data[..data.len().min(INPUT_MAX)];
    let mut stream = UnixStream::connect_addr(&SERVER).unwrap();
    stream.write_all(data).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut replies = Vec::new();
    if let Err(error) = stream.read_to_end(&mut replies) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "as there was more behind the end");
    }
    let replies: Vec<ControlReply> =
        serde_json::Deserializer::from_slice(&replies).into_iter().map(Result::unwrap).collect();
    assert_eq!(replies.len(), answered(data));
}
