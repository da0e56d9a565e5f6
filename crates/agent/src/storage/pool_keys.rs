//! The keys of pools that the server holds: by the place where each pool is mounted, in memory alone. They are gone with the agent,
//! and the server gives them again to the next one.

use std::collections::BTreeMap;
use std::io::{self, PipeReader, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use vmseal_secret::SecretBytes;

/// The keys, for [`crate::storage::pool::mount`], which is called with a place alone.
static HELD: Mutex<BTreeMap<PathBuf, Arc<SecretBytes>>> = Mutex::new(BTreeMap::new());

/// Holds the key of the pool that is mounted there from now on, or forgets it.
pub fn hold(path: PathBuf, key: Option<SecretBytes>) {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    match key {
        Some(key) => drop(held.insert(path, Arc::new(key))),
        None => drop(held.remove(&path)),
    }
}

/// The key of the pool that is mounted there, where the server has given it.
pub fn of(path: &Path) -> Option<Arc<SecretBytes>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned()
}

/// A pipe that has the key, and its end behind it, for the standard input of a process.
///
/// # Errors
/// The kernel's.
pub fn piped(key: &SecretBytes) -> io::Result<PipeReader> {
    let (reader, mut writer) = io::pipe()?;
    // Far less than a pipe holds: nobody has to read it meanwhile.
    writer.write_all(key.expose())?;
    Ok(reader)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_held_for_its_place_until_it_is_forgotten() {
        let key = |byte| Some(SecretBytes::from_wiped(&mut [byte; 40]).unwrap());
        let (one, other) = (Path::new("/pool-keys/one"), Path::new("/pool-keys/other"));
        hold(one.to_owned(), key(1));
        assert!(of(other).is_none());
        hold(one.to_owned(), key(2));
        assert_eq!(of(one).unwrap().expose(), [2; 40]);
        hold(one.to_owned(), None);
        assert!(of(one).is_none());
    }
}
