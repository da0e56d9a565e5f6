//! Disks from the inside and the outside: chains and layers, the front end of guests, and the properties that must
//! always hold. One program, as most of these share how a disk is used, stored and killed.

#![allow(clippy::unwrap_used)] // a test

mod cache;
mod channel;
mod channel_server;
mod history;
mod in_place;
mod layers;
mod model;
mod moved;
mod nbd;
mod nbd_server;
mod platter;
mod replicate;
mod replicated;
mod seed;
mod stall;
mod successor;
mod vhost_user;
mod waiting;
mod wake;
