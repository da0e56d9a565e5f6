//! Variables of UEFI firmware that were kept elsewhere: what libvirt has in the file of a domain's `<nvram>`.
//!
//! The firmware of a VM maps them as flash memory, and does not start with others than its own build writes. So the file is
//! read whole, and is refused unless it is what that build writes: a firmware volume of [`VARIABLES_SIZE`] bytes with a store
//! of authenticated variables (UEFI Platform Initialization Specification 1.8, volume 3, 3.2.1, and edk2's
//! `MdeModulePkg/Include/Guid/VariableFormat.h`).
//!
//! ```text
//! 0         volume: GUID at 16, length at 32, "_FVH" at 40, length of this header at 48
//! header    store: GUID, size at 16, format at 20, state at 21
//! + 28      variables, each at a multiple of 4: 60 bytes, its name in UTF-16, its data
//! ```

use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use vmseal_api::hardware::{Firmware, VARIABLES_SIZE};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::LockedFile;

use super::image::{begins_as, open_unused};
use super::transfer::TransferDirectories;
use crate::timed;

/// The field of a request that a refusal is about.
const FIELD: &str = "uefi_variables";

/// The length of the file, in bytes.
const LENGTH: usize = 528 * 1024;
const _: () = assert!(LENGTH as u64 == VARIABLES_SIZE);

/// The length of the variables of OVMF's "2M" build, in bytes.
const LENGTH_OF_2M: u64 = 128 * 1024;

/// What else can be done than to take a file.
const INSTEAD: &str = "or begin with new ones (without --nvram, and with --reset-nvram if it is a libvirt domain): the guest then starts from the loader at \\EFI\\BOOT";

/// `gEfiSystemNvDataFvGuid`, of volumes with variables.
const VOLUME: [u8; 16] = [
    0x8d, 0x2b, 0xf1, 0xff, 0x96, 0x76, 0x8b, 0x4c, 0xa9, 0x85, 0x27, 0x47, 0x07, 0x5b, 0x4f, 0x50,
];

/// `gEfiAuthenticatedVariableGuid`, of stores of variables that may be signed.
const STORE: [u8; 16] = [
    0x78, 0x2c, 0xf3, 0xaa, 0x7b, 0x94, 0x9a, 0x43, 0xa1, 0x80, 0x2e, 0x14, 0x4e, 0xc3, 0x77, 0x92,
];

/// `gEfiGlobalVariableGuid`, of the variables that the specification of UEFI itself names.
const GLOBAL: [u8; 16] = [
    0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0x00, 0xe0, 0x98, 0x03, 0x2b, 0x8c,
];

/// The format and the state of a store that is in use.
const FORMATTED_AND_HEALTHY: [u8; 2] = [0x5a, 0xfe];

/// The length of a store's header, in bytes.
const STORE_HEADER: usize = 28;

/// The length of a variable's header, in bytes.
const HEADER: usize = 60;

/// What each variable begins with.
const BEGIN: u16 = 0x55aa;

/// The states of a variable that counts: it is whole, or whole and about to be replaced.
const VALID: [u8; 2] = [0x3f, 0x3e];

/// The name of the platform's key, as variables have names: without it secure boot is off.
const PLATFORM_KEY: &[u8] = b"P\0K\0\0\0";

/// Reads the variables of a file for a VM with this firmware.
///
/// # Errors
/// `invalid-request`: the file is outside of the directories for imports, not there, not what this firmware reads, or the keys of
/// secure boot in it are not what the firmware is chosen for. `in-use`: something writes to it.
pub async fn take(
    path: PathBuf,
    firmware: Firmware,
    allowed: &TransferDirectories,
) -> Result<LockedFile, Problem> {
    let (place, allowed) = (path.clone(), allowed.clone());
    timed::call(&place, move || read(&path, firmware, &allowed)).await
}

