//! Copying a whole disk: from an image, to one, from a layer down to the next, and within its own file.
//!
//! ```text
//!  import   image ──┐                  ┌──> disk, flushed now and then
//!  export   disk  ──┼──>  engine  ─────┼──> file; a backup: blocks with another sum than before
//!  merge    layer ──┤                  ├──> image below, or a copy of its own
//!  in_place part ───┘                  └──> part of the same file, between two notes in the journal
//! ```

pub mod engine;
pub mod export;
mod filled;
pub mod import;
pub mod in_place;
pub mod merge;
pub mod source;
pub mod sums;
mod to_chain;
