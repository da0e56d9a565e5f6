//! Images of systems on this machine, known by their names: files of one directory.
//!
//! `debian.raw` is the image `debian`, raw; `.qcow2` files are images, too. `vmseal image build` makes one, and others
//! may be put there.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use jiff::Timestamp;
use serde::Serialize;
use vmseal_api::filter::CRYPT_SECTOR;
use vmseal_api::transfer::ImageFormat;

use crate::exit::{Ended, Exit};

/// Where they are for root: hosts import from it unless they are told otherwise (`vmseal agent --transfer-directory`).
pub const SYSTEM: &str = "/var/lib/vmseal/images";

/// The name of the image that is built here.
pub const DEBIAN: &str = "debian";

/// A day, in seconds.
const DAY: u64 = 24 * 60 * 60;

/// The age from which an image is said to be old, in days. Nothing builds it again by itself, and a guest begins with the packages of
/// the day it was built: it lacks the security updates since, of which a quarter of a year has some in nearly every part of a system.
const OLD_DAYS: u64 = 90;

/// An image.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// What it is.
    pub format: ImageFormat,
    /// The size of the disk in it, in bytes; none where it cannot be read.
    pub size: Option<u64>,
    /// The room that it takes, in bytes.
    pub allocated: u64,
    /// When it was last written to.
    pub modified: Option<Timestamp>,
    /// The file.
    pub path: PathBuf,
}

/// The directory of this user's images.
///
/// # Errors
/// The user has neither a cache directory nor a home.
pub fn directory() -> anyhow::Result<PathBuf> {
    if nix::unistd::geteuid().is_root() {
        return Ok(PathBuf::from(SYSTEM));
    }
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let cache = cache.context("where are images kept? HOME is not set: give --dir or --to")?;
    Ok(cache.join("vmseal/images"))
}

/// Where an image of this user is looked for by its name: the user's own directory, then that of root, which hosts read unless they are
/// told otherwise.
///
/// # Errors
/// As [`directory`].
pub fn directories() -> anyhow::Result<Vec<PathBuf>> {
    let mut directories = vec![directory()?, PathBuf::from(SYSTEM)];
    directories.dedup();
    Ok(directories)
}

/// Images of several directories.
#[derive(Debug, Default)]
pub struct Known {
    /// The images, in the order of their directories, and by name in each.
    pub images: Vec<Image>,
    /// What is said of directories that this user may not read.
    pub unread: Vec<String>,
}

/// The images in all of these directories.
///
/// # Errors
/// The file system's; that this user may not read a directory is no error.
pub fn known(directories: &[PathBuf]) -> anyhow::Result<Known> {
    let mut known = Known::default();
    for directory in directories {
        match list(directory) {
            Ok(images) => known.images.extend(images),
            Err(error) if is_denied(&error) => known.unread.push(format!(
                "images in {0} cannot be read: permission denied. Let users read it, as root: chmod a+rx {0}, and each directory above it",
                directory.display()
            )),
            Err(error) => return Err(error),
        }
    }
    Ok(known)
}

fn is_denied(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// A command, as this user has root give it: hosts read the images of root.
#[must_use]
pub fn by_root(command: &str) -> String {
    match nix::unistd::geteuid().is_root() {
        true => command.to_owned(),
        false => format!("sudo {command}"),
    }
}

/// Whether a raw image is partitioned as UEFI wants it: with a GPT, whose signature is in the second sector (UEFI
/// specification 2.10, section 5.3.2).
///
/// # Errors
/// The file system's.
pub fn has_partitions_for_uefi(image: &Path) -> anyhow::Result<bool> {
    const SECTOR: u64 = 512;
    const SIGNATURE: &[u8] = b"EFI PART";
    let mut found = [0; SIGNATURE.len()];
    let file = File::open(image).with_context(|| format!("cannot open {}", image.display()))?;
    match file.read_exact_at(&mut found, SECTOR) {
        Ok(()) => Ok(found == SIGNATURE),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", image.display())),
    }
}

/// What is said of an image that was built long ago; `rebuild` is the command that builds it again. None of a newer one, and of
/// one whose age cannot be told.
#[must_use]
pub fn said_if_old(image: &Path, rebuild: &str) -> Option<String> {
    let built = std::fs::metadata(image).and_then(|it| it.modified()).ok()?;
    let days = built.elapsed().ok()?.as_secs() / DAY;
    (days > OLD_DAYS).then(|| {
        format!(
            "the image {} is {days} days old: a guest from it lacks the security updates since then, until it installs them. Build it again: {rebuild}",
            image.display()
        )
    })
}

/// What a file in the directory is called, and its format; none for what is no image.
fn named(path: &Path) -> Option<(String, ImageFormat)> {
    let extension = path.extension()?.to_str()?;
    let format = ImageFormat::ALL.into_iter().find(|format| format.name() == extension)?;
    let name = path.file_stem()?.to_str()?;
    (!name.starts_with('.')).then(|| (name.to_owned(), format))
}

/// The images in a directory, by name; none where it is not there.
///
/// # Errors
/// The file system's.
pub fn list(directory: &Path) -> anyhow::Result<Vec<Image>> {
    let failed = || format!("cannot read {}", directory.display());
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(failed),
    };
    let mut images = Vec::new();
    for entry in entries {
        let path = entry.with_context(failed)?.path();
        let Some((name, format)) = named(&path) else { continue };
        // Removed meanwhile, or no file.
        let Some(metadata) = path.metadata().ok().filter(std::fs::Metadata::is_file) else {
            continue;
        };
        images.push(Image {
            name,
            format,
            size: size_of_image(&path, format).ok(),
            allocated: metadata.blocks().saturating_mul(512),
            modified: metadata.modified().ok().and_then(|at| Timestamp::try_from(at).ok()),
            path,
        });
    }
    images.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(images)
}

