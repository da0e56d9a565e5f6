//! How fast the streams of a migration are through loopback, and what they cost:
//! `cargo run --release -p vmseal-agent --example migration_streams`.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use uuid::Uuid;
use vmseal_agent::migration::transport::{
    Bridge, CONTENT_MAX, Cipher, Kind, Listener, Session, Spec, connect, records,
};
use vmseal_secret::SecretBytes;

const GIB: usize = 1 << 30;

/// Enough for a machine that does much else.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    for round in 0..3 {
        for streams in [1, 2, 4] {
            for cipher in [Cipher::None, Cipher::Aes256Gcm] {
                let before = process_cpu()?;
                let (seconds, of_bridges) = bridges(streams, cipher, GIB).await?;
                println!(
                    "round {round}, {streams} streams, {cipher:?}: {:.1} Gb/s, {:.2} CPU-s/GiB, {:.2} of them in the bridges",
                    8.0 * GIB as f64 / seconds / 1e9,
                    process_cpu()? - before,
                    of_bridges.as_secs_f64(),
                );
            }
        }
        for kib in [4, 16, 64, 128, 256, 512, 1024] {
            let length = kib << 10;
            if length <= CONTENT_MAX {
                let cpu = frames(length, GIB).await?.as_secs_f64();
                println!("round {round}, frames of {kib} KiB: {cpu:.3} CPU-s/GiB");
            }
        }
    }
    Ok(())
}

/// CPU seconds of this process.
fn process_cpu() -> anyhow::Result<f64> {
    let usage: Usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// The connecting and the accepting end of a session.
async fn sessions(streams: u16, cipher: Cipher) -> anyhow::Result<(Session, Session)> {
    let spec = || {
        let key = SecretBytes::from_wiped(&mut [1; 32])?;
        anyhow::Ok(Spec::new(Uuid::from_bytes([7; 16]), key, 42, streams, cipher)?)
    };
    let listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    let accepting = tokio::spawn(listener.expect(spec()?)?.session(CONNECT_TIMEOUT));
    let connecting = connect(spec()?, listener.address()).await?;
    Ok((connecting, accepting.await??))
}

/// A bridge of a stream, and the socket that QEMU would have.
fn bridged(session: &mut Session, stream: u16) -> anyhow::Result<(Bridge, UnixStream)> {
    let (socket, other) = UnixStream::pair()?;
    Ok((Bridge::start(session.take(stream).context("the stream is taken")?, other)?, socket))
}

/// Seconds for this many bytes through bridges, and the bridges' CPU time.
async fn bridges(streams: u16, cipher: Cipher, bytes: usize) -> anyhow::Result<(f64, Duration)> {
    let (mut here, mut there) = sessions(streams, cipher).await?;
    let begun = Instant::now();
    let mut all = Vec::new();
    let each = bytes / usize::from(streams);
    for stream in 0..streams {
        let (source, from) = bridged(&mut here, stream)?;
        let (destination, to) = bridged(&mut there, stream)?;
        let writer = thread::spawn(move || write(from, each));
        let reader = thread::spawn(move || read(to, each));
        all.push((writer, reader, source, destination));
    }
    for (writer, reader, source, destination) in all {
        reader.join().expect("a thread panicked")?;
        let _open_until_here = writer.join().expect("a thread panicked")?;
        source.done().await?;
        destination.done().await?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let counters = [here.handle().counters(), there.handle().counters()];
    let cpu = counters.iter().flatten().map(|it| it.sending_cpu + it.receiving_cpu).sum();
    Ok((seconds, cpu))
}

fn write(mut socket: UnixStream, bytes: usize) -> anyhow::Result<UnixStream> {
    let block = vec![0xa5; CONTENT_MAX];
    for _ in 0..bytes / block.len() {
        socket.write_all(&block)?;
    }
    socket.shutdown(Shutdown::Write)?;
    Ok(socket)
}

fn read(mut socket: UnixStream, bytes: usize) -> anyhow::Result<()> {
    let (mut block, mut count) = (vec![0; CONTENT_MAX], 0);
    while let read @ 1.. = socket.read(&mut block)? {
        count += read;
    }
    ensure!(count == bytes, "{count} bytes have arrived, not {bytes}");
    Ok(socket.shutdown(Shutdown::Write)?)
}

/// CPU time of this many bytes in frames of one length, from one thread to another.
async fn frames(length: usize, bytes: usize) -> anyhow::Result<Duration> {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await?;
    let (mut sender, _back) = records(here.take(0).context("no stream")?)?;
    let (_back, mut receiver) = records(there.take(0).context("no stream")?)?;
    // Threads of their own: what is counted is the threads' time.
    let sending = thread::spawn(move || {
        for _ in 0..bytes / length {
            sender.send_filled(Kind::BYTES, length)?;
        }
        sender.finish()
    });
    let receiving = thread::spawn(move || {
        while receiver.receive()?.is_some() {}
        anyhow::Ok(())
    });
    sending.join().expect("a thread panicked")?;
    receiving.join().expect("a thread panicked")?;
    let (here, there) = (here.handle().counters()[0], there.handle().counters()[0]);
    Ok(here.sending_cpu + there.receiving_cpu)
}
