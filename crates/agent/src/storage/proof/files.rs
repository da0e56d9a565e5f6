//! One file: its header, its data, its verdict.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use vmseal_api::host::{DiskFacts, KeyReference, VmSpec};
use vmseal_api::id::{DatastoreId, DiskId, ProviderId};
use vmseal_api::problem::Problem;
use vmseal_api::proof::{
    FileKind, ImageKind, ProvenData, ProvenFile, ProvenHeader, ProvenImage, Verdict,
};
use vmseal_luks::Facts;
use vmseal_seal::file::Header;
use vmseal_secret::SecretBytes;

use super::data::{DataError, Form, Reading, examine};
use super::{cancelled, open};
use crate::keys;
use crate::storage::facts::from_api;
use crate::storage::sealed::vm_key;

/// The part of a sealed file that may be its header, in bytes.
const SEALED_HEADER: u64 = 4096;

/// How much of a sealed file is read at a time, in bytes: a frame.
const SEALED_PART: usize = 64 * 1024;

/// What opens the data of a disk, and of the layers above its image.
pub struct DiskKey {
    header: Option<ProvenHeader>,
    offset: u64,
    dek: Option<SecretBytes>,
}

/// Examines the files of a VM.
pub struct Examiner<'a> {
    /// The VM.
    pub spec: &'a VmSpec,
    /// Its KEK.
    pub kek: Option<&'a SecretBytes>,
    /// How files are read.
    pub reading: Reading<'a>,
}

