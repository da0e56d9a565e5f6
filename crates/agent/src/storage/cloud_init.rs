//! The disk that cloud-init in a guest reads (data source NoCloud): a small FAT file system, labelled `cidata`, with
//! the documents as files. It is made in locked memory, and imported into its disk as any other image. That of a clone is made of
//! the documents of the other VM's disk ([`copied`]).

mod copying;
mod reading;

use std::io::{self, Cursor, Write};

use fatfs::{FatType, FileSystem, FormatVolumeOptions, FsOptions};
use vmseal_api::cloud_init::Documents;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{LockedFile, SecretBytes};

pub use self::copying::copied;
use crate::storage::image::Image;

/// By which cloud-init finds it, filled up as FAT has labels.
const LABEL: [u8; 11] = *b"cidata     ";

/// FAT's serial number of the volume; nothing depends on it.
const VOLUME_ID: u32 = 0x766d_7365;

/// The image of a disk of this size, in bytes, with these packed documents. Blocks.
///
/// # Errors
/// `invalid-request` for what is no documents; `no-space` where they do not fit.
pub fn image(packed: &SecretBytes, size: u64) -> Result<Image, Problem> {
    let documents = Documents::unpacked(packed.expose())
        .map_err(|error| Problem::invalid("cloud_init", error.to_string()))?;
    image_of(&documents, size)
}

fn image_of(documents: &Documents, size: u64) -> Result<Image, Problem> {
    let failed = |error: String| {
        Problem::new(
            ErrorCode::Internal,
            format!("the disk for cloud-init cannot be made: {error}"),
        )
    };
    let length = usize::try_from(size).map_err(|error| failed(error.to_string()))?;
    let mut memory = LockedFile::zeroed(length).map_err(|error| failed(error.to_string()))?;
    write(memory.expose_mut(), documents).map_err(|error| failed(error.to_string()))?;
    Image::in_memory(memory, "the disk for cloud-init")
}

fn write(disk: &mut [u8], documents: &Documents) -> io::Result<()> {
    let options = FormatVolumeOptions::new()
        .volume_label(LABEL)
        .volume_id(VOLUME_ID)
        .fat_type(FatType::Fat12);
    fatfs::format_volume(Cursor::new(&mut *disk), options)?;
    let volume = FileSystem::new(Cursor::new(disk), FsOptions::new())?;
    for (name, text) in documents.files() {
        let mut file = volume.root_dir().create_file(name)?;
        file.write_all(text.as_bytes())?;
        file.flush()?;
    }
    volume.unmount()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Command;

    use vmseal_api::cloud_init::{CLOUD_INIT_DISK_SIZE, CLOUD_INIT_MAX};

    use super::*;

    fn packed(documents: &Documents) -> SecretBytes {
        SecretBytes::from_wiped(&mut documents.packed()).unwrap()
    }

    fn documents(user_data: String) -> Documents {
        Documents {
            user_data: user_data.into(),
            meta_data: "instance-id: i\n".to_owned().into(),
            network_config: None,
        }
    }

    fn bytes(image: &Image) -> Vec<u8> {
        let mut content = Vec::new();
        image.file.try_clone().unwrap().read_to_end(&mut content).unwrap();
        content
    }

    #[test]
    fn the_documents_are_read_back_from_the_image() {
        let longest = documents("x".repeat(CLOUD_INIT_MAX - 15));
        let mut three = documents("#cloud-config\n".to_owned());
        three.network_config = Some("version: 2\n".to_owned().into());
        for documents in [documents(String::new()), three, longest] {
            let image = image(&packed(&documents), CLOUD_INIT_DISK_SIZE).unwrap();
            image.check_unchanged().unwrap();
            let content = bytes(&image);
            assert_eq!(content.len() as u64, CLOUD_INIT_DISK_SIZE);
            let volume = FileSystem::new(Cursor::new(content), FsOptions::new()).unwrap();
            assert_eq!(volume.volume_label().trim_end(), "cidata");
            let mut found = Vec::new();
            for entry in volume.root_dir().iter().map(Result::unwrap).filter(|it| it.is_file()) {
                let mut text = String::new();
                entry.to_file().read_to_string(&mut text).unwrap();
                found.push((entry.file_name(), text));
            }
            let expected: Vec<_> =
                documents.files().map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn other_programs_know_the_image_by_its_label() {
        let image =
            image(&packed(&documents("#!/bin/sh\n".to_owned())), CLOUD_INIT_DISK_SIZE).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes(&image)).unwrap();
        let mut blkid = Command::new("/usr/sbin/blkid");
        let said = blkid.args(["-p", "-o", "export"]).arg(file.path()).output().unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("\nTYPE=vfat\n") && said.contains("\nLABEL=cidata\n"), "{said}");
    }

    #[test]
    fn what_are_no_documents_makes_no_image() {
        let damaged = SecretBytes::from_wiped(&mut [1, 2, 3]).unwrap();
        let problem = image(&damaged, CLOUD_INIT_DISK_SIZE).unwrap_err();
        assert_eq!(problem.code, ErrorCode::InvalidRequest);
    }
}
