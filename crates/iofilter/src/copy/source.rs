//! An image that a disk is filled from: its extents and its bytes, in any format.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, Mapping};
use nix::unistd::{Whence, lseek};
use vmseal_api::transfer::ImageFormat;
use vmseal_qcow2::Refusal;

use crate::storage::extent::{Extent, raw_extent};

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It is not a valid image.
    #[error("the image cannot be imported: {0}")]
    Refused(#[from] Refusal),
    /// It cannot be read.
    #[error("the image cannot be read: {0}")]
    Read(#[from] io::Error),
    /// A part of it is missing.
    #[error(
        "the image is truncated: the data for byte {0} of its disk is beyond the end of the file"
    )]
    Truncated(u64),
    /// It was truncated.
    #[error("the image became shorter while it was read")]
    Shrunk,
}

/// An image, open for reading.
pub enum Source {
    /// The disk's bytes.
    Raw {
        /// The file or device.
        file: File,
        /// Its length.
        size: u64,
    },
    /// QEMU's format, with the features that [`vmseal_qcow2`] allows.
    Qcow2 {
        /// The reader.
        image: Box<FormatAccess<imago::file::File>>,
        /// The length of the file.
        length: u64,
        /// The unit of allocation, in bytes.
        cluster: u64,
    },
}

impl Source {
    /// Opens an image of this format.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn open(file: File, format: ImageFormat) -> Result<Self, SourceError> {
        match format {
            ImageFormat::Raw => {
                // Works for a block device, too.
                let size =
                    u64::try_from(lseek(&file, 0, Whence::SeekEnd).map_err(io::Error::from)?);
                Ok(Self::Raw { file, size: size.unwrap_or(0) })
            }
            ImageFormat::Qcow2 => {
                let cluster = vmseal_qcow2::examine(&file)?.cluster_size;
                let length = file.metadata()?.len();
                let storage = imago::file::File::try_from(file)?;
                let image = Qcow2::<imago::file::File>::builder(storage)
                    .backing(None)
                    .write(false)
                    // Nothing that an image names is opened.
                    .open(DenyImplicitOpenGate::default())?;
                Ok(Self::Qcow2 { image: Box::new(FormatAccess::new(image)), length, cluster })
            }
        }
    }

    /// The size of the disk that it holds, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self {
            Self::Raw { size, .. } => *size,
            Self::Qcow2 { image, .. } => image.size(),
        }
    }

    /// The extent at `at`, which is below [`Self::size`].
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn extent(&self, at: u64) -> Result<Extent, SourceError> {
        let size = self.size();
        match self {
            Self::Raw { file, .. } => raw_extent(file, at, size).map_err(read_error),
            Self::Qcow2 { image, length, cluster } => {
                let (mapping, len) = image.get_mapping(at, size - at)?;
                let data = match mapping {
                    Mapping::Zero { .. } => false,
                    // A part beyond the end would read as zeroes. Only the tail of the file's last
                    // cluster may be missing: writers leave it out.
                    Mapping::Raw { offset, .. }
                        if offset.saturating_add(len.max(1) - 1) / cluster * cluster >= *length =>
                    {
                        return Err(SourceError::Truncated(at));
                    }
                    _ => true,
                };
                // An empty extent would be read for ever.
                let end = at.saturating_add(len.max(1)).min(size);
                Ok(Extent { data, end })
            }
        }
    }

    /// Fills the buffer from `at` on; all of it is below [`Self::size`].
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn read(&self, buffer: &mut [u8], at: u64) -> Result<(), SourceError> {
        match self {
            Self::Raw { file, .. } => file.read_exact_at(buffer, at).map_err(read_error),
            Self::Qcow2 { image, .. } => Ok(image.read(buffer, at)?),
        }
    }
}

