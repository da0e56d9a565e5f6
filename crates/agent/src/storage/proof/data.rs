//! Reads the data of a file, sector by sector, and compares each with what it decrypts to.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use vmseal_api::proof::{FINDINGS_MAX, Finding, ProvenData, REGIONS};
use vmseal_qcow2::{Clusters, Content, Refusal, examine_disk};
use vmseal_secret::SecretBytes;
use vmseal_secret::xts::{Direction, Xts};
use zeroize::Zeroizing;

use super::sample::{allocated, bytes, choose};
use super::statistics::{BYTES_MIN, Counts, SECTOR, is_random};

/// How much is read at once, in bytes.
const READ_BYTES: usize = 256 * 1024;

/// How often a sector that is not as ciphertext is read again: a filter that serves the guest may be writing it.
const READ_AGAIN: u32 = 3;

/// The pause before that.
const PAUSE: Duration = Duration::from_millis(30);

/// What decides which parts are read, and follows how far that is.
pub struct Reading<'a> {
    /// Whether all is read.
    pub all: bool,
    /// The seed of the sample.
    pub seed: u64,
    /// Is told how many more bytes are read.
    pub progress: &'a mut dyn FnMut(u64),
    /// Whether to stop.
    pub cancelled: &'a dyn Fn() -> bool,
}

/// How the bytes of a file belong to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The disk's first byte is at this offset of the file, and the rest follows.
    Flat(u64),
    /// A layer: an image of QEMU's format over an image whose first byte of the disk is at this offset.
    Layer(u64),
    /// It belongs to no disk; it is examined from this offset on.
    Alone(u64),
}

/// Why a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file system.
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The tables of a layer.
    #[error("its tables cannot be used: {0}")]
    Layer(#[from] Refusal),
    /// The cipher.
    #[error("it cannot be decrypted: {0}")]
    Cipher(#[from] vmseal_secret::xts::XtsError),
    /// The caller does not want it any more.
    #[error("it was cancelled")]
    Cancelled,
}

/// What a sector is.
enum Sector {
    /// No data.
    Table,
    Hole,
    Opened(u32),
    Undecided(u32),
    Clear(Finding),
    Equal(Finding),
}

struct Data<'a> {
    file: &'a File,
    form: Form,
    clusters: Option<Clusters>,
    decrypt: Option<Xts>,
    /// A decrypted sector.
    opened: Box<Zeroizing<[u8; SECTOR]>>,
}

/// Examines the data of a file. `dek` is the key of its disk, where that is encrypted.
///
/// # Errors
/// [`DataError`].
pub fn examine(
    file: &File,
    form: Form,
    dek: Option<&SecretBytes>,
    reading: &mut Reading<'_>,
) -> Result<ProvenData, DataError> {
    let decrypt = dek.map(|key| Xts::new(key.expose(), Direction::Decrypt)).transpose()?;
    let opened = Box::new(Zeroizing::new([0; SECTOR]));
    let mut data = Data { file, form, clusters: None, decrypt, opened };
    data.read_tables()?;
    let length = file.metadata()?.len();
    let first = match form {
        Form::Flat(offset) | Form::Alone(offset) => offset,
        Form::Layer(_) => 0,
    };
    let ranges = allocated(file, first)?;
    let mut report = ProvenData { allocated: bytes(&ranges), ..ProvenData::default() };
    let mut regions = vec![Counts::default(); REGIONS];
    let region_length = (length.saturating_sub(first)).div_ceil(REGIONS as u64).max(1);
    let mut buffer = vec![0; READ_BYTES];
    for range in choose(ranges, reading.all, reading.seed) {
        let mut at = range.start;
        while at < range.end {
            if (reading.cancelled)() {
                return Err(DataError::Cancelled);
            }
            let wanted = (range.end - at).min(READ_BYTES as u64) as usize;
            let read = read_at(file, &mut buffer[..wanted], at)?;
            if read == 0 {
                break;
            }
            for (index, sector) in buffer[..read].chunks(SECTOR).enumerate() {
                let offset = at + (index * SECTOR) as u64;
                let region = &mut regions[((offset - first) / region_length) as usize % REGIONS];
                data.count(&mut report, region, offset, sector)?;
            }
            report.read += read as u64;
            (reading.progress)(read as u64);
            at += read as u64;
        }
    }
    report.entropy = regions.iter().map(Counts::entropy).collect();
    report.entropy_min = report.entropy.iter().flatten().min().copied();
    Ok(report)
}

