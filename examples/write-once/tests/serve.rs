//! The example as a user runs it, with QEMU's tool as its client.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

struct Example(Child);

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn qemu_io(socket: &Path, commands: &[&str]) -> Output {
    let mut client = Command::new("qemu-io");
    client.args(["-f", "raw"]);
    for command in commands {
        client.args(["-c", command]);
    }
    client.arg(format!("nbd+unix:///?socket={}", socket.display())).output().unwrap()
}

#[test]
fn written_blocks_stay() {
    let place = tempfile::tempdir().unwrap();
    let (disk, socket) = (place.path().join("disk"), place.path().join("socket"));
    File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_vmseal-example-write-once"))
        .args([&disk, &socket])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut example = Example(child);
    let until = Instant::now() + Duration::from_secs(30);
    while !socket.exists() {
        assert!(Instant::now() < until, "it does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    let first = qemu_io(&socket, &["write -P 1 0 64k", "read -P 1 0 64k"]);
    assert!(first.status.success(), "{first:?}");
    // Another one, over the last of those blocks and after them; then discards.
    for refused in ["write -P 2 60k 8k", "write -z 0 64k", "discard 0 64k"] {
        let output = qemu_io(&socket, &[refused]);
        assert!(!output.status.success(), "{refused}: {output:?}");
    }
    let after = qemu_io(&socket, &["read -P 1 0 64k", "write -P 3 64k 4k", "read -P 3 64k 4k"]);
    assert!(after.status.success(), "{after:?}");
    kill(Pid::from_raw(example.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    let said = std::io::read_to_string(example.0.stdout.take().unwrap()).unwrap();
    assert!(example.0.wait().unwrap().success());
    assert_eq!(said, "write_once: {\"refused_requests\": 3}\n");
}
