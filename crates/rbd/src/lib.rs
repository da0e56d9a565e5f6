//! `vmseal-rbd`: a Ceph pool as a datastore.
//!
//! It mounts a pool (FUSE) as a directory tree in which long files are RBD images and short ones objects. So all that vmseal does with a
//! directory, it does with a pool: disks with their LUKS2 headers are images, each in one piece, and descriptors and notes stand beside
//! them. Encryption is above, in `vmseal-filter`: this process sees ciphertext and has no key of a disk. It has the pool's own key
//! (cephx), threads and memory of librbd, and a connection to the network, and `vmseal-filter` has none of them.
//!
//! ```text
//!  vmseal-filter, agent ── files ──> FUSE ──> file_system ─► open_files ─► open_file ─► image ──> librbd
//!                                                       └──► directory ──────────────► cluster ─> librados
//!  vmseal-filter ── a disk's data ──> shared memory ──> channel ─► image ──> librbd
//! ```
//! | module | subject |
//! |---|---|
//! | [`file_system`] | FUSE's requests |
//! | [`workers`] | threads for requests that wait for the cluster |
//! | [`monitors`] | what monitors are asked, by threads of their own |
//! | [`open_files`], [`open_file`] | files that are open: an object, or an image |
//! | [`holes`] | where a file has data |
//! | [`rooms`] | how much room images take |
//! | [`locks`] | locks of files, between hosts |
//! | [`directory`] | names, and the removal of files |
//! | [`inode`] | what the objects in the pool are called |
//! | [`image`], [`cluster`] | librbd and librados, in safe Rust |
//! | [`image_layout`] | how new images are cut into objects |
//! | [`image_state`] | whether anybody may have written to an image since |
//! | [`create`] | makes the pools of a new datastore |
//! | [`pools`] | how the cluster keeps what is stored, and what room there is |
//! | [`osds`] | whether the cluster's OSDs are encrypted |
//! | [`library`] | their functions |
//! | [`buffers`], [`parts`] | memory for reads, and memory that filters share |
//! | [`channel`] | the way of a disk's data without FUSE |
//! | [`in_flight`] | how much filters may have in flight by it |
//! | [`trial`] | whether a user may change what is in a pool |
//! | [`predecessors`] | who served the mount before, for their locks |
//! | [`confinement`] | what the process may still do |

mod answers;
pub mod buffers;
pub mod channel;
pub mod cluster;
pub mod confinement;
pub mod create;
pub mod directory;
pub mod file_system;
pub mod holes;
pub mod image;
pub mod image_layout;
pub mod image_state;
pub mod in_flight;
pub mod inode;
pub mod library;
pub mod locks;
pub mod monitors;
pub mod open_file;
pub mod open_files;
pub mod osds;
pub mod parts;
pub mod pools;
pub mod predecessors;
pub mod rooms;
pub mod trial;
pub mod workers;
