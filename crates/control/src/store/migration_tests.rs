//! Inventories of earlier versions keep their data.

use std::str::FromStr;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection, raw_sql};

macro_rules! migration {
    ($name:literal) => {
        include_str!(concat!("../../migrations/", $name, ".sql"))
    };
}

/// The migrations that are tested here, and those that they need, in order.
const MIGRATIONS: [(u32, &str); 19] = [
    (1, migration!("0001_inventory")),
    (10, migration!("0010_allocation")),
    (11, migration!("0011_image_format")),
    (20, migration!("0020_kmip")),
    (30, migration!("0030_request_ids")),
    (31, migration!("0031_datastores_of_one_name")),
    (40, migration!("0040_recrypt")),
    (50, migration!("0050_key_requests")),
    (60, migration!("0060_disk_limits")),
    (61, migration!("0061_disk_caches")),
    (62, migration!("0062_disk_replicas")),
    (70, migration!("0070_kmip_next_key")),
    (80, migration!("0080_task_steps")),
    (90, migration!("0090_volumes_and_placements")),
    (91, migration!("0091_key_requests_moved")),
    (156, migration!("0156_proofs")),
    (200, migration!("0200_linked_clones")),
    (235, migration!("0235_proofs_of_a_vm")),
    (239, migration!("0239_disks_that_clones_stand_on")),
];

/// An inventory with the migrations before the one with this number.
async fn inventory_before(number: u32) -> SqliteConnection {
    let options = SqliteConnectOptions::from_str("sqlite::memory:").unwrap();
    let mut inventory = options.foreign_keys(true).connect().await.unwrap();
    for (_, sql) in MIGRATIONS.iter().filter(|(before, _)| *before < number) {
        raw_sql(*sql).execute(&mut inventory).await.unwrap();
    }
    inventory
}

/// Runs one migration, as sqlx does.
async fn migrate(inventory: &mut SqliteConnection, number: u32) {
    let sql = MIGRATIONS.iter().find(|(it, _)| *it == number).unwrap().1;
    let mut change = inventory.begin().await.unwrap();
    raw_sql(sql).execute(&mut *change).await.unwrap();
    change.commit().await.unwrap();
}

#[tokio::test]
async fn datastores_of_two_hosts_may_have_one_name_and_keep_their_disks() {
    const TWIN: &str = "INSERT INTO datastores VALUES ('e', 'local', 'i', '{}', 2, 1)";
    let mut inventory = inventory_before(31).await;
    raw_sql(
        "INSERT INTO hosts VALUES ('h', 'here', 'a', NULL), ('i', 'there', 'b', NULL);
         INSERT INTO policies (id, name, encryption) VALUES ('p', 'plain', 0);
         INSERT INTO vms (id, name, host_id, policy_id, vcpus, memory, lifecycle)
             VALUES ('v', 'web', 'h', 'p', 1, 1, 'ready');
         INSERT INTO datastores VALUES ('d', 'local', 'h', '{}', 2, 1);
         INSERT INTO disks (id, vm_id, position, name, datastore_id, size, encrypted)
             VALUES ('k', 'v', 0, 'root', 'd', 1, 0);",
    )
    .execute(&mut inventory)
    .await
    .unwrap();
    raw_sql(TWIN).execute(&mut inventory).await.unwrap_err();
    migrate(&mut inventory, 31).await;
    raw_sql(TWIN).execute(&mut inventory).await.unwrap();
    let (place, capacity): (String, i64) = sqlx::query_as(
        "SELECT s.name, s.capacity FROM disks d JOIN datastores s ON s.id = d.datastore_id",
    )
    .fetch_one(&mut inventory)
    .await
    .unwrap();
    assert_eq!((place.as_str(), capacity), ("local", 2));
    let gone = raw_sql("DELETE FROM datastores WHERE id = 'd'").execute(&mut inventory).await;
    assert!(gone.is_err(), "a datastore with disks can be removed");
}

