//! A disk through `vmseal-filter`, in a real guest: fio's verification, under kills too, and both directions against the
//! kernel's own dm-crypt with cryptsetup.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use tempfile::TempDir;
use uuid::Uuid;
use vmseal_api::filter::Holes;
use vmseal_luks::{DATA_OFFSET, Identity};
use vmseal_secret::derive::KeyContext;
use vmseal_secret::{DEK_LEN, KEK_LEN, SecretBytes};
use vmseal_tests::filter::{Disk, Filter, Successor};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::scan::contains;
use vmseal_tests::test_guest::{self, GuestDisk};

const SIZE: u64 = 128 << 20;

/// An image with a LUKS2 header of ours, in a directory with the KEK as file `kek`.
struct Image {
    directory: TempDir,
    dek: SecretBytes,
}

impl Image {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let dek = SecretBytes::random(DEK_LEN).unwrap();
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let this = Self { directory, dek };
        let mut file = File::create_new(this.path()).unwrap();
        file.set_len(DATA_OFFSET + SIZE).unwrap();
        file = File::options().read(true).write(true).open(this.path()).unwrap();
        let (vm, provider) = (Uuid::new_v4().into_bytes(), Uuid::new_v4().into_bytes());
        let context = KeyContext { vm, provider, key_id: "test" };
        let identity = Identity {
            disk: Uuid::new_v4(),
            holes: vmseal_luks::Holes::Zero,
            shared: false,
            role: Default::default(),
        };
        vmseal_luks::create(&mut file, SIZE, &this.dek, &kek, &context, identity).unwrap();
        this.write_kek(&kek);
        this
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("image")
    }

    fn files(&self) -> std::path::PathBuf {
        self.directory.path().join("files")
    }

    fn write_kek(&self, kek: &SecretBytes) {
        std::fs::create_dir(self.files()).unwrap();
        std::fs::write(self.files().join("kek"), kek.expose()).unwrap();
    }

    fn disk<'a>(&'a self, image: &'a Path) -> Disk<'a> {
        let dek = Some(&self.dek);
        let (holes, stall, channel) = (Holes::Zero, None, None);
        Disk { image, offset: DATA_OFFSET, size: SIZE, dek, holes, stall, channel }
    }

    /// Runs a script in a guest that has the disk through vmseal-filter.
    fn with_filter(&self, script: &str) -> anyhow::Result<String> {
        let filter = Filter::start(self.directory.path(), &self.disk(&self.path()))?;
        let said = test_guest::run(script, &[GuestDisk::VhostUser(filter.socket())], None)?;
        filter.stop()?;
        Ok(said)
    }

    /// Runs a script in a guest that has the image as `/dev/vda`, opened with the kernel's dm-crypt as
    /// `/dev/mapper/disk`.
    fn with_dm_crypt(&self, script: &str) -> anyhow::Result<String> {
        let open = "cryptsetup open --key-file /files/kek /dev/vda disk";
        let script = format!("set -e\n{open}\n{script}\ncryptsetup close disk\n");
        test_guest::run(&script, &[GuestDisk::Raw(&self.path())], Some(&self.files()))
    }
}

const WRITE: &str =
    "set -e; mkdir -p /m; /usr/sbin/mke2fs -q -t ext4 -b 4096 DEVICE; mount DEVICE /m
    dd if=/dev/urandom of=/m/random bs=1M count=20 2>/dev/null; echo vmseal-marker >/m/marker
    sha256sum /m/random /m/marker; umount /m";
const READ: &str =
    "set -e; mkdir -p /m; /usr/sbin/e2fsck -fn DEVICE >/dev/null 2>&1; mount DEVICE /m
    sha256sum /m/random /m/marker; umount /m";

fn on(script: &str, device: &str) -> String {
    script.replace("DEVICE", device)
}

#[test]
fn dm_crypt_reads_what_a_guest_wrote_through_the_filter() {
    let image = Image::new();
    let written = image.with_filter(&on(WRITE, "/dev/vda")).unwrap();
    assert_eq!(image.with_dm_crypt(&on(READ, "/dev/mapper/disk")).unwrap(), written);
    let content = std::fs::read(image.path()).unwrap();
    assert!(!contains(&content, b"vmseal-marker"));
}

#[test]
fn a_guest_reads_through_the_filter_what_dm_crypt_wrote_on_an_image_of_cryptsetups() {
    let mut image = Image::new();
    image.dek = format_with_cryptsetup(&image).unwrap();
    let written = image.with_dm_crypt(&on(WRITE, "/dev/mapper/disk")).unwrap();
    assert_eq!(image.with_filter(&on(READ, "/dev/vda")).unwrap(), written);
}

