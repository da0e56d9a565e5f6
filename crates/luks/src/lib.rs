//! LUKS2 headers of vmseal's disks. libcryptsetup makes and changes them on a copy in memory; AWS-LC unlocks them. They
//! are checked before unlocking and authenticated after it, and written back in an order that survives a power
//! cut at any point. docs/formats/disk.md describes the format.
//!
//! | module | subject |
//! |---|---|
//! | [`store`] | where a header is stored: any backend |
//! | [`facts`] | the facts that the inventory pins about a disk |
//! | `layout` | the binary part of the two header copies |
//! | `metadata` | the JSON part: bounded, and exactly as expected |
//! | `token` | the `vmseal` token and its authentication code |
//! | `library` | libcryptsetup; the only unsafe code |
//! | `loaded`, `session` | a header in memory, and one that is checked and unlocked |
//! | `unlock` | the key in a slot |
//! | `write_back` | the order of writes |
//! | [`header`] | create, open, inspect, change of key, mark, repair, adopt |
//! | `export` | headers of exported volumes |

pub mod error;
mod export;
pub mod facts;
pub mod header;
mod layout;
mod library;
mod loaded;
mod metadata;
mod session;
pub mod store;
mod token;
mod unlock;
mod write_back;

pub use error::{CopyFault, HeaderError, Refusal};
pub use export::create_for_passphrase;
pub use facts::{DATA_OFFSET, Facts, Holes, Identity, Role, SECTOR_SIZE};
pub use header::{
    Opened, add_kek, adopt, create, drop_other_keks, inspect, mark_shared, open, repair,
};
pub use layout::{Copy, HeaderNotice};
pub use store::HeaderStore;
pub use token::KeyReference;