impl Data<'_> {
    fn read_tables(&mut self) -> Result<(), DataError> {
        if let Form::Layer(_) = self.form {
            let layout = examine_disk(self.file, true, false)?;
            let length = self.file.metadata()?.len();
            self.clusters = Some(Clusters::of(self.file, &layout, length)?);
        }
        Ok(())
    }

    /// The offset on the disk, in bytes, of what is at an offset of the file; an error for tables, which hold nothing of it.
    fn place(&self, offset: u64) -> Result<Option<u64>, ()> {
        match (self.form, &self.clusters) {
            (Form::Flat(first), _) => Ok(offset.checked_sub(first)),
            (Form::Layer(first), Some(clusters)) => match clusters.at(offset) {
                Content::Table => Err(()),
                Content::Data(at) => Ok(at.checked_sub(first)),
                Content::Unused => Ok(None),
            },
            (Form::Alone(_) | Form::Layer(_), _) => Ok(None),
        }
    }

    fn look(&mut self, offset: u64, bytes: &[u8]) -> Result<Sector, DataError> {
        let Ok(place) = self.place(offset) else { return Ok(Sector::Table) };
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(Sector::Hole);
        }
        let chi_square = Counts::of(bytes).chi_square();
        let finding = || Finding { offset, sector: place.map(|at| at / SECTOR as u64), chi_square };
        // The file's last bytes may be too few to tell.
        if bytes.len() >= BYTES_MIN && !is_random(chi_square) {
            return Ok(Sector::Clear(finding()));
        }
        let (Some(cipher), Some(at), Ok(sealed)) =
            (&mut self.decrypt, place, <&[u8; SECTOR]>::try_from(bytes))
        else {
            return Ok(Sector::Undecided(chi_square));
        };
        cipher.one(at, sealed, &mut self.opened)?;
        if sealed == &**self.opened {
            return Ok(Sector::Equal(finding()));
        }
        let plain = Counts::of(&**self.opened).chi_square();
        Ok(if is_random(plain) {
            Sector::Undecided(chi_square)
        } else {
            Sector::Opened(chi_square)
        })
    }

    /// The same; a finding is believed when it is still there.
    fn look_well(&mut self, offset: u64, bytes: &[u8]) -> Result<Sector, DataError> {
        let mut found = self.look(offset, bytes)?;
        for _ in 0..READ_AGAIN {
            if !matches!(found, Sector::Clear(_) | Sector::Equal(_)) {
                break;
            }
            std::thread::sleep(PAUSE);
            self.read_tables()?;
            let mut again = vec![0; bytes.len()];
            let read = read_at(self.file, &mut again, offset)?;
            found = self.look(offset, &again[..read])?;
        }
        Ok(found)
    }

    fn count(
        &mut self,
        report: &mut ProvenData,
        region: &mut Counts,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), DataError> {
        // When so many were found that no more are named, more of them are only counted.
        let many = report.findings.len() >= FINDINGS_MAX;
        let sector = if many { self.look(offset, bytes)? } else { self.look_well(offset, bytes)? };
        if matches!(sector, Sector::Table) {
            return Ok(());
        }
        report.sectors += 1;
        let distance = |chi_square: u32| chi_square.abs_diff(255);
        match sector {
            Sector::Table => {}
            Sector::Hole => {
                report.holes += 1;
                return Ok(());
            }
            Sector::Opened(chi_square) | Sector::Undecided(chi_square) => {
                match sector {
                    Sector::Opened(_) => report.opened += 1,
                    _ => report.undecided += 1,
                }
                let known = report.chi_square_extreme.unwrap_or(255);
                if bytes.len() == SECTOR && distance(chi_square) >= distance(known) {
                    report.chi_square_extreme = Some(chi_square);
                }
            }
            Sector::Clear(finding) => {
                report.clear += 1;
                report.findings.extend((!many).then_some(finding));
            }
            Sector::Equal(finding) => {
                report.equal += 1;
                report.findings.extend((!many).then_some(finding));
            }
        }
        region.add(&Counts::of(bytes));
        Ok(())
    }
}

/// Reads as many bytes as there are.
fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests;
