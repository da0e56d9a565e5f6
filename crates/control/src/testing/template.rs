//! The initial state of each test's control plane: made once in a process, and copied.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OnceCell;
use vmseal_api::host::{Allocation, DatastoreLocation};
use vmseal_api::id::{DatastoreId, HostId, PolicyId, ProviderId};
use vmseal_api::server_backup::INVENTORY;
use vmseal_secret::SecretBytes;

use crate::providers::{Providers, sealed_file};
use crate::store::{Store, datastores, hosts, policies, providers};

/// Files, by their paths in a data directory. In memory, as a directory would not be removed at the end of the process.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// An inventory with a host, a datastore, a provider that creates keys, and two policies.
pub(super) struct Template {
    files: Files,
    pub(super) host: hosts::Host,
    pub(super) provider: ProviderId,
    pub(super) datastore: DatastoreId,
}

static EMPTY: OnceCell<Files> = OnceCell::const_new();
static TEMPLATE: OnceCell<Template> = OnceCell::const_new();

/// The passphrase of every provider.
pub(super) fn passphrase() -> SecretBytes {
    SecretBytes::from_wiped(&mut b"pass, as in the tests".to_vec()).unwrap()
}

/// An empty inventory in this directory. From here on deriving a key from a passphrase is cheap.
pub async fn new_store(directory: &Path) -> Store {
    sealed_file::cost_in_tests::lower();
    let empty = EMPTY.get_or_init(async || {
        let directory = tempfile::tempdir().unwrap();
        Store::open(&directory.path().join(INVENTORY)).await.unwrap().close().await;
        files(directory.path())
    });
    write(directory, empty.await);
    Store::open(&directory.join(INVENTORY)).await.unwrap()
}

impl Template {
    pub(super) async fn get() -> &'static Self {
        TEMPLATE.get_or_init(Self::make).await
    }

    /// Copies it to a directory, and opens its inventory.
    pub(super) async fn copy(&self, directory: &Path) -> Store {
        write(directory, &self.files);
        Store::open(&directory.join(INVENTORY)).await.unwrap()
    }

    async fn make() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(new_store(directory.path()).await);
        let keys = Providers::open(Arc::clone(&store), directory.path(), None).await.unwrap();
        let provider = keys.add("keys", Some(passphrase()), None, "me").await.unwrap().id;
        let host = hosts::Host {
            id: HostId::new(),
            name: "here".to_owned(),
            address: "127.0.0.1:1".to_owned(),
            description: None,
            maintenance: Default::default(),
        };
        let datastore = datastores::Datastore {
            id: DatastoreId::new(),
            name: "local".to_owned(),
            hosts: vec![datastores::OnHost {
                host: host.id,
                host_name: host.name.clone(),
                location: location(),
                mounted_key: None,
                mount: None,
            }],
            usage: None,
            pools: Vec::new(),
            key: None,
            osds: Default::default(),
        };
        let mut write = store.write().await.unwrap();
        providers::set_verified(&mut write, provider).await.unwrap();
        providers::set_default(&mut write, provider).await.unwrap();
        hosts::insert(&mut write, &host).await.unwrap();
        datastores::insert(&mut write, &datastore).await.unwrap();
        for (name, encryption) in [("encrypted", true), ("plain", false)] {
            let (id, name) = (PolicyId::new(), name.to_owned());
            let policy = policies::Policy {
                id,
                name,
                encryption,
                provider: None,
                allocation: Allocation::Thin,
                limits: Default::default(),
                cache: None,
                replica: None,
                cpu_model: None,
                downtime_milliseconds: None,
                messenger: None,
                osd_encryption: None,
                redundancy: Default::default(),
                image_layout: Default::default(),
            };
            policies::insert(&mut write, &policy).await.unwrap();
        }
        write.commit().await.unwrap();
        drop(keys);
        store.close().await;
        Self { files: files(directory.path()), host, provider, datastore: datastore.id }
    }
}

/// The directory of the datastore on the simulated host.
pub(super) fn location() -> DatastoreLocation {
    DatastoreLocation::Dir { path: "/store".into() }
}

fn files(root: &Path) -> Files {
    let (mut found, mut directories) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let content = std::fs::read(&path).unwrap();
                found.push((path.strip_prefix(root).unwrap().to_owned(), content));
            }
        }
    }
    found
}

fn write(root: &Path, files: &Files) {
    for (path, content) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}