impl Examiner<'_> {
    /// Examines a file that holds data of a disk; none when it is gone. `below` is the key of the image that a layer is above
    /// of. Where the file is, the caller adds.
    ///
    /// # Errors
    /// `cancelled`.
    pub fn image(
        &mut self,
        path: &Path,
        (kind, disk, facts): (ImageKind, DiskId, Option<&DiskFacts>),
        below: Option<&DiskKey>,
    ) -> Result<Option<(ProvenImage, Option<DiskKey>)>, Problem> {
        let mut image = ProvenImage {
            datastore: DatastoreId(uuid::Uuid::nil()),
            path: String::new(),
            kind,
            disk,
            name: self.spec.disk(disk).map(|disk| disk.name.clone()),
            verdict: Verdict::NotProved,
            reason: None,
            header: None,
            data: ProvenData::default(),
        };
        let file = match open(path) {
            Ok(Some(file)) => file,
            Ok(None) => return Ok(None),
            Err(problem) => {
                image.reason = Some(problem.detail);
                return Ok(Some((image, None)));
            }
        };
        let own = match (kind, below) {
            (ImageKind::Layer, _) => None,
            _ => Some(self.header(&file, kind, disk, facts)),
        };
        let Some(key) = own.as_ref().or(below) else {
            image.reason = Some("the image that it is a layer of was not read".to_owned());
            return Ok(Some((image, None)));
        };
        image.header.clone_from(&key.header);
        let form = match kind {
            // The lowest of what a linked clone stands on is another VM's image, with the data key of this one.
            ImageKind::Layer if path.extension().is_some_and(|it| it == "base") => {
                Form::Flat(key.offset)
            }
            ImageKind::Layer => Form::Layer(key.offset),
            _ => Form::Flat(key.offset),
        };
        match examine(&file, form, key.dek.as_ref(), &mut self.reading) {
            Ok(data) => {
                image.data = data;
                (image.verdict, image.reason) = judged(&image);
            }
            Err(DataError::Cancelled) => return Err(cancelled()),
            Err(error) => image.reason = Some(error.to_string()),
        }
        Ok(Some((image, own)))
    }

    /// The header of an image.
    fn header(
        &self,
        file: &File,
        kind: ImageKind,
        disk: DiskId,
        facts: Option<&DiskFacts>,
    ) -> DiskKey {
        let spec = self.spec.disk(disk);
        let inspected = vmseal_luks::inspect(file);
        let pinned = match (kind, spec, facts) {
            // What a guest writes to a disk in the clear is not taken for a header.
            (ImageKind::Image, Some(spec), Some(facts)) => from_api(spec, facts),
            _ if inspected.is_err() => None,
            _ => Facts::new(disk.0, spec.map_or(u64::from(vmseal_luks::SECTOR_SIZE), |it| it.size))
                .ok(),
        };
        let Some(pinned) = pinned else { return DiskKey { header: None, offset: 0, dek: None } };
        let of = |token: vmseal_luks::KeyReference| KeyReference {
            provider: ProviderId(token.provider),
            key_id: token.key_id,
            check: token.check,
        };
        let (keys, unread) = match inspected {
            Ok((tokens, _)) => (tokens.into_iter().map(of).collect(), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let opened = match (unread, self.kek, &self.spec.key) {
            (Some(why), ..) => Err(why),
            (None, Some(kek), Some(reference)) => {
                vmseal_luks::open(file, &pinned, kek, &keys::context(self.spec.vm, reference))
                    .map_err(|error| error.to_string())
            }
            (None, ..) => Err("the VM's key is not on this host".to_owned()),
        };
        let header = ProvenHeader {
            authentic: opened.is_ok(),
            reason: opened.as_ref().err().cloned(),
            keys,
            cipher: pinned.cipher,
            key_bits: pinned.key_bits,
            sector_size: pinned.sector_size,
        };
        let (offset, dek) = (pinned.data_offset, opened.ok().map(|opened| opened.dek));
        DiskKey { header: Some(header), offset, dek }
    }

    /// Examines another file; none when it is gone. Where the file is, the caller adds.
    ///
    /// # Errors
    /// `cancelled`.
    pub fn other(&mut self, path: &Path, kind: FileKind) -> Result<Option<ProvenFile>, Problem> {
        let found = |verdict, reason: Option<&str>, data| ProvenFile {
            datastore: DatastoreId(uuid::Uuid::nil()),
            path: String::new(),
            kind,
            verdict,
            reason: reason.map(str::to_owned),
            opened: None,
            data,
        };
        let by_design = match kind {
            FileKind::Descriptor => Some("what the VM is, in the clear by design"),
            FileKind::Note => {
                Some("a note about files, in the clear by design; it holds nothing of the guest's")
            }
            FileKind::Tpm | FileKind::Sealed | FileKind::Unknown => None,
        };
        if by_design.is_some() {
            return Ok(Some(found(Verdict::Encrypted, by_design, None)));
        }
        let file = match open(path) {
            Ok(Some(file)) => file,
            Ok(None) => return Ok(None),
            Err(Problem { detail, .. }) => {
                return Ok(Some(found(Verdict::NotProved, Some(&detail), None)));
            }
        };
        if kind == FileKind::Sealed && has_its_key(&file) {
            let why = "its key is in its header, in the clear";
            return Ok(Some(found(Verdict::NotEncrypted, Some(why), None)));
        }
        let first = if kind == FileKind::Sealed { SEALED_HEADER } else { 0 };
        let data = match examine(&file, Form::Alone(first), None, &mut self.reading) {
            Ok(data) => data,
            Err(DataError::Cancelled) => return Err(cancelled()),
            Err(error) => {
                return Ok(Some(found(Verdict::NotProved, Some(&error.to_string()), None)));
            }
        };
        let opened = match kind {
            FileKind::Sealed => Some(self.open_sealed(&file)?),
            _ => None,
        };
        let clear = in_the_clear(&data);
        let (verdict, reason) = match (kind, clear) {
            (FileKind::Unknown, Some(_)) => (
                Verdict::NotProved,
                Some("it is not vmseal's, and is in the clear: look at what it is".to_owned()),
            ),
            (FileKind::Unknown, None) => {
                (Verdict::NotProved, Some("it is not vmseal's: look at what it is".to_owned()))
            }
            (_, Some(clear)) => (Verdict::NotEncrypted, Some(clear)),
            (_, None) => match &opened {
                Some(Err(why)) => {
                    (Verdict::NotProved, Some(format!("it does not open with the VM's key: {why}")))
                }
                _ => (Verdict::Encrypted, None),
            },
        };
        let opened = opened.map(|opened| opened.is_ok());
        let proven = found(verdict, reason.as_deref(), Some(data));
        Ok(Some(ProvenFile { opened, ..proven }))
    }

    /// Opens a sealed file with the VM's key, and reads all of its content, or the first of it: the inner error is why that fails.
    ///
    /// # Errors
    /// `cancelled`.
    fn open_sealed(&mut self, mut file: &File) -> Result<Result<(), String>, Problem> {
        let opened = file
            .rewind()
            .and_then(|()| Header::read(&mut file).map_err(std::io::Error::other))
            .and_then(|header| file.rewind().map(|()| header.identity().kind));
        let kind = match opened {
            Ok(kind) => kind,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let key = match vm_key(self.spec, self.kek) {
            Ok(key) => key,
            Err(problem) => return Ok(Err(problem.detail)),
        };
        let mut content = match vmseal_seal::file::open(file, self.spec.vm.0, kind, key.as_ref()) {
            Ok(content) => content,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let mut part = vec![0; SEALED_PART];
        loop {
            match content.read(&mut part) {
                Ok(0) => return Ok(Ok(())),
                Ok(_) if !self.reading.all => return Ok(Ok(())),
                Ok(_) if (self.reading.cancelled)() => return Err(cancelled()),
                Ok(read) => (self.reading.progress)(read as u64),
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
    }
}

/// Whether a sealed file is one of a VM without a key: who has it can open it.
fn has_its_key(mut file: &File) -> bool {
    let header = Header::read(&mut file);
    header.is_ok_and(|header| header.is_in_the_clear())
}

/// Which sectors are in the clear, in words.
fn in_the_clear(data: &ProvenData) -> Option<String> {
    let first = data.findings.first()?;
    let place = match first.sector {
        Some(sector) => {
            format!("sector {sector} of the disk, at byte {} of the file", first.offset)
        }
        None => format!("at byte {} of the file", first.offset),
    };
    let count = data.clear + data.equal;
    Some(format!(
        "{count} of its sectors of 4096 bytes {} not ciphertext; the first is {place}",
        if count == 1 { "is" } else { "are" }
    ))
}

/// The verdict on an image.
fn judged(image: &ProvenImage) -> (Verdict, Option<String>) {
    let data = &image.data;
    let Some(header) = &image.header else {
        return (Verdict::NotEncrypted, Some("it is an image in the clear".to_owned()));
    };
    if let Some(clear) = in_the_clear(data) {
        return (Verdict::NotEncrypted, Some(clear));
    }
    if let Some(why) = &header.reason {
        return (
            Verdict::NotProved,
            Some(format!("its header does not open with the VM's key: {why}")),
        );
    }
    if image.kind != ImageKind::Layer && data.opened == 0 && data.undecided > 0 {
        let why = "all that was read looks the same after decryption: the guest has written only compressed or encrypted data, or the key is not that of the data";
        return (Verdict::NotProved, Some(why.to_owned()));
    }
    (Verdict::Encrypted, None)
}
