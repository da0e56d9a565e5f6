//! Writing a layer down to the next image below, or to a copy of its own.
//!
//! ```text
//!  layer ─ what it has itself ─► read through the layer ─► written to the target
//!        ─ zeroes it has set  ─────────────────────────► write-zeroes there
//!        ─ the rest           ─────────────────────────► not touched
//! ```
//! A read through the layer returns the same bytes at any time: the merge writes to the image below only where the layer
//! hides it. So the merge may be stopped and repeated, and other processes may read meanwhile. A copy has below it what is
//! below the layer, under another key or none; it is as sparse as the layer. The lowest image of all is copied in the same
//! way: what it does not have is zero.

use std::convert::identity;
use std::io;

use vmseal_api::filter::DiskActivity;

use crate::copy::engine::{Engine, Source};
use crate::copy::to_chain::{ToChain, Zeroes};
use crate::disk::allocation::Allocation;
use crate::disk::status::DiskState;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::request::IoError;
use crate::stack::stop::Stop;
use crate::storage::extent::{Own, OwnExtent};
use crate::storage::own::LayerParts;

/// Why a layer could not be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// Its tables.
    #[error("the layer's tables cannot be read: {0}")]
    Tables(#[from] io::Error),
    /// Its data.
    #[error("the layer cannot be read: {0}")]
    Read(#[source] IoError),
    /// The image below, or the copy.
    #[error("the image that it is written to cannot be written: {0}")]
    Write(#[source] IoError),
    /// Asked to stop.
    #[error("the merge was stopped")]
    Stopped,
}

/// Where an image has something itself.
pub enum Parts {
    /// A layer.
    Layer(LayerParts),
    /// The lowest image.
    Flat(Allocation),
}

impl Parts {
    fn at(&self, at: u64, end: u64) -> io::Result<OwnExtent> {
        match self {
            Self::Layer(parts) => parts.at(at, end),
            Self::Flat(allocation) => {
                let found = allocation.extent(at, end)?;
                let content = if found.data { Own::Data } else { Own::Nothing };
                Ok(OwnExtent { content, end: found.end })
            }
        }
    }
}

/// A layer, and the image that it is written to.
pub struct Merge {
    /// Where the layer has something itself.
    pub parts: Parts,
    /// The image that is written.
    pub target: Chain,
}

impl Merge {
    /// Writes all that the layer has itself to the target, and flushes that. `layer` reads through the layer.
    ///
    /// # Errors
    /// [`MergeError`]; it can be done again.
    pub fn run(
        &mut self,
        layer: &mut Chain,
        state: &DiskState,
        stop: &Stop,
    ) -> Result<(), MergeError> {
        let total = layer.size();
        let mut own = OwnParts { parts: &self.parts, layer };
        let mut target = ToChain::new(&mut self.target, Zeroes::Unmap);
        let engine = Engine { range: 0..total, pace: &mut state.paced(), stop, flushes: None };
        let merged = engine.run(&mut own, &mut target, &mut |progress| {
            state.set(DiskActivity::Merging { done: progress.done, total });
        });
        merged.map_err(|error| error.told(MergeError::Stopped, identity, MergeError::Write))
    }
}

/// What a layer has itself.
struct OwnParts<'a> {
    parts: &'a Parts,
    /// Reads through the layer.
    layer: &'a mut Chain,
}

impl Source for OwnParts<'_> {
    type Error = MergeError;

    fn part(&mut self, at: u64, end: u64) -> Result<OwnExtent, MergeError> {
        Ok(self.parts.at(at, end)?)
    }

    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<(), MergeError> {
        blocking::read_in_parts(self.layer, bytes, at).map_err(MergeError::Read)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::process::Command;
    use std::sync::Arc;

    use vmseal_api::filter::{Direct, Holes};
    use vmseal_api::id::DiskId;
    use vmseal_api::transfer::ImageFormat;
    use vmseal_secret::{DEK_LEN, SecretBytes};

    use super::*;
    use crate::disk::{Disk, DiskStorage, Encryption};
    use crate::stack::request::Operation;
    use crate::storage::file::FileDisk;
    use crate::storage::qcow2::Qcow2Disk;

    const SIZE: u64 = 8 << 20;
    const CHUNK: u64 = 1 << 20;

    fn open(at: &Path, write: bool) -> OwnedFd {
        File::options().read(true).write(write).open(at).unwrap().into()
    }

    fn qemu_io(commands: &[&str], image: &Path) {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let ran = Command::new("qemu-io").args(["-f", "qcow2"]).args(commands).arg(image).output();
        let said = String::from_utf8_lossy(&ran.unwrap().stdout).into_owned();
        assert!(!said.contains("fail"), "{said}");
    }

    fn layer(at: &Path, below: &str, format: &str) {
        let below = vmseal_qcow2::Below { name: below, format };
        vmseal_qcow2::create_overlay(File::create(at).unwrap(), SIZE, below).unwrap();
    }

    fn content(image: &Path, format: &str) -> Vec<u8> {
        let raw = image.with_extension("content");
        let ran = Command::new("qemu-img")
            .args(["convert", "-f", format, "-O", "raw"])
            .args([image, &raw])
            .status();
        assert!(ran.unwrap().success());
        std::fs::read(raw).unwrap()
    }

    fn merge(upper: (OwnedFd, Vec<(OwnedFd, ImageFormat)>), target: DiskStorage) {
        let upper = Qcow2Disk::open(upper.0, upper.1, 0, SIZE, true).unwrap();
        let extents = upper.extents().unwrap();
        let target = Disk::new(SIZE, false, None, target, 2).chain().unwrap();
        let mut layer = Disk::new(SIZE, true, None, DiskStorage::Qcow2(upper), 2).chain().unwrap();
        let state = Arc::new(DiskState::new(DiskId::new(), 1));
        let stop = Stop::new().unwrap();
        let parts = Parts::Layer(LayerParts::new(extents, true));
        Merge { parts, target }.run(&mut layer, &state, &stop).unwrap();
    }

    #[test]
    fn what_a_layer_has_itself_is_below_afterwards_and_nothing_else_changes() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("base"), vec![1; SIZE as usize]).unwrap();
        layer(&at("one"), "base", "raw");
        layer(&at("two"), "one", "qcow2");
        qemu_io(&["write -P 2 1M 256k", "write -z 3M 128k", "write -P 3 4096 4096"], &at("one"));
        qemu_io(
            &["write -P 4 1088k 64k", "write -P 5 5M 4k", "write -z 6M 1M", "discard 3M 64k"],
            &at("two"),
        );
        let (lower, expected) = (content(&at("one"), "qcow2"), content(&at("two"), "qcow2"));
        assert!(lower != expected);

        // Down to another layer; twice, as after a crash.
        for _ in 0..2 {
            let one = (open(&at("one"), false), ImageFormat::Qcow2);
            let base = (open(&at("base"), false), ImageFormat::Raw);
            let target = vec![(open(&at("base"), false), ImageFormat::Raw)];
            let target = Qcow2Disk::open(open(&at("one"), true), target, 0, SIZE, false).unwrap();
            merge((open(&at("two"), false), vec![one, base]), DiskStorage::Qcow2(target));
            assert!(content(&at("two"), "qcow2") == expected, "the layer reads otherwise");
            assert!(content(&at("one"), "qcow2") == expected, "it is not merged");
        }
        assert!(std::fs::read(at("base")).unwrap().iter().all(|byte| *byte == 1));
        let check = Command::new("qemu-img").args(["check", "-q"]).arg(at("one")).status();
        assert!(check.unwrap().success());

        // Down to the image.
        let base = (open(&at("base"), false), ImageFormat::Raw);
        let target = FileDisk::open(open(&at("base"), true), 0, SIZE, Direct::Off, false).unwrap();
        merge((open(&at("one"), false), vec![base]), DiskStorage::File(target));
        assert!(std::fs::read(at("base")).unwrap() == expected);
    }

    const KIB: u64 = 1024;

    /// A disk of files in a directory: an image, or a layer above it.
    struct Stored<'a> {
        at: &'a Path,
        image: &'a str,
        layer: Option<&'a str>,
        key: &'a SecretBytes,
    }

    impl Stored<'_> {
        fn disk(&self, write: bool) -> (Disk, Parts) {
            let key = self.key.try_clone().unwrap();
            let encryption = Encryption { key, holes: Holes::Zero };
            let path = |name: &str| self.at.join(name);
            let storage = match self.layer {
                None => {
                    let file = open(&path(self.image), write);
                    let opened = FileDisk::open(file, 0, SIZE, Direct::Off, !write);
                    DiskStorage::File(opened.unwrap())
                }
                Some(layer) => {
                    let below = vec![(open(&path(self.image), false), ImageFormat::Raw)];
                    let file = open(&path(layer), write);
                    DiskStorage::Qcow2(Qcow2Disk::open(file, below, 0, SIZE, !write).unwrap())
                }
            };
            let parts = match &storage {
                DiskStorage::Qcow2(image) => {
                    Parts::Layer(LayerParts::new(image.extents().unwrap(), true))
                }
                other => Parts::Flat(Allocation::of(other, true)),
            };
            (Disk::new(SIZE, !write, Some(encryption), storage, 2), parts)
        }

        fn write(&self, at: u64, length: u64, byte: u8) {
            let mut chain = self.disk(true).0.chain().unwrap();
            let mut bytes = vec![byte; length as usize];
            blocking::move_bytes(&mut chain, Operation::Write, &mut bytes, at).unwrap();
            blocking::flush(&mut chain).unwrap();
        }

        fn content(&self) -> Vec<u8> {
            let mut chain = self.disk(false).0.chain().unwrap();
            let mut bytes = vec![0; SIZE as usize];
            for (index, part) in bytes.chunks_mut(CHUNK as usize).enumerate() {
                let at = index as u64 * CHUNK;
                blocking::move_bytes(&mut chain, Operation::Read, part, at).unwrap();
            }
            bytes
        }

        fn has(&self) -> Vec<(u64, Own)> {
            let (_disk, parts) = self.disk(false);
            let (mut at, mut found) = (0, Vec::new());
            while at < SIZE {
                let extent = parts.at(at, SIZE).unwrap();
                found.push((extent.end, extent.content));
                at = extent.end;
            }
            found
        }

        fn copy_to(&self, target: &Stored<'_>) {
            let (disk, parts) = self.disk(false);
            let target = target.disk(true).0.chain().unwrap();
            let state = Arc::new(DiskState::new(DiskId::new(), 1));
            let stop = Stop::new().unwrap();
            Merge { parts, target }.run(&mut disk.chain().unwrap(), &state, &stop).unwrap();
        }
    }

    #[test]
    fn an_image_and_its_layer_are_copied_under_another_key_and_have_the_same_parts() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let [key, other] = std::array::from_fn(|_| SecretBytes::random(DEK_LEN).unwrap());
        for (image, upper) in [("image", "layer"), ("image2", "layer2")] {
            File::create(at.join(image)).unwrap().set_len(SIZE).unwrap();
            layer(&at.join(upper), image, "raw");
        }
        let stored = |image, layer, key| Stored { at, image, layer, key };
        let image = stored("image", None, &key);
        image.write(1024 * KIB, 512 * KIB, 1);
        let upper = stored("image", Some("layer"), &key);
        upper.write(1024 * KIB + 4096, 4096, 2);
        upper.write(5000 * KIB, 100 * KIB, 3);
        let mut chain = upper.disk(true).0.chain().unwrap();
        let id = chain.begin().unwrap();
        let zeroes = Operation::WriteZeroes { unmap: true };
        chain.submit(id, zeroes, 1280 * KIB, 128 * KIB, 0);
        blocking::drain(&mut chain).unwrap();
        blocking::flush(&mut chain).unwrap();
        drop(chain);

        let image2 = stored("image2", None, &other);
        let upper2 = stored("image2", Some("layer2"), &other);
        // Twice, as after a crash.
        for _ in 0..2 {
            image.copy_to(&image2);
            upper.copy_to(&upper2);
        }
        assert!(image2.content() == image.content(), "the image reads otherwise");
        assert!(upper2.content() == upper.content(), "the layer reads otherwise");
        assert_eq!(image2.has(), image.has());
        assert_eq!(upper2.has(), upper.has());
        assert!(upper.has().iter().any(|(_, own)| *own == Own::Zeroes));
        let [one, two] = ["image", "image2"].map(|name| std::fs::read(at.join(name)).unwrap());
        let written = 1 << 20..(1 << 20) + 4096;
        assert!(one[written.clone()] != two[written], "they have the same key");
    }
}
