//! A backup of a control plane with VMs, restored, damaged, and interrupted.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use vmseal_api::model::TaskState;

use super::make::{make, sweep};
use super::restore::{restore, verify};
use super::*;
use crate::operation::Operation;
use crate::providers::Providers;
use crate::setup::authority::Authority;
use crate::setup::initialise::{InitialiseError, RESTORING, initialise};
use crate::store::events::NewEvent;
use crate::store::{Store, alarms, events, placements, providers, tasks, vms};
use crate::testing::Fixture;

fn secret(text: &str) -> SecretBytes {
    SecretBytes::from_wiped(&mut text.as_bytes().to_vec()).unwrap()
}

fn passphrase() -> SecretBytes {
    secret("of the backup")
}

/// A control plane whose authority has been made, as at the first start of a server.
async fn server() -> Fixture {
    let fixture = Fixture::new().await;
    Authority::open(fixture.directory.path()).unwrap();
    fixture
}

async fn backed_up(fixture: &Fixture, to: &Path) -> PathBuf {
    let mut made = make(&fixture.store, fixture.directory.path(), passphrase()).await.unwrap();
    let mut bytes = Vec::new();
    made.file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len() as u64, made.length);
    let file = to.join("backup");
    std::fs::write(&file, bytes).unwrap();
    file
}

/// All events of an inventory.
async fn told(store: &Store) -> Vec<vmseal_api::model::Event> {
    let mut read = store.read().await.unwrap();
    events::after(&mut read, 0, u32::MAX, &Default::default()).await.unwrap()
}

/// All files of a directory with their contents.
fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut found, mut todo) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                found.insert(path.clone(), std::fs::read(&path).unwrap());
            }
        }
    }
    found
}

#[tokio::test]
async fn a_restored_server_has_the_inventory_the_authority_and_the_keys() {
    let fixture = server().await;
    let vm = fixture.made("web", "encrypted").await;
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(fixture.directory.path().join("admin.token"), "the token\n").unwrap();
    let backup = backed_up(&fixture, elsewhere.path()).await;
    // It is not in it.
    fixture.made("later", "encrypted").await;
    assert_eq!(verify(&backup, &passphrase()).unwrap().files.len(), 5);

    let data_dir = elsewhere.path().join("restored");
    let restored = restore(&backup, &passphrase(), &data_dir).await.unwrap();
    let count = restored.inventory;
    assert_eq!((count.hosts, count.vms, count.providers, count.interrupted), (1, 1, 1, 0));
    assert!(restored.has_token);
    let same = |name: &str| {
        let read = |root: &Path| std::fs::read(root.join(name)).unwrap();
        assert!(read(&data_dir) == read(fixture.directory.path()), "{name}");
    };
    ["ca.key", "ca.pem", "admin.token"].into_iter().for_each(same);
    let started = initialise(&data_dir, vec!["localhost".to_owned()]).await.unwrap();
    let store = std::sync::Arc::new(started.store);
    let known = vms::get(&mut store.read().await.unwrap(), vm).await.unwrap().unwrap();
    // Placements that were made since the backup have left leases of later generations than those in it.
    let mut read = store.read().await.unwrap();
    assert!(placements::generation(&mut read, vm).await.unwrap() > 1_000_000_000);
    drop(read);
    let keys = Providers::open(std::sync::Arc::clone(&store), &data_dir, None).await.unwrap();
    let provider = providers::find(&mut store.read().await.unwrap(), "keys").await.unwrap();
    keys.unlock(&provider.unwrap(), secret("pass, as in the tests"), "me").await.unwrap();
    let key = known.key.unwrap();
    keys.get(key.provider).unwrap().get_key(vm, &key).await.unwrap();
    assert!(told(&store).await.iter().any(|event| event.kind == "server.restored"));
    // Nothing in the backup is readable: neither names nor keys.
    let bytes = std::fs::read(&backup).unwrap();
    for text in ["encrypted", "SQLite", "PRIVATE KEY", "the token"] {
        assert!(!bytes.windows(text.len()).any(|window| window == text.as_bytes()), "{text}");
    }
}

