//! Extended attributes: of the root how the cluster keeps what is stored, whether its OSDs are encrypted, whether hosts may be fenced and who serves it, of directories how new images are cut into objects, and that
//! other hosts are to lose what is in them, and of files that are images what these say of themselves, which is metadata of the image, and
//! the state that they are in.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

use fuser::{Errno, ReplyXattr};
use vmseal_api::osd_encryption::{OsdEncryption, OsdsUnknown};
use vmseal_api::rbd::{
    FENCE_ATTRIBUTE, FENCING_ATTRIBUTE, IMAGE_LAYOUT_ATTRIBUTE, MOUNTED_ATTRIBUTE, NOTE_ATTRIBUTES,
    NOTE_MAX, OSDS_ATTRIBUTE, POOLS_ATTRIBUTE, STATE_ATTRIBUTE,
};

use super::{FileSystem, POOL_KNOWN};
use crate::answers::answer;
use crate::cluster::Cluster;
use crate::image::Image;
use crate::image_layout;
use crate::inode::Inode;
use crate::monitors::Question;
use crate::open_file::FileImage;
use crate::pools;

/// What the names of attributes begin with that are for programs (xattr(7)); keys of metadata do not.
const NAMESPACE: &str = "user.";

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn unsupported() -> io::Error {
    error(libc::EOPNOTSUPP)
}

/// The key of an image's metadata that an attribute is; none for all others. So nobody changes what Ceph or this process keeps there:
/// the configuration of images (`conf_...`), and their paths.
fn key_of(name: &OsStr) -> Option<&'static str> {
    let known = NOTE_ATTRIBUTES.into_iter().find(|known| name == *known)?;
    known.strip_prefix(NAMESPACE)
}

/// Who knows the value of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownTo {
    /// This process; also that there is no such attribute, which the kernel asks for with each write of some files.
    Process,
    /// The monitors.
    Monitors,
    /// The pool.
    Pool,
}

impl KnownTo {
    pub(super) fn of(of: Inode, name: &OsStr) -> Self {
        let of_monitors = [POOLS_ATTRIBUTE, OSDS_ATTRIBUTE, FENCING_ATTRIBUTE];
        match of == Inode::ROOT && of_monitors.iter().any(|known| name == *known) {
            true => Self::Monitors,
            false if key_of(name).is_some() || name == STATE_ATTRIBUTE => Self::Pool,
            false => Self::Process,
        }
    }
}

/// How the cluster keeps what is stored in these pools: the value of [`POOLS_ATTRIBUTE`].
pub(super) fn facts(cluster: &Arc<Cluster>, pools: Vec<String>) -> Question<Vec<u8>> {
    let cluster = Arc::clone(cluster);
    Question::new("how pools keep data", POOL_KNOWN, move || {
        let names: Vec<_> = pools.iter().map(String::as_str).collect();
        Ok(serde_json::to_vec(&pools::facts(&cluster, &names)?)?)
    })
}

/// A value that may be noted: one line of text.
fn line(value: &[u8]) -> io::Result<&str> {
    if value.len() > NOTE_MAX {
        return Err(error(libc::E2BIG));
    }
    let text = std::str::from_utf8(value).ok();
    let text = text.filter(|text| !text.is_empty() && !text.chars().any(char::is_control));
    text.ok_or_else(|| error(libc::EINVAL))
}

