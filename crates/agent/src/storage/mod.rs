//! The datastores of a host and what is on them: disks, VM homes, replicas, images, exports.

pub(crate) mod builder;
pub(crate) mod cloud_init;
pub(crate) mod contents;
pub(crate) mod datastore;
pub(crate) mod descriptor;
pub(crate) mod disk;
pub(crate) mod disk_keys;
pub(crate) mod export;
pub(crate) mod exported;
pub(crate) mod facts;
pub(crate) mod file_identity;
pub(crate) mod filling;
pub(crate) mod grow;
pub(crate) mod home;
pub(crate) mod image;
pub(crate) mod locked;
pub(crate) mod mark;
pub(crate) mod measure;
pub(crate) mod medium;
pub(crate) mod mirror;
pub(crate) mod replica;
pub(crate) mod survey;
pub(crate) mod timed;
pub(crate) mod tpm_disk;
pub(crate) mod tpm_state;
pub(crate) mod transfer;