#[tokio::test]
async fn a_backup_is_of_one_instant_while_the_server_writes() {
    let fixture = server().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let (store, stop) =
        (std::sync::Arc::clone(&fixture.store), tokio::sync::watch::Sender::new(false));
    let writing = {
        let stop = stop.clone();
        tokio::spawn(async move {
            // Both events of a number, or none.
            for number in 0.. {
                let mut write = store.write().await.unwrap();
                for kind in ["one", "two"] {
                    let detail = "x".repeat(4000);
                    let target = format!("{number}");
                    let event = NewEvent { kind, actor: "me", target: &target, detail: &detail };
                    write.event(event).await.unwrap();
                }
                write.commit().await.unwrap();
                if *stop.borrow() {
                    return;
                }
            }
        })
    };
    for round in 0..5 {
        let backup = backed_up(&fixture, elsewhere.path()).await;
        let data_dir = elsewhere.path().join(format!("restored{round}"));
        restore(&backup, &passphrase(), &data_dir).await.unwrap();
        let store = Store::open(&data_dir.join("inventory.db")).await.unwrap();
        let told = told(&store).await;
        let of = |kind: &str| told.iter().filter(|event| event.kind == kind).count();
        assert_eq!(of("one"), of("two"), "half of a transaction is in the backup");
        store.close().await;
    }
    stop.send_replace(true);
    writing.await.unwrap();
    let left = files(fixture.directory.path());
    assert!(left.keys().all(|path| !path.to_string_lossy().contains("backup-")), "{left:?}");
}

#[tokio::test]
async fn a_wrong_passphrase_or_a_changed_or_cut_file_restores_nothing() {
    let fixture = server().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = backed_up(&fixture, elsewhere.path()).await;
    let data_dir = elsewhere.path().join("restored");
    let refused = restore(&backup, &secret("another one"), &data_dir).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::KeyMismatch, "{refused}");
    let whole = std::fs::read(&backup).unwrap();
    let length = whole.len();
    let mut spoiled = Vec::new();
    for at in [0, 9, 13, 40, 200, length / 2, length - 1] {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        spoiled.push((format!("byte {at} changed"), changed));
    }
    for to in [0, 15, 16, 100, 140, length / 2, length - 1] {
        spoiled.push((format!("cut at {to}"), whole[..to].to_vec()));
    }
    spoiled.push(("something added".to_owned(), [&whole[..], b"x"].concat()));
    for (what, bytes) in spoiled {
        std::fs::File::create(&backup).unwrap().write_all(&bytes).unwrap();
        verify(&backup, &passphrase()).expect_err(&what);
        let refused = restore(&backup, &passphrase(), &data_dir).await.expect_err(&what);
        let known = [ErrorCode::Damaged, ErrorCode::KeyMismatch, ErrorCode::Unsupported];
        assert!(known.contains(&refused.code), "{what}: {refused}");
        assert!(!data_dir.exists(), "{what}: something is left");
    }
    // An empty directory stays one.
    std::fs::create_dir(&data_dir).unwrap();
    restore(&backup, &passphrase(), &data_dir).await.unwrap_err();
    assert_eq!(files(&data_dir).len(), 0);
}

#[tokio::test]
async fn a_directory_with_anything_in_it_is_refused_and_stays_as_it_was() {
    let fixture = server().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = backed_up(&fixture, elsewhere.path()).await;
    for name in ["ca.key", "notes.txt"] {
        let data_dir = elsewhere.path().join(name);
        std::fs::create_dir(&data_dir).unwrap();
        std::fs::write(data_dir.join(name), "mine").unwrap();
        let before = files(&data_dir);
        let refused = restore(&backup, &passphrase(), &data_dir).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::AlreadyExists, "{refused}");
        assert!(refused.detail.contains(name), "{refused}");
        assert_eq!(files(&data_dir), before);
    }
}

