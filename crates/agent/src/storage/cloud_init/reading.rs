//! Reads the documents back from the image of a disk for cloud-init: no more of FAT12 than such an image has, and within bounds,
//! whatever is in it.

use vmseal_api::cloud_init::{CLOUD_INIT_MAX, Documents, SecretText};
use zeroize::{Zeroize, Zeroizing};

/// The length of an entry of a directory, in bytes.
const ENTRY: usize = 32;

/// The attributes of an entry that has a part of a long name.
const LONG_NAME: u8 = 0x0f;

/// The attributes of entries that are no files: labels of volumes, directories.
const NO_FILE: u8 = 0x18;

/// What the first byte of an entry says: there is no more, and that it was removed.
const LAST: u8 = 0;
const REMOVED: u8 = 0xe5;

/// In the first byte of a part of a long name: it is the name's last part, which comes first.
const LAST_PART: u8 = 0x40;

/// The longest of long names, in units of UTF-16.
const LONG_NAME_MAX: usize = 255;

/// Where the parts of an entry are in which a part of a long name is, in UTF-16.
const NAME_PARTS: [std::ops::Range<usize>; 3] = [1..11, 14..26, 28..ENTRY];

/// The number of the first cluster.
const FIRST_CLUSTER: usize = 2;

/// What is wrong with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreadable {
    /// It is something else.
    #[error("it has no such file system")]
    NoFileSystem,
    /// It has no file of this name.
    #[error("it has no {0}")]
    Lacks(&'static str),
    /// That file is longer than it may be, its clusters are not there, or it is no text.
    #[error("its {0} is damaged")]
    Damaged(&'static str),
}

/// The documents in an image.
pub(super) fn documents(image: &[u8]) -> Result<Documents, Unreadable> {
    let volume = Volume::of(image).ok_or(Unreadable::NoFileSystem)?;
    let text = |name| match volume.find(name) {
        Some(file) => volume.read(&file).ok_or(Unreadable::Damaged(name)).map(Some),
        None => Ok(None),
    };
    let needed = |name| text(name)?.ok_or(Unreadable::Lacks(name));
    let (user_data, meta_data) = (needed("user-data")?, needed("meta-data")?);
    Ok(Documents { user_data, meta_data, network_config: text("network-config")? })
}

/// An image, and where its parts are, in bytes.
struct Volume<'a> {
    image: &'a [u8],
    table: usize,
    root: usize,
    data: usize,
    cluster: usize,
}

/// Where the text of a file begins, and how long it is, in bytes.
struct File {
    cluster: usize,
    length: usize,
}

impl<'a> Volume<'a> {
    fn of(image: &'a [u8]) -> Option<Self> {
        let number = |at| number_at(image, at);
        let sector = number(11)?;
        if sector == 0 || image.get(510..512)? != b"\x55\xaa" {
            return None;
        }
        let cluster = sector * usize::from(*image.get(13)?);
        let table = sector * number(14)?;
        let root = table + usize::from(*image.get(16)?) * number(22)? * sector;
        let data = root + (ENTRY * number(17)?).next_multiple_of(sector);
        let is_whole = cluster > 0 && data <= image.len();
        is_whole.then_some(Self { image, table, root, data, cluster })
    }

    /// A file of the root directory, by its long name, which vmseal always writes.
    fn find(&self, name: &str) -> Option<File> {
        let mut long: Vec<u16> = Vec::new();
        for entry in self.image.get(self.root..self.data)?.chunks_exact(ENTRY) {
            let (first, attributes) = (entry[0], entry[11]);
            match (first, attributes) {
                (LAST, _) => return None,
                (REMOVED, _) => long.clear(),
                (_, LONG_NAME) => {
                    if first & LAST_PART != 0 || long.len() > LONG_NAME_MAX {
                        long.clear();
                    }
                    drop(long.splice(..0, part_of_name(entry)));
                }
                _ if attributes & NO_FILE == 0 && name.encode_utf16().eq(long.iter().copied()) => {
                    let length = u32::from_le_bytes([entry[28], entry[29], entry[30], entry[31]]);
                    let length = usize::try_from(length).ok()?;
                    return Some(File { cluster: number_at(entry, 26)?, length });
                }
                _ => long.clear(),
            }
        }
        None
    }

