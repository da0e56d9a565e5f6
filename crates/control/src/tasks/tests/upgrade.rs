//! Tasks that another version of vmseal began.

use sqlx::Connection;

use super::*;

/// The titles of the steps, which versions before step names stored, and their names now.
const OLD_STEPS: [(&str, &str); 23] = [
    ("reserve the names", "reserve"),
    ("make the key", "make-key"),
    ("register on the host", "register"),
    ("deliver the key", "deliver-key"),
    ("create the disks", "create-disks"),
    ("finish", "finish"),
    ("register and deliver the key", "prepare"),
    ("power on", "power-on"),
    ("power off", "power-off"),
    ("write the file", "write-file"),
    ("give the file its name", "name-file"),
    ("open every disk with the key that it has", "check-key"),
    ("make the new key", "make-new-key"),
    ("add the new key to the disks", "add-new-key"),
    ("give the VM the new key", "switch-key"),
    ("deliver the new key", "deliver-new-key"),
    ("remove the old key from the disks", "drop-old-key"),
    ("destroy the old key", "destroy-old-key"),
    ("mark as being deleted", "mark"),
    ("delete the disks", "delete-disks"),
    ("unregister from the host", "forget"),
    ("destroy the key", "destroy-key"),
    ("remove from the inventory", "remove-rows"),
];

/// The version of the schema that added step names.
const STEP_NAMES: i64 = 80;

#[tokio::test]
async fn tasks_of_the_version_before_step_names_go_on_at_their_steps() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path).create_if_missing(true);
    let mut old = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let mut migrator = sqlx::migrate!();
    let before: Vec<_> =
        migrator.migrations.iter().filter(|it| it.version < STEP_NAMES).cloned().collect();
    migrator.migrations = before.into();
    migrator.run(&mut old).await.unwrap();
    for (position, (title, _)) in OLD_STEPS.iter().enumerate() {
        let vm = VmId::new();
        sqlx::query(
            "INSERT INTO tasks (id, kind, target, vm_id, actor, operation, state, position, step, created)
             VALUES (?, 'vm.start', ?, ?, 'me', ?, ?, ?, ?, '2026-01-01T00:00:00Z')",
        )
        .bind(vmseal_api::id::TaskId::new().to_string())
        .bind(title)
        .bind(vm.to_string())
        .bind(format!(r#"{{"do":"start_vm","vm":"{vm}"}}"#))
        .bind(if position % 2 == 0 { "running" } else { "undoing" })
        .bind(position as i64)
        .bind(title)
        .execute(&mut old)
        .await
        .unwrap();
    }
    old.close().await.unwrap();
    let store = crate::store::Store::open(&path).await.unwrap();
    let mut read = store.read().await.unwrap();
    let open = crate::store::tasks::open(&mut read).await.unwrap();
    assert_eq!(open.len(), OLD_STEPS.len());
    for (title, name) in OLD_STEPS {
        let task = open.iter().find(|task| task.target == title).unwrap();
        assert_eq!(task.step, name);
        let vm = task.operation.vm().unwrap();
        let holding = crate::store::tasks::holding(&mut read, vm).await.unwrap();
        assert_eq!(holding.unwrap().id, task.id, "{title}: it does not hold its VM");
        assert!(matches!(task.state, TaskState::Running | TaskState::RollingBack), "{title}");
    }
    // Every current step is reached from an old title.
    for kind in [Kind::Create, Kind::Start, Kind::Stop, Kind::Delete, Kind::Export, Kind::Recrypt] {
        for step in kind.steps() {
            assert!(OLD_STEPS.iter().any(|(_, name)| *name == step), "{step}");
        }
    }
}

/// Rows that this version cannot read: the server starts, everything else works, and an alarm says what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_cannot_be_read_is_left_as_it_is_until_it_is_resolved() {
    for (column, value) in [
        ("operation", "{\"do\":\"defragment_vm\"}"),
        ("operation", "rubbish"),
        ("state", "levitating"),
        ("step", "a-step-of-another-version"),
        ("created", "yesterday"),
        ("outputs", "[]"),
    ] {
        let what = format!("{column} {value}");
        let mut fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        let (faults, done) = at("prepare", TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
        fixture
            .eventually("it crashes", async || (done.load(Ordering::SeqCst) > 0).then_some(()))
            .await;
        let mut write = fixture.store.write().await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(format!("UPDATE tasks SET {column} = ? WHERE id = ?")))
            .bind(value)
            .bind(task.to_string())
            .execute(&mut *write)
            .await
            .unwrap();
        write.commit().await.unwrap();
        fixture.restart(|_| {}).await;
        fixture
            .eventually("an alarm", async || {
                fixture.alarms().await.contains(&"task-unreadable web".to_owned()).then_some(())
            })
            .await;
        // Other tasks run; this VM is held.
        fixture.made("other", "encrypted").await;
        let mut write = fixture.store.write().await.unwrap();
        let second =
            Engine::record(&mut write, Operation::StartVm { vm, boot_once: None }, "web", "me")
                .await;
        assert_eq!(second.unwrap_err().code, ErrorCode::WrongState, "{what}");
        drop(write);
        let shown = fixture.engine.shown(&fixture.task(task).await);
        assert_eq!((shown.kind.as_str(), shown.ended), ("vm.start", None), "{what}");

        let resolved = fixture.engine.resolve(&task.to_string(), "me").await.unwrap();
        assert_eq!(resolved.state, TaskState::Unknown, "{what}");
        assert!(fixture.alarms().await.is_empty(), "{what}");
        let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
        assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
        let refused = fixture.engine.resolve(&task.to_string(), "me").await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{what}");
    }
}