/// As if the process had ended after each file.
#[tokio::test]
async fn an_interrupted_restore_is_no_server_and_is_begun_again() {
    let fixture = server().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = backed_up(&fixture, elsewhere.path()).await;
    let whole = elsewhere.path().join("whole");
    restore(&backup, &passphrase(), &whole).await.unwrap();
    for part in ["ca.key", "ca.pem", "providers/x/key", "inventory.db.new", "inventory.db"] {
        let data_dir = elsewhere.path().join(part.replace('/', "-"));
        std::fs::create_dir_all(data_dir.join(part).parent().unwrap()).unwrap();
        std::fs::write(data_dir.join(RESTORING), "").unwrap();
        std::fs::write(data_dir.join(part), "a part").unwrap();
        let started = initialise(&data_dir, vec!["localhost".to_owned()]).await;
        assert!(matches!(started, Err(InitialiseError::Restoring(_))), "{part}");
        restore(&backup, &passphrase(), &data_dir).await.unwrap();
        let names = |root: &Path| {
            let below = files(root);
            below
                .into_keys()
                .map(|it| it.strip_prefix(root).unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&data_dir), names(&whole), "{part}");
        initialise(&data_dir, vec!["localhost".to_owned()]).await.unwrap();
    }
}

/// What was under way when the backup was made has ended since, in a way that the backup does not tell.
#[tokio::test]
async fn a_restored_server_resumes_no_task_and_forgets_vms_that_were_being_made() {
    let fixture = server().await;
    let kept = fixture.made("kept", "encrypted").await;
    fixture.agent.set_work(std::time::Duration::from_secs(600));
    let (made, task) = fixture.create("web", "encrypted").await;
    fixture
        .eventually("its disks are being made", async || {
            (fixture.task(task).await.step == "create-disks").then_some(())
        })
        .await;
    let started = fixture.begin(Operation::StartVm { vm: kept, boot_once: None }, "kept").await;
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = backed_up(&fixture, elsewhere.path()).await;
    let data_dir = elsewhere.path().join("restored");
    let restored = restore(&backup, &passphrase(), &data_dir).await.unwrap();
    assert_eq!((restored.inventory.interrupted, restored.inventory.vms), (2, 1));
    let store = Store::open(&data_dir.join("inventory.db")).await.unwrap();
    let mut read = store.read().await.unwrap();
    assert!(tasks::open(&mut read).await.unwrap().is_empty(), "a task would be resumed");
    for id in [task, started] {
        let ended = tasks::get(&mut read, &id.to_string()).await.unwrap().unwrap();
        assert_eq!(ended.state, TaskState::Unknown);
        assert!(ended.problem.unwrap().detail.contains("restored from a backup"));
    }
    assert!(vms::get(&mut read, made).await.unwrap().is_none());
    assert!(vms::get(&mut read, kept).await.unwrap().is_some());
    assert!(tasks::holding(&mut read, kept).await.unwrap().is_none(), "it stays claimed");
    let raised = alarms::list(&mut read).await.unwrap();
    assert_eq!(raised.iter().filter(|alarm| alarm.code == "task-unfinished").count(), 1);
}

#[test]
fn what_a_backup_left_that_did_not_end_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let unfinished = format!("backup-{}", uuid::Uuid::new_v4());
    for name in [unfinished.as_str(), "backup-2026-11-23", "inventory.db"] {
        std::fs::write(directory.path().join(name), "").unwrap();
    }
    sweep(directory.path());
    let left: Vec<_> = files(directory.path()).into_keys().collect();
    // An operator's own backup stays.
    assert_eq!(left, ["backup-2026-11-23", "inventory.db"].map(|name| directory.path().join(name)));
}