    /// The text of a file.
    fn read(&self, file: &File) -> Option<SecretText> {
        if file.length > CLOUD_INIT_MAX {
            return None;
        }
        // At once as long as it gets: no copy is left behind by growing.
        let mut text = Zeroizing::new(Vec::with_capacity(file.length));
        let mut cluster = file.cluster;
        while text.len() < file.length {
            let at = self.data + cluster.checked_sub(FIRST_CLUSTER)? * self.cluster;
            let left = (file.length - text.len()).min(self.cluster);
            text.extend_from_slice(self.image.get(at..at + left)?);
            if text.len() < file.length {
                cluster = self.behind(cluster)?;
            }
        }
        match String::from_utf8(std::mem::take(&mut *text)) {
            Ok(text) => Some(text.into()),
            Err(error) => {
                error.into_bytes().zeroize();
                None
            }
        }
    }

    /// The cluster behind another one: the table has 12 bits for each.
    fn behind(&self, cluster: usize) -> Option<usize> {
        let two = number_at(self.image, self.table + cluster + cluster / 2)?;
        Some(if cluster.is_multiple_of(2) { two & 0xfff } else { two >> 4 })
    }
}

/// A number of 16 bits.
fn number_at(bytes: &[u8], at: usize) -> Option<usize> {
    let number = bytes.get(at..)?.first_chunk::<2>()?;
    Some(usize::from(u16::from_le_bytes(*number)))
}

/// The part of a long name that an entry has.
fn part_of_name(entry: &[u8]) -> Vec<u16> {
    let units = NAME_PARTS.into_iter().flat_map(move |part| entry[part].chunks_exact(2));
    let units = units.map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
    units.take_while(|unit| *unit != 0).collect()
}

#[cfg(test)]
mod tests {
    use vmseal_api::cloud_init::CLOUD_INIT_DISK_SIZE;

    use super::super::write;
    use super::*;

    fn image(of: &Documents) -> Vec<u8> {
        let mut image = vec![0; CLOUD_INIT_DISK_SIZE as usize];
        write(&mut image, of).unwrap();
        image
    }

    fn told(user_data: String, network: Option<&str>) -> Documents {
        Documents {
            user_data: user_data.into(),
            meta_data: "instance-id: i\n".to_owned().into(),
            network_config: network.map(|text| text.to_owned().into()),
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let long: String = ('a'..='z').cycle().take(CLOUD_INIT_MAX - 15).collect();
        for documents in [
            told(String::new(), None),
            told("#cloud-config\nü\n".to_owned(), Some("version: 2\n")),
            told(long, None),
            told("x".repeat(512), Some("")),
        ] {
            assert_eq!(super::documents(&image(&documents)), Ok(documents));
        }
    }

    #[test]
    fn what_is_no_image_is_not_read_and_nothing_panics() {
        assert_eq!(documents(&[]), Err(Unreadable::NoFileSystem));
        assert_eq!(documents(&vec![0; 1 << 20]), Err(Unreadable::NoFileSystem));
        assert_eq!(documents(&vec![0xff; 1 << 20]), Err(Unreadable::NoFileSystem));
        let whole = image(&told("x".repeat(2000), Some("version: 2\n")));
        for length in [1, 511, 512, 5000, 20_000] {
            assert!(documents(&whole[..length]).is_err(), "{length} bytes");
        }
        let mut empty = vec![0; 1 << 20];
        let options = fatfs::FormatVolumeOptions::new().fat_type(fatfs::FatType::Fat12);
        fatfs::format_volume(std::io::Cursor::new(&mut empty[..]), options).unwrap();
        assert_eq!(documents(&empty), Err(Unreadable::Lacks("user-data")));

        // The boot sector, the tables and the directory, with each byte wrong.
        let mut wrong = whole.clone();
        let until = Volume::of(&whole).unwrap().data;
        for at in 0..until {
            for byte in [0, 1, 0x7f, 0xff] {
                wrong[at] = byte;
                drop(documents(&wrong));
            }
            wrong[at] = whole[at];
        }
        // A file whose clusters go round in a circle ends.
        let volume = Volume::of(&whole).unwrap();
        let file = volume.find("user-data").unwrap();
        let at = volume.table + file.cluster + file.cluster / 2;
        wrong[at] = u8::try_from(file.cluster).unwrap();
        wrong[at + 1] &= 0xf0;
        assert!(documents(&wrong).is_ok());
    }
}