/// The file and the format of the image of this name, in the first of these directories that has one.
///
/// # Errors
/// There is none, or a directory has more than one.
pub fn find(directories: &[PathBuf], name: &str) -> anyhow::Result<(PathBuf, ImageFormat)> {
    let known = known(directories)?;
    let mut called = known.images.iter().filter(|image| image.name == name);
    let message = match (called.next(), called.next()) {
        (Some(one), Some(other)) if one.path.parent() == other.path.parent() => {
            let directory = one.path.parent().unwrap_or(Path::new("/")).display();
            format!("there is more than one image '{name}' in {directory}: give the path of one")
        }
        (Some(image), _) => return Ok((image.path.clone(), image.format)),
        (None, _) => not_found(directories, &known, name),
    };
    Err(Ended::new(Exit::Usage, message).into())
}

fn not_found(directories: &[PathBuf], known: &Known, name: &str) -> String {
    let places: Vec<_> = directories.iter().map(|it| it.display().to_string()).collect();
    let places = places.join(" or ");
    let names: Vec<_> = known.images.iter().map(|image| image.name.as_str()).collect();
    let known_names = match names.as_slice() {
        [] => "none is there".to_owned(),
        names => format!("known are {}", names.join(", ")),
    };
    let instead = match name {
        DEBIAN => format!("build it ({})", by_root(&format!("vmseal image build {DEBIAN}"))),
        _ => format!("put it there as {name}.raw or {name}.qcow2"),
    };
    let unread: Vec<_> = known.unread.iter().map(|said| format!("; {said}")).collect();
    let unread = unread.concat();
    format!(
        "there is no image '{name}' in {places} ({known_names}): {instead}, or give a path{unread}"
    )
}

/// Whether this is the name of an image, and not the path of one.
#[must_use]
pub fn is_name(image: &Path) -> bool {
    !image.as_os_str().is_empty() && !image.to_string_lossy().contains('/')
}

/// An image that this machine cannot read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// There is none.
    #[error("there is no file {} on this machine", .0.display())]
    Missing(PathBuf),
    /// There is one.
    #[error("cannot read the image {} on this machine: {}", .0.display(), .1)]
    Refused(PathBuf, io::Error),
}

impl Unreadable {
    fn new(image: &Path, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing(image.to_owned()),
            _ => Self::Refused(image.to_owned(), error),
        }
    }
}

/// The same error, with what to do if it is of an image that this machine cannot read: after what is the matter with it.
pub fn with_remedy(error: anyhow::Error, remedy: &str) -> anyhow::Error {
    match error.downcast_ref::<Unreadable>() {
        Some(unreadable) => anyhow::anyhow!("{unreadable}: {remedy}"),
        None => error,
    }
}

