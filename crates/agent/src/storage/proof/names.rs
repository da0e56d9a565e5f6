//! What the files of a VM are by their names ([`crate::storage::home`] has the list).

use uuid::Uuid;
use vmseal_api::id::DiskId;
use vmseal_api::proof::{FileKind, ImageKind};

use crate::storage::home::{ARRIVING, CORE, DESCRIPTOR, LEASE, MEMORY, is_base, of_arriving_tpm};

/// What swtpm locks; it is empty.
const TPM_LOCK: &str = ".lock";

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// It holds data of a disk.
    Image(ImageKind, DiskId),
    /// Anything else.
    Other(FileKind),
}

/// What a file in a VM's home is.
#[must_use]
pub fn name_of(name: &str) -> Named {
    // One that is being replaced as a whole.
    let name = name.strip_suffix(".new").unwrap_or(name);
    if name == DESCRIPTOR {
        return Named::Other(FileKind::Descriptor);
    }
    if name == LEASE || name == ARRIVING {
        return Named::Other(FileKind::Note);
    }
    if name.starts_with(CORE) {
        return Named::Other(FileKind::Sealed);
    }
    if name == MEMORY || name.strip_prefix(MEMORY).is_some_and(|rest| rest.starts_with('.')) {
        return Named::Other(FileKind::Sealed);
    }
    let parts = name.split_once('.').and_then(|(disk, rest)| Some((disk.parse().ok()?, rest)));
    let Some((disk, rest)) = parts else { return Named::Other(FileKind::Unknown) };
    let beside = ["copy-memory-", "source-memory-", "copy-core-", "source-core-"];
    let is_sealed = beside.iter().any(|it| rest.starts_with(it));
    let is_layer = rest.strip_prefix("layer-").is_some_and(|id| id.parse::<Uuid>().is_ok());
    let image = |kind| Named::Image(kind, disk);
    match rest {
        "raw" => image(ImageKind::Image),
        "raw.creating" | "converting" => image(ImageKind::HalfMade),
        "replica" | "former-replica" => image(ImageKind::Replica),
        "copy" | "restoring" => image(ImageKind::Copy),
        _ if rest.starts_with("restored-") => image(ImageKind::Copy),
        _ if rest.starts_with("tpm-restored-") => Named::Other(FileKind::Tpm),
        "source" => image(ImageKind::Former),
        _ if is_layer || is_base(rest) => image(ImageKind::Layer),
        _ if is_sealed => Named::Other(FileKind::Sealed),
        "raw.importing" | "map" | "pair" | "mirror" | "mirror-map" | "mirror-pace" | "layers"
        | "copy-layers" | "source-layers" | "merge" | "in-place" | "in-place-header"
        | "in-place-journal" => Named::Other(FileKind::Note),
        _ => Named::Other(FileKind::Unknown),
    }
}

/// Whether a name is that of the directory of what a TPM keeps.
#[must_use]
pub fn is_tpm_directory(name: &str) -> bool {
    let ends = [".tpm", ".copy-tpm", ".copy-tpm.new", ".source-tpm"];
    let mut of = ends.iter().filter_map(|end| name.strip_suffix(*end));
    of.any(|disk| disk.parse::<DiskId>().is_ok()) || of_arriving_tpm(name).is_some()
}

/// What a file in that directory is.
#[must_use]
pub fn in_tpm_directory(name: &str) -> FileKind {
    if name == TPM_LOCK { FileKind::Note } else { FileKind::Tpm }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_names() {
        let disk = DiskId::new();
        let image = |kind| Named::Image(kind, disk);
        for (name, named) in [
            ("vm.json".to_owned(), Named::Other(FileKind::Descriptor)),
            ("vm.json.new".to_owned(), Named::Other(FileKind::Descriptor)),
            ("vm.lease".to_owned(), Named::Other(FileKind::Note)),
            ("vm.arriving".to_owned(), Named::Other(FileKind::Note)),
            ("vm.memory".to_owned(), Named::Other(FileKind::Sealed)),
            ("vm.memory.writing".to_owned(), Named::Other(FileKind::Sealed)),
            (format!("vm.core-{disk}"), Named::Other(FileKind::Sealed)),
            (format!("vm.core-{disk}.panic-kdump"), Named::Other(FileKind::Sealed)),
            (format!("{disk}.raw"), image(ImageKind::Image)),
            (format!("{disk}.raw.creating"), image(ImageKind::HalfMade)),
            (format!("{disk}.replica"), image(ImageKind::Replica)),
            (format!("{disk}.former-replica"), image(ImageKind::Replica)),
            (format!("{disk}.layer-{}", Uuid::now_v7()), image(ImageKind::Layer)),
            (format!("{disk}.base"), image(ImageKind::Layer)),
            (format!("{disk}.base-0"), image(ImageKind::Layer)),
            (format!("{disk}.base-x"), Named::Other(FileKind::Unknown)),
            (format!("{disk}.layer-x"), Named::Other(FileKind::Unknown)),
            (format!("{disk}.copy-memory-{disk}"), Named::Other(FileKind::Sealed)),
            (format!("{disk}.source-memory-{disk}"), Named::Other(FileKind::Sealed)),
            (format!("{disk}.copy-memory-vm"), Named::Other(FileKind::Sealed)),
            (format!("{disk}.source-core-{disk}.panic-elf"), Named::Other(FileKind::Sealed)),
            (format!("{disk}.layers"), Named::Other(FileKind::Note)),
            (format!("{disk}.source-layers"), Named::Other(FileKind::Note)),
            (format!("{disk}.mirror-map"), Named::Other(FileKind::Note)),
            (format!("{disk}.mirror-pace"), Named::Other(FileKind::Note)),
            (format!("{disk}.tpm-restored-{disk}"), Named::Other(FileKind::Tpm)),
            ("notes.raw".to_owned(), Named::Other(FileKind::Unknown)),
            ("README".to_owned(), Named::Other(FileKind::Unknown)),
        ] {
            assert_eq!(name_of(&name), named, "{name}");
        }
        assert!(is_tpm_directory(&format!("{disk}.tpm")) && !is_tpm_directory("x.tpm"));
        assert!(is_tpm_directory(&format!("{disk}.copy-tpm.new")));
        assert!(is_tpm_directory(&format!("{disk}.tpm-{}", Uuid::now_v7())));
        assert!(!is_tpm_directory(&format!("{disk}.tpm-restored-{disk}")));
    }
}
