//! How fast it is, and what it costs. Not a test of the usual ones:
//! `cargo test -p vmseal-agent --lib -- --ignored --nocapture how_fast_streams_are`

use std::time::Instant;

use super::*;

/// CPU seconds of this process.
fn process_cpu() -> f64 {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// Bytes through bridges, from sockets into sockets, as QEMU has them.
async fn bridges(streams: u16, cipher: Cipher, bytes: usize) -> (f64, Duration) {
    let (mut here, mut there) = sessions(streams, cipher).await;
    let begun = Instant::now();
    let mut all = Vec::new();
    let each = bytes / usize::from(streams);
    for stream in 0..streams {
        let (source, destination) = (bridged(&mut here, stream), bridged(&mut there, stream));
        let writer = thread::spawn(move || {
            let (mut socket, block) = (source.socket, vec![0xa5; CONTENT_MAX]);
            (0..each / block.len()).for_each(|_| socket.write_all(&block).unwrap());
            socket.shutdown(std::net::Shutdown::Write).unwrap();
            socket
        });
        let reader = thread::spawn(move || {
            let (mut socket, mut block, mut count) = (destination.socket, vec![0; CONTENT_MAX], 0);
            while let Ok(read @ 1..) = socket.read(&mut block) {
                count += read;
            }
            socket.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(count, each);
        });
        all.push((writer, reader, source.bridge, destination.bridge));
    }
    for (writer, reader, source, destination) in all {
        reader.join().unwrap();
        writer.join().unwrap();
        source.done().await.unwrap();
        destination.done().await.unwrap();
    }
    let seconds = begun.elapsed().as_secs_f64();
    let workers = [here.handle(), there.handle()].map(|handle| {
        let counters = handle.counters();
        counters.iter().map(|c| c.sending_cpu + c.receiving_cpu).sum::<Duration>()
    });
    (seconds, workers[0] + workers[1])
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn how_fast_streams_are() {
    const GIB: usize = 1 << 30;
    for round in 0..3 {
        for streams in [1, 2, 4] {
            for cipher in [Cipher::None, Cipher::Aes256Gcm] {
                let before = process_cpu();
                let (seconds, workers) = bridges(streams, cipher, GIB).await;
                println!(
                    "round {round}, {streams} streams, {cipher:?}: {:.1} Gb/s, {:.2} CPU-s/GiB in all, {:.2} of the bridges",
                    8.0 * GIB as f64 / seconds / 1e9,
                    process_cpu() - before,
                    workers.as_secs_f64(),
                );
            }
        }
    }
}

/// All bytes of a large stream, by their digest.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long on a machine without its own cores"]
async fn a_gibibyte_arrives_through_one_two_and_four_streams() {
    for streams in [1u16, 2, 4] {
        let (mut here, mut there) = sessions(streams, Cipher::Aes256Gcm).await;
        let length = (1 << 30) / usize::from(streams);
        let all: Vec<_> = (0..streams)
            .map(|stream| (bridged(&mut here, stream), bridged(&mut there, stream)))
            .map(|(source, destination)| {
                let sides = (talk(source.socket, length), talk(destination.socket, 1));
                (source.bridge, destination.bridge, sides)
            })
            .collect();
        for (source, destination, (here, there)) in all {
            source.done().await.unwrap();
            destination.done().await.unwrap();
            assert!(here.join().unwrap().0 == there.join().unwrap().1);
        }
    }
}

/// Frames of one length, from one thread to another.
async fn frames(length: usize, bytes: usize) -> Duration {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let (mut sender, _back) = records(here.take(0).unwrap()).unwrap();
    let (_back, mut receiver) = records(there.take(0).unwrap()).unwrap();
    let sending = thread::spawn(move || {
        (0..bytes / length).for_each(|_| sender.send_filled(Kind::BYTES, length).unwrap());
        sender.finish().unwrap();
    });
    // A thread of its own: what is counted is the thread's time.
    let receiving = thread::spawn(move || while receiver.receive().unwrap().is_some() {});
    sending.join().unwrap();
    receiving.join().unwrap();
    let (here, there) = (here.handle().counters()[0], there.handle().counters()[0]);
    here.sending_cpu + there.receiving_cpu
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn how_long_frames_should_be() {
    for round in 0..5 {
        for kib in [4, 16, 64, 128, 256, 512, 1024] {
            let length = kib << 10;
            if length <= CONTENT_MAX {
                let cpu = frames(length, 1 << 30).await;
                println!("round {round}, {kib} KiB: {:.3} CPU-s/GiB", cpu.as_secs_f64());
            }
        }
    }
}
