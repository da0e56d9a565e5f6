//! Copying a whole disk: from an image, to one, from a layer down to the next, and within its own file.

pub mod export;
pub mod import;
pub mod in_place;
pub mod merge;
pub mod source;
pub mod sums;
