//! What disks of several VMs have in common: files with a name in more than one home ([`super::linking`]).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use nix::sys::memfd::{MFdFlags, memfd_create};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_qcow2::{Below, create_overlay_beginning};

use crate::storage::builder::internal;
use crate::storage::home::Home;

/// How many VMs an error names.
const NAMED_MAX: usize = 5;

/// Whether a file has names in other VMs' homes, or elsewhere. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn has_other_names(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.nlink() > 1)
}

/// The linked clones that stand on one of these files of a home, by name; those that are being made, too. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn clones_of(home: &Home, files: &[PathBuf]) -> Result<Vec<String>, Problem> {
    let shared = |path: &PathBuf| {
        let found = path.symlink_metadata().ok().filter(|found| found.nlink() > 1)?;
        Some((found.dev(), found.ino()))
    };
    let shared: Vec<_> = files.iter().filter_map(shared).collect();
    let mut clones = Vec::new();
    // Other names are rare: only then is the datastore searched.
    if shared.is_empty() {
        return Ok(clones);
    }
    for other in home.others()? {
        let stands = other.base_files(None)?.into_iter().any(|path| {
            let found = path.symlink_metadata();
            found.is_ok_and(|found| shared.contains(&(found.dev(), found.ino())))
        });
        if stands {
            let described = other.descriptor().map(|descriptor| descriptor.name);
            let named = other.path().file_name().map(|name| name.to_string_lossy().into_owned());
            clones.extend(described.or(named));
        }
    }
    clones.sort();
    Ok(clones)
}

/// Checks that no linked clone stands on these files. Blocks.
///
/// # Errors
/// `wrong-state`, with their names; those of the file system.
pub fn check_alone(home: &Home, files: &[PathBuf]) -> Result<(), Problem> {
    let clones = clones_of(home, files)?;
    if clones.is_empty() {
        return Ok(());
    }
    let more = clones.len().saturating_sub(NAMED_MAX);
    let named: Vec<_> = clones.iter().take(NAMED_MAX).map(|name| format!("'{name}'")).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let what = format!(
        "linked clones stand on this: {}{more}. Delete them, or make them VMs of their own first (vmseal vm recrypt NAME --deep, or vmseal vm move)",
        named.join(", ")
    );
    Err(Problem::new(ErrorCode::WrongState, what))
}

/// A layer, in memory, of a disk of this length, which has the header that is in `own`: between a linked clone's own layers and its
/// base, for readers of all of it. Blocks.
///
/// # Errors
/// Those of the file, and of memory.
pub fn header_layer(own: &File, header: u64, length: u64) -> Result<File, Problem> {
    let name = c"vmseal-header";
    let memory = memfd_create(name, MFdFlags::MFD_CLOEXEC).map_err(internal)?;
    let mut memory = File::from(memory);
    let mut bytes = Vec::new();
    let mut file = own.try_clone().map_err(internal)?;
    file.seek(SeekFrom::Start(0))
        .and_then(|_| file.take(header).read_to_end(&mut bytes))
        .map_err(internal)?;
    let below = Below { name: "", format: "raw" };
    create_overlay_beginning(&mut memory, length, below, &bytes).map_err(internal)?;
    Ok(memory)
}
