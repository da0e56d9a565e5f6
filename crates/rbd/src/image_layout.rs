//! How new images are cut into objects: as their directory says, which is noted with each file when it is made.
//!
//! ```text
//!  setxattr of a directory ──> directory ──a file is made──> file ──it becomes an image──> its layout, for good
//! ```

use std::io;

use vmseal_api::image_layout::ImageLayout;

use crate::cluster::Pool;
use crate::image::Layout;
use crate::inode::{IMAGE_LAYOUT, Inode};

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// What was written of a layout.
fn read(text: &[u8]) -> io::Result<ImageLayout> {
    let layout: ImageLayout = serde_json::from_slice(text)?;
    layout.check().map_err(|(field, what)| invalid(format!("{field} {what}")))?;
    Ok(layout)
}

/// Notes how images that are made in a directory from now on are cut into objects.
///
/// # Errors
/// `InvalidInput`, `InvalidData`: it is no layout. `NotADirectory`; the cluster's.
pub fn set(pool: &Pool, directory: Inode, text: &[u8]) -> io::Result<()> {
    if !directory.is_directory() {
        return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
    }
    let text = serde_json::to_string(&read(text)?)?;
    pool.set_attribute(&directory.object(), IMAGE_LAYOUT, &text)
}

/// Notes with a file that is made how its directory would have its image.
///
/// # Errors
/// The cluster's.
pub fn inherit(pool: &Pool, directory: Inode, file: Inode) -> io::Result<()> {
    match pool.attribute(&directory.object(), IMAGE_LAYOUT)? {
        Some(text) if !read(text.as_bytes())?.is_usual() => {
            pool.set_attribute(&file.object(), IMAGE_LAYOUT, &text)
        }
        _ => Ok(()),
    }
}

/// How the image of a file is to be stored; `usual` is how others are.
///
/// # Errors
/// The cluster's; `InvalidData` where what is noted is no layout.
pub fn of_file(pool: &Pool, file: Inode, usual: &Layout) -> io::Result<Layout> {
    match pool.attribute(&file.object(), IMAGE_LAYOUT)? {
        Some(text) => Ok(with(&read(text.as_bytes())?, usual)),
        None => Ok(usual.clone()),
    }
}

fn with(layout: &ImageLayout, usual: &Layout) -> Layout {
    let order = layout.fixed_object_size().and_then(|size| u8::try_from(size.ilog2()).ok());
    Layout {
        object_order: order.or(usual.object_order),
        striping: layout.striping().map(|(unit, count)| (unit, count.into())),
        ..usual.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_becomes_what_librbd_takes() {
        let usual = Layout { object_order: Some(23), ..Layout::default() };
        let of = |text: &str| {
            let layout = with(&read(text.as_bytes()).unwrap(), &usual);
            (layout.object_order, layout.striping)
        };
        assert_eq!(of("{}"), (Some(23), None));
        assert_eq!(of(r#"{"object_size":1048576}"#), (Some(20), None));
        // Units fit into objects of a known size.
        assert_eq!(of(r#"{"stripe_unit":65536,"stripe_count":4}"#), (Some(22), Some((65536, 4))));
        for wrong in ["", "4", r#"{"object_size":3}"#, r#"{"order":22}"#] {
            read(wrong.as_bytes()).unwrap_err();
        }
    }
}