const FULL: &str = "
    INSERT INTO hosts VALUES ('h', 'here', 'a', NULL), ('i', 'there', 'b', NULL);
    INSERT INTO providers VALUES ('n', 'native', 'native', 1, 1), ('m', 'kms', 'kmip', 0, 1);
    INSERT INTO kmip_servers VALUES ('m', 0, 'one', '::1', 5696, 'T');
    INSERT INTO kmip_clients VALUES ('m', 'F', 'C', 'G');
    INSERT INTO keys (provider_id, key_id, vm_id, check_value, destroyed, unwanted, task_id)
        VALUES ('m', '7', 'v', 'c', 1, 0, 't'), ('m', '8', 'v', 'c', 0, 1, NULL);
    INSERT INTO key_requests (provider_id, request, vm_id, server, marked, key_id, abandoned, mark, sent_at)
        VALUES ('m', 'r', 'v', 'one', 1, '7', 1, 'q', 'S');
    INSERT INTO policies (id, name, encryption, provider_id, allocation, limits, cache, replica)
        VALUES ('p', 'secret', 1, 'm', 'full', 'L', 5, 'R');
    INSERT INTO datastores VALUES ('d', 'local', 'h', '{\"a\":1}', 2, 1), ('e', 'second', 'h', '{\"b\":1}', 4, 3);
    INSERT INTO vms VALUES ('v', 'web', 'h', 'p', 2, 1024, 'm', '8', 'c', 'ready', 'running', 'Z');
    INSERT INTO disks (id, vm_id, position, name, datastore_id, size, encrypted, image, facts, deleting, allocation,
                       image_format, limits, cache, replica_id, replica_rate)
        VALUES ('k', 'v', 0, 'root', 'd', 9, 1, 'I', 'F', 0, 'full', 'qcow2', 'L', 6, 'e', 77),
               ('l', 'v', 1, 'data', 'e', 8, 0, NULL, NULL, 1, 'thin', NULL, '{}', NULL, NULL, NULL);
    INSERT INTO tasks (id, kind, target, vm_id, actor, operation, state, step, cancelled, created, ended, problem,
                       request_id, outputs, failed_step, waiting, parent, not_before)
        VALUES ('t', 'vm.start', 'web', 'v', 'me', 'O', 'waiting', 's', 1, 'C', NULL, 'P', 'R', '{}', 'f', 'W', 'u', 'N');
    INSERT INTO task_claims VALUES ('vm', 'v', 't');";

/// The result of a query as text, one line for each row.
async fn lines(inventory: &mut SqliteConnection, sql: &'static str) -> Vec<String> {
    sqlx::query_scalar(sql).fetch_all(inventory).await.unwrap()
}

#[tokio::test]
async fn volumes_placements_and_hosts_of_datastores_are_what_the_columns_said() {
    let mut inventory = inventory_before(90).await;
    raw_sql(FULL).execute(&mut inventory).await.unwrap();
    migrate(&mut inventory, 90).await;
    let i = &mut inventory;
    let sql = "SELECT concat_ws(' ', disk_id, role, datastore_id, generation, facts) FROM volumes ORDER BY 1";
    assert_eq!(lines(i, sql).await, ["k image d 1 F", "k replica e 1", "l image e 1"]);
    let sql = "SELECT concat_ws(' ', vm_id, role, host_id, generation) FROM placements";
    assert_eq!(lines(i, sql).await, ["v owner h 1"]);
    let sql = "SELECT concat_ws(' ', datastore_id, host_id, name, location) FROM datastore_hosts ORDER BY 1";
    assert_eq!(lines(i, sql).await, [r#"d h local {"a":1}"#, r#"e h second {"b":1}"#]);
    let sql = "SELECT concat_ws(' ', id, name, capacity, free) FROM datastores ORDER BY 1";
    assert_eq!(lines(i, sql).await, ["d local 2 1", "e second 4 3"]);
    let sql = "SELECT concat_ws(' ', id, name, policy_id, vcpus, memory, provider_id, key_id, key_check, lifecycle,
                                seen_power, seen_stopped) FROM vms";
    assert_eq!(lines(i, sql).await, ["v web p 2 1024 m 8 c ready running Z"]);
    let sql = "SELECT concat_ws(' ', id, vm_id, position, name, size, encrypted, image, image_format, deleting, allocation,
                                limits, cache, replica_rate) FROM disks ORDER BY 1";
    assert_eq!(
        lines(i, sql).await,
        ["k v 0 root 9 1 I qcow2 0 full L 6 77", "l v 1 data 8 0 1 thin {}"]
    );
    let sql =
        "SELECT concat_ws(' ', id, name, kind, is_default, verified) FROM providers ORDER BY 1";
    assert_eq!(lines(i, sql).await, ["m kms kmip 0 1", "n native native 1 1"]);
    let sql = "SELECT concat_ws(' ', s.provider_id, position, alias, host, port, trust, key_file, certificate,
                                next_key_file)
               FROM kmip_servers s JOIN kmip_clients c ON c.provider_id = s.provider_id";
    assert_eq!(lines(i, sql).await, ["m 0 one ::1 5696 T F C G"]);
    let sql = "SELECT concat_ws(' ', key_id, vm_id, check_value, destroyed, unwanted, task_id) FROM keys ORDER BY 1";
    assert_eq!(lines(i, sql).await, ["7 v c 1 0 t", "8 v c 0 1"]);
    let sql =
        "SELECT concat_ws(' ', request, vm_id, server, marked, key_id, abandoned, mark, sent_at)
               FROM key_requests";
    assert_eq!(lines(i, sql).await, ["r v one 1 7 1 q S"]);
    let sql = "SELECT concat_ws(' ', id, name, encryption, provider_id, allocation, limits, cache, replica)
               FROM policies";
    assert_eq!(lines(i, sql).await, ["p secret 1 m full L 5 R"]);
    let sql = "SELECT concat_ws(' ', id, kind, target, vm_id, actor, operation, state, step, cancelled, created, ended,
                                problem, request_id, outputs, failed_step, waiting, parent, not_before)
               FROM tasks";
    assert_eq!(lines(i, sql).await, ["t vm.start web v me O waiting s 1 C P R {} f W u N"]);
    let kept = lines(i, "SELECT name FROM sqlite_master WHERE name LIKE '%kept%'").await;
    assert_eq!(kept, [""; 0], "copies of the migration are left");
    let broken = lines(i, "SELECT \"table\" FROM pragma_foreign_key_check").await;
    assert_eq!(broken, [""; 0]);
    for (delete, why) in [
        ("DELETE FROM hosts WHERE id = 'h'", "a host that owns a VM"),
        ("DELETE FROM datastores WHERE id = 'e'", "a datastore with a replica"),
    ] {
        assert!(raw_sql(delete).execute(&mut *i).await.is_err(), "{why} can be deleted");
    }
    let twin = "INSERT INTO datastores VALUES ('f', 'local', 2, 1);
                INSERT INTO datastore_hosts VALUES ('f', 'h', 'local', '{}')";
    assert!(
        raw_sql(twin).execute(&mut *i).await.is_err(),
        "two datastores of a host have one name"
    );
}