impl FileSystem {
    pub(super) fn set_attribute(
        &self,
        of: Inode,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> io::Result<()> {
        if name == IMAGE_LAYOUT_ATTRIBUTE {
            return image_layout::set(&self.store.pool, of, value);
        }
        if name == FENCE_ATTRIBUTE {
            return self.take_from_others(of);
        }
        // The cluster cannot set what must be there, or must not, in one step.
        let key = key_of(name).filter(|_| flags == 0).ok_or_else(unsupported)?;
        let value = line(value)?;
        self.with_image(of, true, |image| image.set_metadata(key, value))
    }

    pub(super) fn attribute(&self, of: Inode, name: &OsStr) -> io::Result<Vec<u8>> {
        if of == Inode::ROOT && name == POOLS_ATTRIBUTE {
            return self.facts.ask();
        }
        if of == Inode::ROOT && name == OSDS_ATTRIBUTE {
            let no_answer = OsdEncryption::Unknown { why: OsdsUnknown::NoAnswer };
            return Ok(serde_json::to_vec(&self.osds.ask().unwrap_or(no_answer))?);
        }
        if of == Inode::ROOT && name == FENCING_ATTRIBUTE {
            return Ok(serde_json::to_vec(&self.may_fence())?);
        }
        // Without the cluster, which may not answer.
        if of == Inode::ROOT && name == MOUNTED_ATTRIBUTE {
            return Ok(serde_json::to_vec(&self.mounted)?);
        }
        if name == STATE_ATTRIBUTE {
            return self.state(of);
        }
        let key = key_of(name).ok_or_else(unsupported)?;
        let noted = self.with_image(of, false, |image| image.metadata(key, NOTE_MAX))?;
        noted.map(String::into_bytes).ok_or_else(|| error(libc::ENODATA))
    }

    /// The state of an image: the value of [`STATE_ATTRIBUTE`].
    fn state(&self, of: Inode) -> io::Result<Vec<u8>> {
        if of.is_directory() {
            return Err(unsupported());
        }
        let told = self.with_file(of, false, |file| {
            let image = file.image().ok_or_else(unsupported)?;
            image.state(&self.store, of)
        });
        told.map(String::into_bytes)
    }

    /// The names of the attributes that an image has, each with a zero byte behind it.
    pub(super) fn attribute_names(&self, of: Inode) -> io::Result<Vec<u8>> {
        self.with_image(of, false, |image| {
            let mut names = Vec::new();
            for name in NOTE_ATTRIBUTES {
                let Some(key) = key_of(OsStr::new(name)) else { continue };
                if image.metadata(key, NOTE_MAX)?.is_some() {
                    names.extend_from_slice(name.as_bytes());
                    names.push(0);
                }
            }
            Ok(names)
        })
    }

    pub(super) fn remove_attribute(&self, of: Inode, name: &OsStr) -> io::Result<()> {
        let key = key_of(name).ok_or_else(unsupported)?;
        let removed = self.with_image(of, true, |image| image.remove_metadata(key));
        removed.map_err(|failed| match failed.kind() {
            io::ErrorKind::NotFound => error(libc::ENODATA),
            _ => failed,
        })
    }

    /// Does something with the image of a file that may not be open.
    fn with_image<T>(
        &self,
        of: Inode,
        writable: bool,
        work: impl FnOnce(&Image) -> io::Result<T>,
    ) -> io::Result<T> {
        if of.is_directory() {
            return Err(unsupported());
        }
        // Who reads an image here does not keep other hosts from writing it, and would if it were opened once more with its lock.
        // The image is not kept beyond this: it must be closed when its last handle is.
        let only_read = |image: Arc<FileImage>| !image.is_writable();
        if writable && self.open.get(of).and_then(|file| file.image()).is_some_and(only_read) {
            return Err(error(libc::EBUSY));
        }
        self.with_file(of, writable, |file| {
            let image = file.image().ok_or_else(unsupported)?;
            work(image.image())
        })
    }
}

/// Answers a request for a value, or for its length.
pub(super) fn tell(reply: ReplyXattr, told: io::Result<Vec<u8>>, size: u32) {
    answer(reply, told, |reply, told| match told.len() {
        length if size == 0 => reply.size(u32::try_from(length).unwrap_or(u32::MAX)),
        length if length > size as usize => reply.error(Errno::ERANGE),
        _ => reply.data(&told),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_images_say_of_themselves_is_metadata() {
        let key = |name: &str| key_of(OsStr::new(name));
        assert_eq!(key("user.vmseal.vm"), Some("vmseal.vm"));
        assert_eq!(key("user.vmseal.kek"), Some("vmseal.kek"));
        for other in ["user.vmseal.path", "user.conf_rbd_cache", "vmseal.kek", "user.vmseal.", ""] {
            assert_eq!(key(other), None, "{other}");
        }
    }

    #[test]
    fn only_what_the_cluster_knows_is_asked_there() {
        let known_to = |of, name: &str| KnownTo::of(of, OsStr::new(name));
        let (root, file) = (Inode::ROOT, Inode(2));
        for name in [POOLS_ATTRIBUTE, OSDS_ATTRIBUTE, FENCING_ATTRIBUTE] {
            assert_eq!(known_to(root, name), KnownTo::Monitors, "{name}");
            assert_eq!(known_to(file, name), KnownTo::Process, "{name}");
        }
        assert_eq!(known_to(file, "user.vmseal.kek"), KnownTo::Pool);
        assert_eq!(known_to(file, STATE_ATTRIBUTE), KnownTo::Pool);
        assert_eq!(known_to(root, MOUNTED_ATTRIBUTE), KnownTo::Process);
        assert_eq!(known_to(file, "security.capability"), KnownTo::Process);
    }

    #[test]
    fn a_value_is_one_line_of_text() {
        assert_eq!(line(b"none").unwrap(), "none");
        assert_eq!(line(&[b'k'; NOTE_MAX]).unwrap().len(), NOTE_MAX);
        for wrong in [&b""[..], b"a\nb", b"a\0", b"\xff", &[b'k'; NOTE_MAX + 1]] {
            line(wrong).unwrap_err();
        }
    }
}