/// The same. Blocks.
///
/// # Errors
/// Those of [`take`].
pub fn read(
    path: &Path,
    firmware: Firmware,
    allowed: &TransferDirectories,
) -> Result<LockedFile, Problem> {
    let refused =
        |what: String| Problem::invalid(FIELD, format!("{}: {what}, {INSTEAD}", path.display()));
    let unread = |error: io::Error| refused(error.to_string());
    let file = open_unused(path, allowed).map_err(|problem| Problem {
        field: Some(FIELD.to_owned()),
        detail: format!("{}; {INSTEAD}", problem.detail),
        ..problem
    })?;
    let before = file.metadata().map_err(unread)?;
    if before.len() != VARIABLES_SIZE {
        let begins = begins_as(&file).map_err(unread)?;
        return Err(refused(other_length(before.len(), begins)));
    }
    let failed = |error: String| Problem::new(ErrorCode::Internal, error);
    let mut memory = LockedFile::zeroed(LENGTH).map_err(|error| failed(error.to_string()))?;
    file.read_exact_at(memory.expose_mut(), 0).map_err(unread)?;
    let after = file.metadata().map_err(unread)?;
    let version = |of: &std::fs::Metadata| (of.len(), of.mtime(), of.mtime_nsec());
    if version(&before) != version(&after) {
        let what = format!("{} was changed while it was read: try again", path.display());
        return Err(Problem::new(ErrorCode::InUse, what));
    }
    let has_keys = has_platform_key(memory.expose_mut()).ok_or_else(|| {
        refused("holds no variables of OVMF: give the file of the domain's <nvram>".to_owned())
    })?;
    check_keys(has_keys, firmware).map_err(|what| refused(what.to_owned()))?;
    Ok(memory)
}

/// What is said of a file of another length, which may be an image of some format.
fn other_length(length: u64, begins: Option<&'static str>) -> String {
    match (begins, length) {
        (Some(other), _) => {
            format!("is {other}, and variables are taken raw: convert it (qemu-img convert -O raw)")
        }
        (None, LENGTH_OF_2M) => format!(
            "has {length} bytes, as the variables of OVMF's 2M build have. VMs have the 4M build, which does not read them: have the domain use that build"
        ),
        (None, _) => format!(
            "has {length} bytes, and the variables of OVMF's 4M build, which VMs have, are {VARIABLES_SIZE}: give the file of the domain's <nvram>"
        ),
    }
}

/// Whether the keys that are there are what a firmware is chosen for: what is said to start only what is signed does that, and what
/// checks signatures keeps its guest from changing the keys.
fn check_keys(has_keys: bool, firmware: Firmware) -> Result<(), &'static str> {
    match (firmware, has_keys) {
        (Firmware::UefiSecureBoot, true) | (Firmware::Uefi, false) => Ok(()),
        (Firmware::UefiSecureBoot, false) => Err(
            "has no keys of secure boot, so that 'uefi-secure-boot' would start what nobody has signed: choose --firmware uefi",
        ),
        (Firmware::Uefi, true) => Err(
            "has keys of secure boot, which 'uefi' would not protect from the guest: choose --firmware uefi-secure-boot",
        ),
        (Firmware::Bios, _) => {
            Err("has variables of UEFI, and a BIOS has none: choose --firmware uefi")
        }
    }
}

/// Whether a store of variables has the platform's key; none where it is no such store.
fn has_platform_key(volume: &[u8]) -> Option<bool> {
    let is_volume = part(volume, 16, 16)? == VOLUME
        && u64::from_le_bytes(part(volume, 32, 8)?.try_into().ok()?) == VARIABLES_SIZE
        && part(volume, 40, 4)? == b"_FVH";
    let store = usize::from(u16_at(volume, 48)?);
    let header = part(volume, store, STORE_HEADER)?;
    let is_store = header.starts_with(&STORE) && header.get(20..22)? == FORMATTED_AND_HEALTHY;
    let end = store.checked_add(u32_at(header, 16)?)?;
    if !is_volume || !is_store || end > volume.len() {
        return None;
    }
    let (mut at, variables) = (aligned(store + STORE_HEADER), volume.get(..end)?);
    // The first place that begins with nothing is free, as all after it.
    while let Some(variable) = variable_at(variables, at) {
        if variable.is_platform_key() {
            return Some(true);
        }
        at = variable.end;
    }
    Some(false)
}

/// A variable of a store.
struct Variable<'a> {
    state: u8,
    owner: &'a [u8],
    name: &'a [u8],
    /// The length of its data, in bytes.
    data: usize,
    /// Where the next one may begin.
    end: usize,
}

impl Variable<'_> {
    fn is_platform_key(&self) -> bool {
        let is_named = self.owner == GLOBAL && self.name == PLATFORM_KEY;
        is_named && VALID.contains(&self.state) && self.data > 0
    }
}

