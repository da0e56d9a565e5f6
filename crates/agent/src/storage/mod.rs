//! The datastores of a host and what is on them: disks, VM homes, replicas, images, exports.

pub(crate) mod builder;
pub(crate) mod cloud_init;
pub(crate) mod contents;
pub(crate) mod datastore;
pub(crate) mod disk;
pub(crate) mod disk_keys;
pub(crate) mod export;
pub(crate) mod exported;
pub(crate) mod filling;
pub(crate) mod home;
pub(crate) mod image;
pub(crate) mod locked;
pub(crate) mod mark;
pub(crate) mod measure;
pub(crate) mod replica;
pub(crate) mod timed;
pub(crate) mod transfer;