#[tokio::test]
async fn the_last_proof_of_a_vm_is_kept_as_one_of_several() {
    let mut inventory = inventory_before(235).await;
    raw_sql(
        "INSERT INTO policies (id, name, encryption, allocation, limits)
             VALUES ('p', 'plain', FALSE, 'thin', '{}');
         INSERT INTO vms (id, name, policy_id, vcpus, memory, lifecycle)
             VALUES ('v', 'web', 'p', 1, 1, 'ready');
         INSERT INTO proofs VALUES ('v', 't', 'S');",
    )
    .execute(&mut inventory)
    .await
    .unwrap();
    migrate(&mut inventory, 235).await;
    let i = &mut inventory;
    raw_sql("INSERT INTO proofs (vm_id, task_id, digest, signed) VALUES ('v', 'u', 'D', 'T')")
        .execute(&mut *i)
        .await
        .unwrap();
    let sql = "SELECT concat_ws(' ', vm_id, task_id, digest, signed) FROM proofs ORDER BY number";
    assert_eq!(lines(i, sql).await, ["v t S", "v u D T"]);
    raw_sql("DELETE FROM vms").execute(&mut *i).await.unwrap();
    assert_eq!(lines(i, "SELECT vm_id FROM proofs").await, [""; 0]);
}

#[tokio::test]
async fn disks_of_clones_stand_on_those_of_the_same_name() {
    let mut inventory = inventory_before(239).await;
    raw_sql(
        "INSERT INTO policies (id, name, encryption, allocation, limits)
             VALUES ('p', 'plain', FALSE, 'thin', '{}');
         INSERT INTO vms (id, name, policy_id, vcpus, memory, lifecycle)
             VALUES ('v', 'web', 'p', 1, 1, 'ready'), ('c', 'one', 'p', 1, 1, 'ready');
         INSERT INTO disks (id, vm_id, position, name, size, encrypted, allocation, limits)
             VALUES ('v0', 'v', 0, 'a', 1, FALSE, 'thin', '{}'), ('v1', 'v', 1, 'b', 1, FALSE, 'thin', '{}'),
                    ('c0', 'c', 0, 'b', 1, FALSE, 'thin', '{}'), ('c1', 'c', 1, 'x', 1, FALSE, 'thin', '{}');
         INSERT INTO linked_disks VALUES ('c0', 'v', 'web', 's', 'base'), ('c1', 'gone', 'old', 's', 'base');",
    )
    .execute(&mut inventory)
    .await
    .unwrap();
    migrate(&mut inventory, 239).await;
    let sql = "SELECT concat_ws(' ', disk_id, source_disk) FROM linked_disks ORDER BY disk_id";
    assert_eq!(lines(&mut inventory, sql).await, ["c0 v1", "c1"]);
}
