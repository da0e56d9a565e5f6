//! The mark that identifies a directory as a datastore.

use std::path::Path;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{DatastoreSpec, DatastoreUsage};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_error::failed;
use crate::storage::json_file;
use crate::storage::pool;

/// The file that holds the mark.
pub const MARKER: &str = "vmseal-datastore.json";

/// The version of that file.
const VERSION: u32 = 1;

/// The version of the mark of a datastore that several hosts use. It is one of its own so that agents of earlier versions,
/// which would remove what another host is making, do not work with it.
const SHARED_VERSION: u32 = 2;

/// The longest marker, in bytes.
const MARKER_MAX: u64 = 4096;

#[derive(Serialize, Deserialize)]
pub(super) struct Marker {
    pub(super) version: u32,
    pub(super) datastore: DatastoreId,
}

impl Marker {
    /// Whether hosts share the datastore.
    pub(super) fn is_shared(&self) -> bool {
        self.version == SHARED_VERSION
    }
}

pub(super) fn directory(spec: &DatastoreSpec) -> Result<&Path, Problem> {
    let path = spec.location.path();
    if let Some(pool) = spec.location.pool() {
        pool::mount(path, pool)?;
    }
    if !path.is_absolute() {
        return Err(Problem::invalid("location.path", "must be an absolute path"));
    }
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(path),
        Ok(_) => {
            Err(Problem::invalid("location.path", format!("{} is no directory", path.display())))
        }
        Err(error) => Err(Problem::invalid(
            "location.path",
            format!("{}: {error}. Make or mount it on this host first", path.display()),
        )),
    }
}

pub(super) fn marker(path: &Path) -> Result<Option<Marker>, Problem> {
    let path = path.join(MARKER);
    let Some(text) = json_file::read(&path, MARKER_MAX)? else { return Ok(None) };
    match serde_json::from_slice::<Marker>(&text) {
        Ok(marker) if (VERSION..=SHARED_VERSION).contains(&marker.version) => Ok(Some(marker)),
        Ok(marker) => Err(Problem::new(
            ErrorCode::Damaged,
            format!("{} has version {}; use a newer vmseal", path.display(), marker.version),
        )),
        Err(error) => {
            Err(Problem::new(ErrorCode::Damaged, format!("{} is damaged: {error}", path.display())))
        }
    }
}

pub(super) fn check_marker(
    path: &Path,
    marker: &Marker,
    spec: &DatastoreSpec,
) -> Result<(), Problem> {
    if marker.datastore == spec.datastore {
        return Ok(());
    }
    Err(Problem::new(
        ErrorCode::WrongState,
        format!(
            "{} holds datastore {}, not {}: is the right file system mounted?",
            path.display(),
            marker.datastore,
            spec.datastore
        ),
    ))
}

/// The directory of a datastore that carries the right mark.
///
/// # Errors
/// `wrong-state` when the place carries no mark, or another one (not mounted?).
pub fn marked(spec: &DatastoreSpec) -> Result<&Path, Problem> {
    with_mark(spec).map(|(path, _)| path)
}

/// The same, and the mark.
pub(super) fn with_mark(spec: &DatastoreSpec) -> Result<(&Path, Marker), Problem> {
    let path = directory(spec)?;
    let marker = marker(path)?.ok_or_else(|| {
        let what =
            format!("{} is not marked as a datastore: is the file system mounted?", path.display());
        Problem::new(ErrorCode::WrongState, what)
    })?;
    check_marker(path, &marker, spec)?;
    Ok((path, marker))
}

/// The room at `path`, in bytes.
///
/// # Errors
/// Those of statvfs.
pub fn usage(path: &Path) -> Result<DatastoreUsage, Problem> {
    let stat = nix::sys::statvfs::statvfs(path)
        .map_err(|error| failed(path, "measured", &error.into()))?;
    let block = stat.fragment_size();
    Ok(DatastoreUsage {
        capacity: stat.blocks().saturating_mul(block),
        free: stat.blocks_available().saturating_mul(block),
    })
}

/// Marks a directory as this datastore.
pub(super) fn put(path: &Path, spec: &DatastoreSpec) -> Result<(), Problem> {
    put_version(path, spec, VERSION)
}

/// Marks a directory as this datastore, which hosts share.
pub(super) fn put_shared(path: &Path, spec: &DatastoreSpec) -> Result<(), Problem> {
    put_version(path, spec, SHARED_VERSION)
}

fn put_version(path: &Path, spec: &DatastoreSpec, version: u32) -> Result<(), Problem> {
    let marker = Marker { version, datastore: spec.datastore };
    let path = path.join(MARKER);
    json_file::write(&path, &marker)
}
