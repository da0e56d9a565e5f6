//! The bodies of HTTP requests and answers, of the REST API and between server and agent. The first
//! byte says of which type the rest is. What is accepted is written as it was read.

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use vmseal_api::host::{DatastoreSpec, HostDescription, HostState, ImageSource, SealedKey, VmSpec};
use vmseal_api::request::{
    AddDatastore, AddPolicy, AddProvider, CreateVm, GivePassphrase, JoinHost, StopVm, VerifyBackup,
};

fn body<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<T>(bytes) else { return };
    let written = serde_json::to_vec(&value).unwrap();
    assert_eq!(serde_json::from_slice::<T>(&written).unwrap(), value);
}

const KINDS: &[fn(&[u8])] = &[
    body::<JoinHost>,
    body::<AddDatastore>,
    body::<AddProvider>,
    body::<GivePassphrase>,
    body::<VerifyBackup>,
    body::<AddPolicy>,
    body::<CreateVm>,
    body::<StopVm>,
    body::<VmSpec>,
    body::<Option<ImageSource>>,
    body::<DatastoreSpec>,
    body::<SealedKey>,
    body::<HostState>,
    body::<HostDescription>,
];

/// See the module.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    KINDS[usize::from(kind.wrapping_sub(b'a')) % KINDS.len()](bytes);
}