/// Makes the real cryptsetup write the header again, with its own volume key; returns that key.
fn format_with_cryptsetup(image: &Image) -> anyhow::Result<SecretBytes> {
    let kek = image.files().join("kek");
    let key = image.directory.path().join("volume-key");
    cryptsetup(
        &[
            "luksFormat",
            "--batch-mode",
            "--type",
            "luks2",
            "--cipher",
            "aes-xts-plain64",
            "--key-size",
            "512",
            "--sector-size",
            "4096",
            "--pbkdf",
            "pbkdf2",
            "--pbkdf-force-iterations",
            "1000",
        ],
        &kek,
        &image.path(),
    )?;
    let volume_key = key.display().to_string();
    cryptsetup(
        &["luksDump", "--batch-mode", "--dump-volume-key", "--volume-key-file", &volume_key],
        &kek,
        &image.path(),
    )?;
    Ok(SecretBytes::from_wiped(&mut std::fs::read(&key)?)?)
}

fn cryptsetup(arguments: &[&str], kek: &Path, image: &Path) -> anyhow::Result<()> {
    let output = Command::new("/usr/sbin/cryptsetup")
        .args(arguments)
        .arg("--key-file")
        .arg(kek)
        .arg(image)
        .stdin(Stdio::null())
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[test]
fn fio_verifies_every_kind_of_write_in_a_guest() {
    let image = Image::new();
    // Sizes and offsets down to 512 bytes: the filter's sectors have 4096.
    let script = "set -e
        cat /sys/block/vda/queue/logical_block_size /sys/block/vda/queue/physical_block_size
        cat /sys/block/vda/serial; echo
        fio --output-format=terse --name=v --filename=/dev/vda --size=48M --rw=randwrite \
            --bsrange=512-128k --blockalign=512 --ioengine=libaio --iodepth=16 \
            --numjobs=1 --direct=1 --verify=crc32c --verify_fatal=1 --randrepeat=0 --fsync=64 >/tmp/fio || {
                cat /tmp/fio; exit 1; }
        dd if=/dev/urandom of=/dev/vda bs=1M seek=64 count=8 oflag=direct 2>/dev/null
        /usr/sbin/blkdiscard -o 68157440 -l 2097152 /dev/vda
        dd if=/dev/vda bs=1M skip=65 count=2 iflag=direct 2>/dev/null | sha256sum
        /usr/sbin/blkdiscard -z -o 70254592 -l 1048576 /dev/vda
        dd if=/dev/vda bs=1M skip=67 count=1 iflag=direct 2>/dev/null | sha256sum
        echo fine";
    let said = image.with_filter(script).unwrap();
    let lines: Vec<_> = said.lines().map(str::trim).collect();
    assert_eq!(lines[..3], ["512", "4096", "by-hand"], "{said}");
    // SHA-256 of 2 MiB and of 1 MiB of zeroes.
    assert!(
        said.contains("5647f05ec18958947d32874eeb788fa396a05d0bab7c1b71f112ceb7e9b31eee"),
        "{said}"
    );
    assert!(
        said.contains("30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58"),
        "{said}"
    );
    assert!(said.ends_with("fine"), "{said}");
}

/// Serves a disk to a guest until it is told that the guest is done, killing filter after filter when each has
/// answered some requests; returns how many.
fn serve_and_kill(image: &Image, socket: &Path, done: &AtomicBool) -> usize {
    let path = image.path();
    let disk = image.disk(&path);
    let mut killed = 0;
    while !done.load(Ordering::Acquire) {
        let Ok(vmm) = UnixStream::connect(socket) else {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        let filter = Successor::start(image.directory.path(), &disk, &vmm).unwrap();
        drop(vmm);
        // Not while QEMU takes it: QEMU before 9 does not come back then (docs/decisions/020).
        let enough = || filter.answered().is_some_and(|count| count > 300);
        while !enough() && !done.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(50));
        }
        filter.kill();
        killed += 1;
    }
    killed
}

#[test]
fn fio_verifies_what_it_writes_while_filter_after_filter_is_killed() {
    if !has_its_turn() {
        return;
    }
    let image = Image::new();
    let (socket, done) = (image.directory.path().join("vmm.sock"), AtomicBool::new(false));
    let script = "set -e
        fio --output-format=terse --name=v --filename=/dev/vda --size=48M --rw=randwrite \
            --bsrange=512-64k --blockalign=512 --ioengine=libaio --iodepth=32 --loops=2 \
            --direct=1 --verify=crc32c --verify_fatal=1 --randrepeat=0 >/tmp/fio || {
                cat /tmp/fio; dmesg | tail; exit 1; }
        echo fine";
    let (said, killed) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| serve_and_kill(&image, &socket, &done));
        let said = test_guest::run(script, &[GuestDisk::VhostUserServer(&socket)], None);
        done.store(true, Ordering::Release);
        (said.unwrap(), killer.join().unwrap())
    });
    assert!(said.ends_with("fine"), "{said}");
    println!("{killed} filters served one guest");
    assert!(killed > 3, "too few were killed: {killed}");
}
