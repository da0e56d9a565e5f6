//! The scan of a datastore: it reads, never writes, and trusts nothing that it finds.
//!
//! A writer to the datastore chooses names, kinds and contents. So links are not followed, pipes and devices
//! are not opened, headers are read by the parser that is fuzzed with hostile ones, and depth, entries,
//! images and time are bounded.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::datastore::{
    DatastoreContents, FoundImage, ImageContent, NamedImage, SCAN_ENTRIES_MAX, SCAN_IMAGES_MAX,
};
use vmseal_api::host::DatastoreSpec;
use vmseal_api::id::{DatastoreId, DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::home::{self, DESCRIPTOR};
use crate::storage::image_content::look;
use crate::storage::image_notes;
use crate::storage::mark::{self, MARKER};
use crate::storage::shared::CHECK_FILE;

/// The depth of the scan: our directories have one level, a copied tree a few.
const DEPTH_MAX: usize = 5;

/// How long a scan may take; the server waits for a minute.
const TIME_MAX: Duration = Duration::from_secs(40);

/// How long the caller waits for a scan, which checks its time between two entries only.
const TIMEOUT: Duration = Duration::from_secs(50);

/// The most bytes of paths and key ids in all: even at six bytes each in JSON, the answer is accepted.
const TEXT_MAX: usize = 1536 * 1024;

/// The extensions of files beside a disk that are not images, and of those that come and go with a mirror or a conversion.
const OURS: [&str; 15] = [
    "importing",
    "map",
    "pair",
    "mirror",
    "mirror-map",
    "mirror-pace",
    "copy",
    "source",
    "former-replica",
    "copy-layers",
    "source-layers",
    "in-place",
    "in-place-header",
    "in-place-journal",
    "converting",
];

/// The ends of the names of directories of what TPMs keep: as they are, and as they come and go with a mirror.
const TPM: [&str; 4] = [".tpm", ".copy-tpm", ".copy-tpm.new", ".source-tpm"];

/// The bounds of a scan.
#[derive(Clone, Copy)]
struct Limits {
    images: usize,
    entries: u64,
    until: Instant,
}

/// Scans datastores, each in one thread at a time.
#[derive(Default)]
pub struct Scanning(Arc<Mutex<HashSet<DatastoreId>>>);

impl Scanning {
    /// [`scan`], in its own thread.
    ///
    /// # Errors
    /// Those of [`scan`]; `in-use` while another scan has not ended; `timed-out`.
    pub async fn scan(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem> {
        let path = spec.location.path().to_owned();
        if !self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(spec.datastore) {
            let what = format!("{} is being scanned already: wait for that", path.display());
            return Err(Problem::new(ErrorCode::InUse, what));
        }
        let busy = Arc::clone(&self.0);
        let looking = spawn_blocking(move || {
            let contents = scan(&spec);
            busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&spec.datastore);
            contents
        });
        match timeout(TIMEOUT, looking).await {
            Ok(Ok(contents)) => contents,
            Ok(Err(error)) => Err(Problem::new(ErrorCode::Internal, error.to_string())),
            Err(_) => {
                let what = format!("the file system at {} does not respond", path.display());
                Err(Problem::new(ErrorCode::TimedOut, what))
            }
        }
    }
}

/// Scans a datastore with the right mark. Blocks.
///
/// # Errors
/// `wrong-state` without its mark; as the file system.
pub fn scan(spec: &DatastoreSpec) -> Result<DatastoreContents, Problem> {
    let path = mark::marked(spec)?;
    let until = Instant::now() + TIME_MAX;
    let limits = Limits { images: SCAN_IMAGES_MAX, entries: SCAN_ENTRIES_MAX, until };
    scan_within(path, limits).map_err(|error| {
        Problem::new(ErrorCode::Internal, format!("{} cannot be read: {error}", path.display()))
    })
}

fn scan_within(root: &Path, limits: Limits) -> io::Result<DatastoreContents> {
    let mut scan = Scan { limits, entries: 0, text: 0, contents: DatastoreContents::default() };
    scan.directory(&open_directory(root)?, Path::new(""), 0)?;
    let mut contents = scan.contents;
    contents.images.sort_by(|one, other| one.path.cmp(&other.path));
    contents.datastores.sort();
    Ok(contents)
}

/// The directory itself; a link in its place is not followed.
fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

/// Whether an open directory is a datastore.
fn is_marked(directory: &File) -> bool {
    let mark = format!("/proc/self/fd/{}/{MARKER}", directory.as_raw_fd());
    Path::new(&mark).symlink_metadata().is_ok()
}

struct Scan {
    limits: Limits,
    entries: u64,
    /// Bytes of paths and key ids so far.
    text: usize,
    contents: DatastoreContents,
}

impl Scan {
    /// Scans an open directory, which is at `place` within the datastore.
    fn directory(&mut self, directory: &File, place: &Path, depth: usize) -> io::Result<()> {
        // By its descriptor, so that it stays the directory that was opened even if it is renamed.
        let here = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        for entry in std::fs::read_dir(&here)? {
            if self.exhausted() {
                return Ok(());
            }
            let entry = entry?;
            self.entries += 1;
            let (kind, place) = (entry.file_type()?, place.join(entry.file_name()));
            let at = here.join(entry.file_name());
            if kind.is_dir() {
                self.below(&at, &place, depth + 1);
            } else if kind.is_file() {
                self.file(&at, place);
            } else {
                self.contents.others += 1;
            }
        }
        Ok(())
    }

    fn below(&mut self, at: &Path, place: &Path, depth: usize) {
        if depth > DEPTH_MAX {
            return self.incomplete(format!("{} is too deep to be scanned", place.display()));
        }
        let looked = open_directory(at).and_then(|open| {
            if is_marked(&open) {
                // These disks belong to the datastore within.
                self.text += place.as_os_str().len();
                self.contents.datastores.push(place.to_string_lossy().into_owned());
                return Ok(());
            }
            self.directory(&open, place, depth)
        });
        if let Err(error) = looked {
            self.incomplete(format!("{} cannot be read: {error}", place.display()));
        }
    }

    fn file(&mut self, at: &Path, place: PathBuf) {
        let named = named(&place);
        let note = named.filter(|name| name.half_made).map(|_| at.with_extension("importing"));
        let kept_until = note.and_then(|note| home::kept_until(&note));
        let kept_until = kept_until.and_then(|until| Timestamp::try_from(until).ok());
        match look(at) {
            Ok(Some((metadata, content))) => {
                let ours = ours(&place);
                if named.is_none() && (ours || content == ImageContent::Raw) {
                    if !ours {
                        self.contents.others += 1;
                    }
                    return;
                }
                self.text += place.as_os_str().len();
                if let ImageContent::Vmseal { claims } = &content {
                    self.text += claims.iter().map(|claim| claim.key_id.len()).sum::<usize>();
                }
                let misnoted = image_notes::contradiction(at, &content);
                self.text += misnoted.as_ref().map_or(0, String::len);
                self.contents.images.push(FoundImage {
                    path: place.to_string_lossy().into_owned(),
                    named,
                    size: metadata.len(),
                    allocated: metadata.blocks().saturating_mul(512),
                    modified: metadata.modified().ok().and_then(|at| Timestamp::try_from(at).ok()),
                    content,
                    kept_until,
                    misnoted,
                });
            }
            Ok(None) => self.contents.others += 1,
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                self.text += place.as_os_str().len();
                let content = ImageContent::Unreadable { detail: error.to_string() };
                let path = place.to_string_lossy().into_owned();
                let (modified, misnoted) = (None, None);
                self.contents.images.push(FoundImage {
                    path,
                    named,
                    size: 0,
                    allocated: 0,
                    modified,
                    content,
                    kept_until,
                    misnoted,
                });
            }
        }
    }

    fn exhausted(&mut self) -> bool {
        let Limits { images, entries, until } = self.limits;
        if self.text >= TEXT_MAX {
            self.incomplete("names and key ids are too long".to_owned());
        } else if self.entries >= entries {
            self.incomplete(format!("there are more than {entries} entries"));
        } else if self.contents.images.len() >= images {
            self.incomplete(format!("there are more than {images} images"));
        } else if Instant::now() >= until {
            self.incomplete(format!("it took longer than {} s", TIME_MAX.as_secs()));
        } else {
            return false;
        }
        true
    }

    fn incomplete(&mut self, why: String) {
        self.contents.incomplete.get_or_insert(why);
    }
}

