//! What is mounted, as the kernel tells.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::CephError;

/// Where the kernel tells it.
const MOUNTINFO: &str = "/proc/self/mountinfo";

/// What is mounted at a place, and below it. A mount comes before those that are mounted on it.
///
/// # Errors
/// The kernel does not tell.
pub fn below(place: &Path) -> Result<Vec<PathBuf>, CephError> {
    let failed = |source| CephError::File { path: MOUNTINFO.into(), source };
    let text = fs::read_to_string(MOUNTINFO).map_err(failed)?;
    Ok(mounted(&text, place))
}

/// The same in a text of the kernel's: the fifth word of each line is where something is mounted. Paths of clusters have no
/// characters that are written differently there.
fn mounted(text: &str, place: &Path) -> Vec<PathBuf> {
    let all = text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    all.filter(|it| it.starts_with(place)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_the_place_are_found() {
        let text = "\
22 27 0:21 / /proc rw,nosuid - proc proc rw
42 27 0:39 / /lab/block/1 rw,nosuid,nodev - fuse /dev/fuse rw,user_id=0
43 27 0:40 / /lab/block/10 rw,nosuid,nodev - fuse /dev/fuse rw,user_id=0
44 42 0:41 / /lab/block/1 rw,nosuid,nodev - fuse /dev/fuse rw,user_id=0
45 27 0:42 / /lab2/block/1 rw,nosuid,nodev - fuse /dev/fuse rw,user_id=0
";
        let found = |place: &str| mounted(text, Path::new(place));
        assert_eq!(found("/lab/block/1"), ["/lab/block/1", "/lab/block/1"].map(PathBuf::from));
        assert_eq!(found("/lab/block/2"), [] as [PathBuf; 0]);
        assert_eq!(found("/lab/block").len(), 3);
    }
}
