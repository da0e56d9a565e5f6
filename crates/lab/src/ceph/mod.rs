//! A Ceph cluster on this machine, for tests and experiments: `vmseal lab ceph`.
//!
//! One monitor, one manager and some OSDs as processes of this user, without systemd and containers, with all of
//! their files in one directory. The keys are made by Ceph's own tools and stay in that directory.
//!
//! ```text
//!  up ─► monitor: keys, store, process ─► manager ─► OSDs: key, (block,) store, process ─► all up and in ─► pool ─► all clean
//! ```
//! What a step makes has its final name only once it is whole: `up` goes on where an earlier one ended, however it
//! ended.
//!
//! | module | subject |
//! |---|---|
//! | [`arguments`] | what a user may choose |
//! | [`record`], [`layout`], [`configuration`] | what the cluster is, where its files are, `ceph.conf` |
//! | [`daemon`], [`processes`] | Ceph's programs that stay |
//! | [`block`] | encrypted OSDs: what serves their blocks |
//! | [`chroot`], [`mountinfo`] | Ceph's programs from a chroot; what is mounted |
//! | [`tools`], [`answers`] | those that do one thing and end, and what they answer |
//! | [`redundancy`] | how a pool keeps data when OSDs are lost |
//! | [`up`], [`pools`], [`status`], [`down`] | what can be done |
//! | [`own_pool`], [`mount`], [`client`] | a pool that is there for one experiment, its files, and what gets to it by Ceph's own library |
//! | [`room`] | what experiments may have the OSDs' files grow by, and what is free |
//! | [`setup`] | what of a cluster is encrypted, and choosing one by that |
//! | [`waiting`], [`progress`], [`error`] | how far it is, and why it failed |

pub mod answers;
pub mod arguments;
pub mod block;
pub mod chroot;
pub mod client;
pub mod configuration;
pub mod daemon;
pub mod down;
pub mod error;
pub mod layout;
pub mod mount;
pub mod mountinfo;
pub mod own_pool;
pub mod pools;
pub mod processes;
pub mod progress;
pub mod record;
pub mod redundancy;
pub mod room;
pub mod setup;
pub mod status;
pub mod tools;
pub mod up;
pub mod waiting;

pub use self::arguments::{Place, PoolArguments, UpArguments};
pub use self::error::CephError;
pub use self::progress::{Progress, narrate};
pub use self::status::Status;
