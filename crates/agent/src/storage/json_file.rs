//! Small JSON files of a datastore: read whole, up to a limit, and written whole or not at all.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde::Serialize;
use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::problem::Problem;

use crate::storage::file_error::failed;

/// At most the first `length_max` bytes of a file; none where there is no such file. Of a longer one that is no JSON, so it
/// is found damaged.
///
/// # Errors
/// Those of the file system.
pub fn read(path: &Path, length_max: u64) -> Result<Option<Vec<u8>>, Problem> {
    let mut text = Vec::new();
    match File::open(path).and_then(|file| file.take(length_max).read_to_end(&mut text)) {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, "read", &error)),
    }
}

/// Writes a file, durably.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, content: &impl Serialize) -> Result<(), Problem> {
    serde_json::to_vec(content)
        .map_err(io::Error::from)
        .and_then(|json| atomic_file::write(path, &json, PRIVATE))
        .map_err(|error| failed(path, "written", &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_no_more_than_may_be() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("note");
        assert_eq!(read(&path, 100).unwrap(), None);
        write(&path, &["one", "two"]).unwrap();
        assert_eq!(read(&path, 100).unwrap().unwrap(), br#"["one","two"]"#);
        assert_eq!(read(&path, 5).unwrap().unwrap(), br#"["one"#[..5]);
        let error = read(directory.path(), 100).unwrap_err();
        assert!(error.detail.contains("cannot be read"), "{error}");
        assert!(write(&path.join("below"), &1).unwrap_err().detail.contains("cannot be written"));
    }
}
