//! Copying a whole disk: from an image, and to one.

pub mod export;
pub mod import;
pub mod source;