/// The variable that begins here; none where none does, or it is cut off.
fn variable_at(variables: &[u8], at: usize) -> Option<Variable<'_>> {
    let header = part(variables, at, HEADER)?;
    if u16_at(header, 0)? != BEGIN {
        return None;
    }
    let (state, attributes) = (*header.get(2)?, u32_at(header, 4)?);
    let (name, data) = (u32_at(header, 36)?, u32_at(header, 40)?);
    // A header that was not complete before the power went, in flash memory that was not written to: the firmware takes it to have
    // neither a name nor data, whatever its lengths are (edk2's `NameSizeOfVariable`), and writes the next variable right behind it.
    let unwritten =
        state == 0xff || [attributes, name, data].contains(&usize::try_from(u32::MAX).ok()?);
    let (name, data) = if unwritten { (0, 0) } else { (name, data) };
    let begin = at.checked_add(HEADER)?;
    let end = begin.checked_add(name)?.checked_add(data)?;
    Some(Variable {
        state,
        owner: header.get(44..HEADER)?,
        name: part(variables, begin, name)?,
        data,
        end: aligned(end),
    })
}

/// The next multiple of 4, where variables begin.
fn aligned(at: usize) -> usize {
    at.next_multiple_of(4)
}

fn part(bytes: &[u8], at: usize, length: usize) -> Option<&[u8]> {
    bytes.get(at..at.checked_add(length)?)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(part(bytes, at, 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    let number = u32::from_le_bytes(part(bytes, at, 4)?.try_into().ok()?);
    usize::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::firmware::DIRECTORY;

    /// A variable: its state, owner, name and data.
    type Variable<'a> = (u8, [u8; 16], &'a [u8], &'a [u8]);

    /// A store with these variables.
    fn store(variables: &[Variable<'_>]) -> Vec<u8> {
        let mut volume = vec![0xff; LENGTH];
        volume[..16].fill(0);
        volume[16..32].copy_from_slice(&VOLUME);
        volume[32..40].copy_from_slice(&VARIABLES_SIZE.to_le_bytes());
        volume[40..44].copy_from_slice(b"_FVH");
        volume[48..50].copy_from_slice(&72_u16.to_le_bytes());
        volume[72..88].copy_from_slice(&STORE);
        volume[88..92].copy_from_slice(&262_072_u32.to_le_bytes());
        volume[92..94].copy_from_slice(&FORMATTED_AND_HEALTHY);
        let mut at = 100;
        for (state, owner, name, data) in variables {
            let header = &mut volume[at..at + HEADER];
            header[..2].copy_from_slice(&BEGIN.to_le_bytes());
            header[2] = *state;
            header[4..8].copy_from_slice(&7_u32.to_le_bytes());
            header[36..40].copy_from_slice(&u32::try_from(name.len()).unwrap().to_le_bytes());
            header[40..44].copy_from_slice(&u32::try_from(data.len()).unwrap().to_le_bytes());
            header[44..].copy_from_slice(owner);
            let begin = at + HEADER;
            volume[begin..begin + name.len()].copy_from_slice(name);
            let begin = begin + name.len();
            volume[begin..begin + data.len()].copy_from_slice(data);
            at = aligned(begin + data.len());
        }
        volume
    }

    const BOOT: (u8, [u8; 16], &[u8], &[u8]) =
        (0x3f, GLOBAL, b"B\0o\0o\0t\0\0\0", &[1, 2, 3, 4, 5]);

    #[test]
    fn the_platform_s_key_is_found_among_other_variables() {
        const KEY: &[u8] = &[7; 33];
        let key = |state| (state, GLOBAL, PLATFORM_KEY, KEY);
        assert_eq!(has_platform_key(&store(&[])), Some(false));
        assert_eq!(has_platform_key(&store(&[BOOT])), Some(false));
        assert_eq!(has_platform_key(&store(&[BOOT, key(0x3f)])), Some(true));
        assert_eq!(has_platform_key(&store(&[BOOT, key(0x3e), BOOT])), Some(true));
        // Deleted, of another owner, and without data.
        assert_eq!(has_platform_key(&store(&[key(0x3c), BOOT])), Some(false));
        assert_eq!(has_platform_key(&store(&[(0x3f, STORE, PLATFORM_KEY, &[7])])), Some(false));
        assert_eq!(has_platform_key(&store(&[(0x3f, GLOBAL, PLATFORM_KEY, &[])])), Some(false));
        // After one whose lengths were not written, and after one that has lengths and was not said to be there.
        let mut torn = store(&[(0xff, GLOBAL, &[], &[]), key(0x3f)]);
        torn[136..144].fill(0xff);
        assert_eq!(has_platform_key(&torn), Some(true));
        torn[136..140].copy_from_slice(&10_u32.to_le_bytes());
        torn[140..144].copy_from_slice(&400_u32.to_le_bytes());
        assert_eq!(has_platform_key(&torn), Some(true));
    }

    #[test]
    fn what_is_no_store_is_none_and_nothing_ends_the_program() {
        let whole = store(&[BOOT]);
        for (at, what) in [(16, "the volume's GUID"), (33, "its length"), (40, "its signature")] {
            let mut broken = whole.clone();
            broken[at] ^= 1;
            assert_eq!(has_platform_key(&broken), None, "{what}");
        }
        for at in [72, 92, 93] {
            let mut broken = whole.clone();
            broken[at] ^= 1;
            assert_eq!(has_platform_key(&broken), None, "{at}");
        }
        assert_eq!(has_platform_key(&[]), None);
        assert_eq!(has_platform_key(&vec![0; LENGTH]), None);
        // A header beyond the end, a store beyond it, and a variable beyond its store.
        let with = |at: usize, bytes: &[u8]| {
            let mut broken = whole.clone();
            broken[at..at + bytes.len()].copy_from_slice(bytes);
            has_platform_key(&broken)
        };
        assert_eq!(with(48, &[0xff, 0xff]), None);
        assert_eq!(with(88, &[0xff; 4]), None);
        assert_eq!(with(136, &[0xfe, 0xff, 0xff, 0xff]), Some(false));
    }

    #[test]
    fn the_package_s_variables_are_taken_for_the_firmware_that_they_are_of() {
        let anywhere = TransferDirectories::anywhere();
        let of = |name: &str, firmware| read(&Path::new(DIRECTORY).join(name), firmware, &anywhere);
        let (plain, signed) = ("OVMF_VARS_4M.fd", "OVMF_VARS_4M.ms.fd");
        let taken = of(plain, Firmware::Uefi).unwrap();
        let mut content = vec![0; LENGTH];
        taken.reader().unwrap().read_exact_at(&mut content, 0).unwrap();
        assert_eq!(content, std::fs::read(Path::new(DIRECTORY).join(plain)).unwrap());
        of(signed, Firmware::UefiSecureBoot).unwrap();
        for (name, firmware, told) in [
            (plain, Firmware::UefiSecureBoot, "no keys of secure boot"),
            (signed, Firmware::Uefi, "choose --firmware uefi-secure-boot"),
            (plain, Firmware::Bios, "a BIOS has none"),
        ] {
            let refused = of(name, firmware).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert!(refused.detail.contains(told), "{refused}");
        }
    }

    #[test]
    fn a_file_that_is_not_what_the_firmware_reads_is_refused_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web_VARS.fd");
        let allowed = TransferDirectories::new(vec![directory.path().to_owned()]).unwrap();
        let refused = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            read(&path, Firmware::Uefi, &allowed).unwrap_err()
        };
        for (content, told) in [
            (vec![0; 128 * 1024], "OVMF's 2M build"),
            (vec![0; 4096], "has 4096 bytes"),
            ([&b"QFI\xfb"[..], &[0; 4096]].concat(), "qemu-img convert -O raw"),
            (vec![0; LENGTH], "no variables of OVMF"),
        ] {
            let refused = refused(&content);
            assert_eq!(refused.field.as_deref(), Some(FIELD), "{refused}");
            assert!(refused.detail.contains(told), "{refused}");
            assert!(refused.detail.contains("--reset-nvram"), "{refused}");
        }
        std::fs::write(&path, store(&[BOOT])).unwrap();
        // The domain runs.
        let writer = std::fs::File::options().append(true).open(&path).unwrap();
        let running = read(&path, Firmware::Uefi, &allowed).unwrap_err();
        assert_eq!(running.code, ErrorCode::InUse, "{running}");
        drop(writer);
        read(&path, Firmware::Uefi, &allowed).unwrap();
        let missing = read(&directory.path().join("none"), Firmware::Uefi, &allowed).unwrap_err();
        assert_eq!(missing.field.as_deref(), Some(FIELD), "{missing}");
        let none = TransferDirectories::new(Vec::new()).unwrap();
        let outside = read(&path, Firmware::Uefi, &none).unwrap_err();
        assert!(outside.detail.contains("--transfer-directory"), "{outside}");
    }
}
