//! Serves a raw file over NBD, encrypted, through the filter of this crate.
//!
//! ```text
//! vmseal-example-write-once FILE SOCKET
//! ```
//! The disk is as large as the file. Its key is random and forgotten at the end: it is an example.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use anyhow::{Context, bail};
use nix::sys::signal::{SigSet, Signal};
use vmseal_api::filter::{Direct, Holes};
use vmseal_api::id::DiskId;
use vmseal_example_write_once::WriteOnce;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::nbd;
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

/// How many connections are served at a time.
const CONNECTIONS: usize = 2;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(path), Some(socket), None) = (arguments.next(), arguments.next(), arguments.next())
    else {
        bail!("usage: vmseal-example-write-once FILE SOCKET");
    };
    let file = File::options().read(true).write(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let size = file.metadata()?.len();
    let rest = DiskStorage::File(FileDisk::open(file.into(), 0, size, Direct::Auto, false)?);
    let encryption = Encryption { key: SecretBytes::random(64)?, holes: Holes::Zero };

    // Above encryption: the filter sees the client's requests. A chain and a pool of buffers per connection.
    let disk = Disk::new(size, false, Some(encryption), rest, 2 * CONNECTIONS)
        .with_layers(vec![Arc::new(WriteOnce::new(size))], Vec::new());
    let chains = (0..CONNECTIONS).map(|_| disk.chain()).collect::<Result<Vec<_>, _>>()?;
    let state = DiskState::new(DiskId::new(), CONNECTIONS).with_layers(disk.layers());
    let served = ServedDisk {
        size: size.into(),
        read_only: false,
        serial: "example".into(),
        state: Arc::new(state),
        allocation: disk.allocation().into(),
    };

    let mut ends = SigSet::empty();
    ends.add(Signal::SIGINT);
    ends.add(Signal::SIGTERM);
    ends.thread_block()?;
    let stop = Arc::new(Stop::new()?);
    let stopping = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = ends.wait();
        stopping.ask();
    });
    let listener = UnixListener::bind(&socket)
        .with_context(|| format!("cannot listen at {}", socket.display()))?;
    let user = nix::unistd::geteuid().as_raw();
    let orders = Orders::new(stop)?;
    let chains = nbd::serve(&listener, user, &served, chains, disk.pool_bytes(), &orders)?;
    std::fs::remove_file(&socket)?;
    for mut chain in chains {
        blocking::flush(&mut chain)?;
    }
    for layer in served.state.figures().layers {
        println!("{}: {:?}", layer.kind, layer.counters);
    }
    Ok(())
}