/// The meaning of a file's name: `<vm id>/<disk id>.raw[.creating]` or `<vm id>/<disk id>.replica`.
fn named(place: &Path) -> Option<NamedImage> {
    let (home, file) = (place.parent()?, place.file_name()?.to_str()?);
    let vm: VmId = home.to_str()?.parse().ok()?;
    if let Some(stem) = file.strip_suffix(".replica") {
        return Some(NamedImage { vm, disk: stem.parse().ok()?, half_made: false, replica: true });
    }
    let (stem, half_made) = match file.strip_suffix(".creating") {
        Some(stem) => (stem, true),
        None => (file, false),
    };
    let disk: DiskId = stem.strip_suffix(".raw")?.parse().ok()?;
    Some(NamedImage { vm, disk, half_made, replica: false })
}

/// Whether it is a file of vmseal's that is not an image.
fn ours(place: &Path) -> bool {
    let of_home = place.parent().and_then(Path::to_str).is_some_and(|home| {
        let ours = |extension: &OsStr| OURS.iter().any(|it| extension == *it);
        let note = place.extension().is_some_and(ours);
        let described = place.file_name().is_some_and(|name| name == DESCRIPTOR);
        home.parse::<VmId>().is_ok() && (described || note)
    });
    of_home || of_tpm(place) || place == Path::new(MARKER) || place == Path::new(CHECK_FILE)
}