/// The size of the disk in an image, rounded up to whole sectors, as disks must have.
///
/// # Errors
/// [`Unreadable`], or what the image is in place of one.
pub fn size_of_image(image: &Path, format: ImageFormat) -> anyhow::Result<u64> {
    let unreadable = |error| Unreadable::new(image, error);
    let size = match format {
        ImageFormat::Raw => std::fs::metadata(image).map_err(unreadable)?.len(),
        ImageFormat::Qcow2 => {
            let file = File::open(image).map_err(unreadable)?;
            let header = vmseal_qcow2::examine(&file);
            header.with_context(|| format!("{} cannot be imported", image.display()))?.size
        }
    };
    Ok(size.next_multiple_of(u64::from(CRYPT_SECTOR)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_not_there_is_said_first_and_what_to_do_then() {
        let directory = tempfile::tempdir().unwrap();
        let (missing, other) = (directory.path().join("a.raw"), directory.path().join("b.qcow2"));
        for format in ImageFormat::ALL {
            let error = with_remedy(size_of_image(&missing, format).unwrap_err(), "do this");
            let expected =
                format!("there is no file {} on this machine: do this", missing.display());
            assert_eq!(crate::exit::text(&error), expected);
        }
        // This file can be read, and another format is what is wrong: the remedy for a missing file would mislead.
        std::fs::write(&other, [7; 4096]).unwrap();
        let error = size_of_image(&other, ImageFormat::Qcow2).unwrap_err();
        let error = crate::exit::text(&with_remedy(error, "do this"));
        assert!(error.contains("cannot be imported") && !error.contains("do this"), "{error}");
    }

    #[test]
    fn images_for_uefi_are_told_from_others() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("debian.raw");
        for (content, expected) in [
            ([&[0; 512][..], b"EFI PART", &[0; 504]].concat(), true),
            (vec![0; 1024], false),
            (vec![0; 100], false),
        ] {
            std::fs::write(&image, content).unwrap();
            assert_eq!(has_partitions_for_uefi(&image).unwrap(), expected);
        }
        assert!(has_partitions_for_uefi(&directory.path().join("none")).is_err());
    }

    #[test]
    fn an_old_image_is_told_with_what_builds_it_again() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("debian.raw");
        std::fs::write(&image, "x").unwrap();
        let rebuild = "vmseal image build debian --force";
        let now = std::time::SystemTime::now();
        let days = |count: u64| std::time::Duration::from_secs(count * DAY);
        let said_of = |built| {
            File::options().write(true).open(&image).unwrap().set_modified(built).unwrap();
            said_if_old(&image, rebuild)
        };
        for built in [now, now - days(OLD_DAYS), now + days(400)] {
            assert_eq!(said_of(built), None, "{built:?}");
        }
        let said = said_of(now - days(OLD_DAYS + 1)).unwrap();
        assert!(said.contains("91 days old") && said.ends_with(rebuild), "{said}");
        assert!(said.contains(image.to_str().unwrap()), "{said}");
        assert_eq!(said_if_old(&directory.path().join("none"), rebuild), None);
    }

    #[test]
    fn images_are_listed_and_found_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["debian.raw", "other.qcow2", "two.raw", "two.qcow2", "notes.txt", ".half.raw"]
        {
            std::fs::write(at(name), [0; 8192]).unwrap();
        }
        std::fs::create_dir(at("directory.raw")).unwrap();
        let listed = list(directory.path()).unwrap();
        let names: Vec<_> =
            listed.iter().map(|it| (it.name.as_str(), it.format.name(), it.size)).collect();
        let expected = [
            ("debian", "raw", Some(8192)),
            ("other", "qcow2", None),
            ("two", "qcow2", None),
            ("two", "raw", Some(8192)),
        ];
        assert_eq!(names, expected);
        let here = [directory.path().to_owned()];
        let found = find(&here, "debian").unwrap();
        assert_eq!(found, (at("debian.raw"), ImageFormat::Raw));
        for (name, told) in [
            ("none", "known are debian, other"),
            ("none", "put it there as none.raw or none.qcow2"),
            ("two", "more than one"),
        ] {
            let message = find(&here, name).unwrap_err().to_string();
            assert!(message.contains(told), "{message}");
        }
        assert!(list(&at("missing")).unwrap().is_empty());
        let message = find(&[at("missing")], "debian").unwrap_err().to_string();
        assert!(message.contains("vmseal image build debian"), "{message}");
    }

    /// Users who are not root launch what root has built: hosts read that, and not what is in a user's directory.
    #[test]
    fn images_of_root_are_found_after_those_of_the_user() {
        let (own, roots) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (directory, name) in
            [(&own, "mine.raw"), (&own, "both.raw"), (&roots, "both.qcow2"), (&roots, "debian.raw")]
        {
            std::fs::write(directory.path().join(name), [0; 8192]).unwrap();
        }
        let all = [own.path().to_owned(), roots.path().to_owned()];
        for (name, expected) in [
            ("mine", own.path().join("mine.raw")),
            ("both", own.path().join("both.raw")),
            ("debian", roots.path().join("debian.raw")),
        ] {
            assert_eq!(find(&all, name).unwrap().0, expected);
        }
        let names: Vec<_> = known(&all).unwrap().images.into_iter().map(|it| it.name).collect();
        assert_eq!(names, ["both", "mine", "both", "debian"]);
        let message = find(&all, "none").unwrap_err().to_string();
        assert!(all.iter().all(|it| message.contains(it.to_str().unwrap())), "{message}");
        assert_eq!(directories().unwrap().last().unwrap(), Path::new(SYSTEM));
    }

    #[test]
    fn a_directory_that_a_user_may_not_read_is_told() {
        let denied = anyhow::Error::from(io::Error::from(io::ErrorKind::PermissionDenied));
        assert!(is_denied(&denied.context("cannot read /a")));
        assert!(!is_denied(&anyhow::Error::from(io::Error::from(io::ErrorKind::NotFound))));
        let known = Known { images: Vec::new(), unread: vec!["/b cannot be read".to_owned()] };
        let message = not_found(&[PathBuf::from("/a")], &known, "none");
        assert!(message.ends_with("; /b cannot be read"), "{message}");
    }

    #[test]
    fn a_name_is_what_has_no_slash() {
        assert!(is_name(Path::new("debian")) && is_name(Path::new("debian-12")));
        assert!(!is_name(Path::new("/a/debian.raw")) && !is_name(Path::new("./a")));
    }
}