/// The file had all of its bytes when it was opened.
fn read_error(error: io::Error) -> SourceError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => SourceError::Shrunk,
        _ => SourceError::Read(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    fn qemu_img(arguments: &[&str], at: &Path) {
        let ran = Command::new("qemu-img").args(arguments).current_dir(at).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }

    fn read(source: &Source) -> (Vec<u8>, u64) {
        let (mut bytes, mut data) = (vec![0; source.size() as usize], 0);
        let mut at = 0;
        while at < source.size() {
            let extent = source.extent(at).unwrap();
            assert!(extent.end > at);
            if extent.data {
                data += extent.end - at;
                source.read(&mut bytes[at as usize..extent.end as usize], at).unwrap();
            }
            at = extent.end;
        }
        (bytes, data)
    }

    #[test]
    fn both_formats_give_the_same_bytes_and_know_what_is_zero() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let file = File::create(path.join("raw")).unwrap();
        file.set_len(8 << 20).unwrap();
        let mut noise: u32 = 1;
        let part: Vec<u8> = std::iter::repeat_with(|| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 24) as u8
        })
        .take(200_000)
        .collect();
        file.write_all_at(&part, 3 << 20).unwrap();
        file.write_all_at(&[7; 100_000], 6 << 20).unwrap();
        let raw = |name: &str| File::open(path.join(name)).unwrap();
        let (bytes, data) = read(&Source::open(raw("raw"), ImageFormat::Raw).unwrap());
        assert!((300_000..400_000).contains(&data), "{data}");
        for options in [
            &["-O", "qcow2"][..],
            &["-c", "-O", "qcow2"],
            &["-O", "qcow2", "-o", "compat=0.10,cluster_size=4096"],
        ] {
            let arguments = [&["convert", "-f", "raw"], options, &["raw", "image"]].concat();
            qemu_img(&arguments, path);
            let source = Source::open(raw("image"), ImageFormat::Qcow2).unwrap();
            let (same, data) = read(&source);
            assert!(same == bytes, "{options:?}: other bytes");
            assert!((300_000..500_000).contains(&data), "{options:?}: {data}");
        }
    }

    #[test]
    fn a_hole_ends_with_its_file_and_a_truncated_part_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 65536], 0).unwrap();
        file.set_len(1 << 20).unwrap();
        let hole = raw_extent(&file, 65536, 1 << 20).unwrap();
        assert_eq!(hole, Extent { data: false, end: 1 << 20 });
        // The disk should be longer than the file.
        let part = raw_extent(&file, 65536, 2 << 20).unwrap();
        assert_eq!(part, Extent { data: false, end: 1 << 20 }, "what is missing is called a hole");
        for (at, length) in [(1 << 20, 1 << 20), (65536, 65536), (65536, 4096)] {
            file.set_len(length).unwrap();
            let error = raw_extent(&file, at, 2 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
            assert!(error.to_string().contains(&format!("ends at byte {length} ")), "{error}");
        }
        let source = Source::Raw { file, size: 2 << 20 };
        assert!(matches!(source.extent(65536), Err(SourceError::Shrunk)));
    }

    #[test]
    fn a_cut_or_scrambled_image_is_an_error_and_never_silent_zeroes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::write(path.join("raw"), vec![0x5a; 4 << 20]).unwrap();
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "image"], path);
        let length = path.join("image").metadata().unwrap().len();
        let file = File::options().read(true).write(true).open(path.join("image")).unwrap();
        file.set_len(length - (1 << 20)).unwrap();
        let source = Source::open(file, ImageFormat::Qcow2).unwrap();
        let mut found = Ok(());
        let mut at = 0;
        while at < source.size() && found.is_ok() {
            found = source.extent(at).map(|extent| at = extent.end);
        }
        assert!(matches!(found, Err(SourceError::Truncated(_))), "{found:?}");
        let raw = File::open(path.join("raw")).unwrap();
        assert!(matches!(Source::open(raw, ImageFormat::Qcow2), Err(SourceError::Refused(_))));
    }
}
