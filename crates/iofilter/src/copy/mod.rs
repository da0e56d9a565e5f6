//! Copying a whole disk: from an image, to one, and from a layer down to the next.

pub mod export;
pub mod import;
pub mod merge;
pub mod source;
pub mod sums;