/// Whether it is in the directory of what a TPM keeps.
fn of_tpm(place: &Path) -> bool {
    let directory = place.parent();
    let name = directory.and_then(Path::file_name).and_then(OsStr::to_str);
    let home = directory.and_then(Path::parent).and_then(Path::to_str);
    let is_of_tpm = |name: &str| {
        let disk = TPM.iter().find_map(|end| name.strip_suffix(*end));
        disk.is_some_and(|disk| disk.parse::<DiskId>().is_ok())
            || home::of_arriving_tpm(name).is_some()
    };
    name.is_some_and(is_of_tpm) && home.is_some_and(|home| home.parse::<VmId>().is_ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use vmseal_secret::derive::KeyContext;
    use vmseal_secret::{DEK_LEN, KEK_LEN, SecretBytes};

    use vmseal_api::datastore::{Claim, HeaderRole};
    use vmseal_api::host::DatastoreLocation;

    use super::*;

    fn store() -> (tempfile::TempDir, DatastoreSpec) {
        let directory = tempfile::tempdir().unwrap();
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        crate::storage::datastore::probe(&spec).unwrap();
        (directory, spec)
    }

    fn encrypted(path: &Path, vm: VmId, disk: DiskId) {
        let mut file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(vmseal_luks::DATA_OFFSET + (1 << 20)).unwrap();
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let dek = SecretBytes::random(DEK_LEN).unwrap();
        let context = KeyContext { vm: *vm.0.as_bytes(), provider: [7; 16], key_id: "a-key" };
        let role = vmseal_luks::Role::Tpm;
        let identity = vmseal_luks::Identity {
            disk: disk.0,
            holes: vmseal_luks::Holes::Zero,
            shared: false,
            role,
        };
        vmseal_luks::create(&mut file, 1 << 20, &dek, &kek, &context, identity).unwrap();
    }

    /// Paths, lengths, times of writing and allocated blocks of all files.
    fn look_of(root: &Path) -> Vec<(PathBuf, u64, i64, u64)> {
        let (mut found, mut todo) = (Vec::new(), vec![root.to_owned()]);
        while let Some(path) = todo.pop() {
            let metadata = path.symlink_metadata().unwrap();
            if metadata.is_dir() {
                todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            let (changed, blocks) = (metadata.ctime_nsec(), metadata.blocks());
            found.push((path, metadata.len(), changed, blocks));
        }
        found.sort();
        found
    }

    #[test]
    fn every_kind_of_file_is_recognised_and_left_unchanged() {
        let (directory, spec) = store();
        let root = directory.path();
        let (vm, disk, plain, making) = (VmId::new(), DiskId::new(), DiskId::new(), DiskId::new());
        let home = root.join(vm.to_string());
        std::fs::create_dir(&home).unwrap();
        std::fs::write(home.join(DESCRIPTOR), "{}").unwrap();
        encrypted(&home.join(format!("{disk}.raw")), vm, disk);
        File::create(home.join(format!("{plain}.raw"))).unwrap().set_len(1 << 20).unwrap();
        File::create(home.join(format!("{making}.raw.creating"))).unwrap();
        let copied = DiskId::new();
        encrypted(&home.join(format!("{copied}.replica")), vm, copied);
        // A replica's map and an import's note: neither images nor others' files.
        File::create(home.join(format!("{disk}.map"))).unwrap();
        File::create(home.join(format!("{disk}.pair"))).unwrap();
        // What a TPM keeps.
        std::fs::create_dir(home.join(format!("{disk}.tpm"))).unwrap();
        File::create(home.join(format!("{disk}.tpm/tpm2-00.permall"))).unwrap();
        std::fs::create_dir(home.join(format!("{disk}.source-tpm"))).unwrap();
        File::create(home.join(format!("{disk}.source-tpm/tpm2-00.permall"))).unwrap();
        let arriving = home.join(format!("{disk}.tpm-{}", vmseal_api::id::MigrationId::new()));
        std::fs::create_dir(&arriving).unwrap();
        File::create(arriving.join("tpm2-00.permall")).unwrap();
        File::create(home.join(format!("{making}.raw.importing"))).unwrap();
        std::fs::create_dir_all(root.join("lost/and")).unwrap();
        encrypted(&root.join("lost/and/found.img"), vm, disk);
        let mut foreign = vec![0; 1 << 20];
        foreign[..8].copy_from_slice(b"LUKS\xba\xbe\0\x02");
        foreign[0x200..0x300].fill(0xff);
        std::fs::write(root.join("foreign.luks"), &foreign).unwrap();
        std::fs::write(root.join("garbage"), [0xa5; 70_000]).unwrap();
        nix::unistd::mkfifo(&root.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        nix::unistd::mkfifo(
            &home.join(format!("{}.raw", DiskId::new())),
            nix::sys::stat::Mode::S_IRWXU,
        )
        .unwrap();
        symlink("/etc", root.join("link")).unwrap();
        symlink(home.join(format!("{disk}.raw")), home.join(format!("{}.raw", DiskId::new())))
            .unwrap();

        let before = look_of(root);
        let contents = scan(&spec).unwrap();
        assert_eq!(look_of(root), before, "the scan changed something");
        assert_eq!(contents.incomplete, None);
        assert_eq!(contents.others, 5, "garbage, two pipes, two links");
        let told: Vec<_> =
            contents.images.iter().map(|it| (it.path.as_str(), it.named, &it.content)).collect();
        let claim = Claim {
            vm,
            disk,
            provider: "07070707-0707-0707-0707-070707070707".parse().unwrap(),
            key_id: "a-key".into(),
            role: HeaderRole::Tpm,
        };
        let ours = ImageContent::Vmseal { claims: vec![claim] };
        let name = |disk, half_made| Some(NamedImage { vm, disk, half_made, replica: false });
        let file = |disk: DiskId, end| format!("{vm}/{disk}.raw{end}");
        for (path, named, content) in [
            (file(disk, ""), name(disk, false), &ours),
            (file(plain, ""), name(plain, false), &ImageContent::Raw),
            (file(making, ".creating"), name(making, true), &ImageContent::Raw),
            ("lost/and/found.img".to_owned(), None, &ours),
        ] {
            assert!(told.contains(&(path.as_str(), named, content)), "{path}: {told:#?}");
        }
        let foreign = told.iter().find(|(path, ..)| *path == "foreign.luks").unwrap();
        assert!(matches!(foreign.2, ImageContent::ForeignLuks { .. }), "{foreign:?}");
        let replica = NamedImage { vm, disk: copied, half_made: false, replica: true };
        assert!(told.iter().any(|(_, named, _)| *named == Some(replica)), "{told:#?}");
        assert_eq!(told.len(), 6);
        let sparse = contents.images.iter().find(|it| it.named == name(plain, false)).unwrap();
        assert_eq!((sparse.size, sparse.allocated), (1 << 20, 0));
        let half = contents.images.iter().find(|it| it.named == name(making, true)).unwrap();
        assert!(half.kept_until > Some(Timestamp::now()), "{half:?}");
        assert_eq!(sparse.kept_until, None);
    }

    #[tokio::test]
    async fn a_datastore_is_scanned_by_one_at_a_time() {
        let (_directory, spec) = store();
        let scanning = Scanning::default();
        scanning.0.lock().unwrap().insert(spec.datastore);
        assert_eq!(scanning.scan(spec.clone()).await.unwrap_err().code, ErrorCode::InUse);
        scanning.0.lock().unwrap().clear();
        for _ in 0..2 {
            scanning.scan(spec.clone()).await.unwrap();
        }
    }

    #[test]
    fn another_datastore_within_is_reported_and_not_scanned() {
        let (directory, spec) = store();
        let inner = directory.path().join("vms/inner");
        let (vm, disk) = (VmId::new(), DiskId::new());
        std::fs::create_dir_all(inner.join(vm.to_string())).unwrap();
        encrypted(&inner.join(format!("{vm}/{disk}.raw")), vm, disk);
        assert_eq!(scan(&spec).unwrap().images.len(), 1);
        std::fs::copy(directory.path().join(MARKER), inner.join(MARKER)).unwrap();
        let contents = scan(&spec).unwrap();
        assert_eq!((contents.images, contents.datastores), (vec![], vec!["vms/inner".to_owned()]));
        assert_eq!((contents.others, contents.incomplete), (0, None));
    }

    #[test]
    fn ten_thousand_files_are_counted_and_limits_hold() {
        let (directory, spec) = store();
        let root = directory.path();
        std::fs::create_dir(root.join("many")).unwrap();
        for number in 0..10_000 {
            File::create(root.join(format!("many/{number}"))).unwrap();
        }
        let contents = scan(&spec).unwrap();
        assert_eq!((contents.others, contents.incomplete), (10_000, None));

        let until = Instant::now() + TIME_MAX;
        let few = Limits { images: 10, entries: 100, until };
        let contents = scan_within(root, few).unwrap();
        assert!(contents.others <= 100 && contents.incomplete.unwrap().contains("100 entries"));
        let late = Limits { until: Instant::now(), entries: u64::MAX, images: 10 };
        assert!(scan_within(root, late).unwrap().incomplete.unwrap().contains("took longer"));

        let deep = root.join("a/b/c/d/e/f");
        std::fs::create_dir_all(&deep).unwrap();
        let contents = scan(&spec).unwrap();
        assert!(contents.incomplete.unwrap().contains("a/b/c/d/e/f is too deep"));
    }

    #[test]
    fn another_datastores_place_is_not_looked_at() {
        let (_directory, spec) = store();
        let other = DatastoreSpec { datastore: DatastoreId::new(), ..spec };
        assert_eq!(scan(&other).unwrap_err().code, ErrorCode::WrongState);
    }
}
