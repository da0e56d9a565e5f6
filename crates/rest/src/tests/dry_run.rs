//! Dry runs.

use std::path::Path;

use super::*;

/// Everything that a request could have changed: the inventory, the events, and the files of providers.
async fn everything(api: &Api) -> Vec<Value> {
    let mut all = Vec::new();
    for list in ["hosts", "datastores", "providers", "policies", "vms", "tasks", "events"] {
        all.push(api.get(&format!("{list}?limit=1000")).await.body["items"].clone());
    }
    let mut files: Vec<_> = std::fs::read_dir(api.fixture.directory.path().join("providers"))
        .unwrap()
        .map(|entry| entry.unwrap().path().display().to_string())
        .collect();
    files.sort();
    all.push(json!(files));
    let keys: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM keys")
        .fetch_one(&mut *api.fixture.store.read().await.unwrap())
        .await
        .unwrap();
    all.push(json!(keys));
    all
}

#[tokio::test]
async fn a_dry_run_says_what_would_be_done_and_changes_nothing() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let mut open = vm_with("/policy", json!("plain"));
    open["name"] = json!("open");
    api.done(api.post("vms", open).await).await;
    assert_eq!(
        api.post("policies", json!({ "name": "free", "encryption": true })).await.status,
        201
    );
    let backup =
        api.post("providers/keys/backup", json!({ "passphrase": api.sealed("keys", "b") })).await;
    let backup = json!({ "backup": backup.body["backup"], "passphrase": api.sealed("keys", "b") });
    let export = json!({ "to": "/out/web.img", "format": "raw", "plaintext": true });
    let given = |passphrase: &str| json!({ "passphrase": api.sealed("keys", passphrase) });
    let of_server = json!({ "passphrase": api.sealed("backup of the server", "secret of it") });
    let (before, calls) = (everything(&api).await, api.fixture.agent.calls().len());
    let policy = json!({ "name": "new", "encryption": true });
    let datastore = |path: &str| json!({ "name": "more", "host": "here", "location": { "kind": "dir", "path": path } });
    let provider = json!({ "name": "other", "passphrase": api.sealed("other", "pass") });
    for (method, path, body, kind, step) in [
        (Method::POST, "vms", vm_with("/name", json!("two")), "vm.create", "make the key"),
        (Method::POST, "vms/web/start", Value::Null, "vm.start", "power on"),
        (Method::POST, "vms/web/stop", Value::Null, "vm.stop", "power off"),
        (Method::POST, "vms/web/recrypt", json!({}), "vm.recrypt", "destroy the old key"),
        (
            Method::POST,
            "vms/web/recrypt",
            json!({ "deep": true }),
            "vm.recrypt-deep",
            "use the copies",
        ),
        (Method::POST, "vms/web/decrypt", Value::Null, "vm.decrypt", "destroy the key"),
        (
            Method::POST,
            "vms/open/encrypt",
            json!({ "policy": "encrypted" }),
            "vm.encrypt",
            "make the key",
        ),
        (Method::DELETE, "vms/web", Value::Null, "vm.delete", "destroy the key"),
        (Method::POST, "policies", policy, "policy.create", "add a policy that encrypts"),
        (Method::DELETE, "policies/free", Value::Null, "policy.delete", "remove it"),
        (Method::POST, "datastores", datastore("/more"), "datastore.add", "mark /more"),
        (Method::POST, "vms/web/disks/root/export", export, "disk.export", "write the file"),
        (Method::POST, "providers/keys/unlock", given("pass"), "provider.unlock", "unlock it"),
        (Method::POST, "providers/keys/backup", given("b"), "provider.backup", "as a backup"),
        (Method::POST, "providers/keys/verify", backup, "provider.verify", "holds its key"),
        (Method::POST, "providers/keys/default", Value::Null, "provider.default", "use it"),
        (Method::POST, "hosts/here/drain", json!({}), "host.drain", "place no more VMs"),
        (Method::POST, "hosts/here/undrain", json!({}), "host.undrain", "none is moved back"),
        (Method::POST, "hosts/tokens", Value::Null, "host.token", "15 minutes"),
        (Method::POST, "providers", provider, "provider.add", "make its key"),
        (Method::POST, "server/backup", of_server, "server.backup", "seal inventory"),
    ] {
        let answer = api.raw(method, &format!("{path}?dry_run=true"), body.to_string()).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        assert_eq!(answer.body["kind"], kind);
        let steps = answer.body["steps"].to_string();
        assert!(steps.contains(step), "{path}: {steps}");
    }
    assert_eq!(everything(&api).await, before);
    let told = &api.fixture.agent.calls()[calls..];
    // These only read.
    let harmless = [
        "ExamineDatastore",
        "ExamineDisk",
        "ExamineNic",
        "MeasureKept",
        "MeasureMedium",
        "ExamineJob",
        "ExamineChange",
        "MeasureDatastore",
        "SurveyDatastore",
    ];
    assert!(told.iter().all(|call| harmless.contains(&&*format!("{call:?}"))), "{told:?}");
    assert_eq!(api.fixture.agent.exports(), (Vec::new(), 0));
}

#[tokio::test]
async fn a_dry_run_is_refused_as_the_request_would_be() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let before = everything(&api).await;
    let taken = json!({ "name": "encrypted", "encryption": true });
    let given = |passphrase: &str| json!({ "passphrase": api.sealed("keys", passphrase) });
    let place = |path: &str| json!({ "name": "more", "host": "here", "location": { "kind": "dir", "path": path } });
    let export = json!({ "to": "out", "format": "raw", "plaintext": true });
    let none = "providers/none/default";
    let no_backup = json!({ "backup": "", "passphrase": api.sealed("keys", "b") });
    for (method, path, body, status) in [
        (Method::POST, "vms", vm(), 409),
        (Method::POST, "vms", vm_with("/policy", json!("none")), 404),
        (Method::POST, "vms", vm_with("/memory", json!(1)), 400),
        (Method::POST, "vms/none/start", Value::Null, 404),
        (Method::POST, "vms/web/recrypt", json!({ "provider": "none" }), 404),
        (Method::DELETE, "policies/encrypted", Value::Null, 409),
        (Method::DELETE, "datastores/local", Value::Null, 409),
        (Method::DELETE, "providers/keys", Value::Null, 409),
        (Method::DELETE, "hosts/here", Value::Null, 409),
        (Method::POST, "hosts/none/drain", json!({}), 404),
        (Method::POST, "hosts/here/drain", json!({ "parallel": 17 }), 400),
        (Method::POST, "policies", taken, 409),
        (Method::POST, "datastores", place("/missing"), 400),
        (Method::POST, "vms/web/disks/root/export", export, 400),
        (Method::POST, "providers/keys/unlock", given("wrong"), 422),
        (Method::POST, "providers/keys/verify", no_backup, 422),
        (Method::POST, none, Value::Null, 404),
        (Method::POST, "tasks/x/cancel", Value::Null, 404),
        (Method::POST, "tasks/x/pause", Value::Null, 404),
        (Method::POST, "tasks/x/resume", Value::Null, 404),
        (Method::PATCH, "tasks/x", json!({ "rate": 0 }), 404),
        (Method::PATCH, "tasks/x", json!({ "rate": 1 }), 400),
    ] {
        let answer = api.raw(method, &format!("{path}?dry_run=true"), body.to_string()).await;
        assert_eq!(answer.status.as_u16(), status, "{path}: {}", answer.body);
    }
    // The host checks images and free space; no key is created for that.
    let from = |image: &str| {
        let disk = json!({ "name": "root", "datastore": "local", "size": 1 << 20, "image": image, "format": "qcow2" });
        let mut request = vm_with("/name", json!("two"));
        request["disks"] = json!([vm()["disks"][0], disk]);
        request
    };
    for image in ["/no/such/image", "/etc/hostname"] {
        let mut request = from(image);
        request["disks"][0]["name"] = json!("first");
        // Nor is a task begun that would fail.
        for path in ["vms?dry_run=true", "vms"] {
            let answer = api.post(path, request.clone()).await;
            answer.assert_field("disks[1].image");
            assert!(answer.body["detail"].to_string().contains(image), "{}", answer.body);
        }
        let disk = json!({ "name": "more", "size": 1 << 20, "image": image, "format": "qcow2" });
        for path in ["vms/web/disks?dry_run=true", "vms/web/disks"] {
            api.post(path, disk.clone()).await.assert_field("image");
        }
    }
    // A request without dry runs is not carried out instead, however the query is spelt.
    for query in ["dry_run=true", "dry%5Frun=true", "x=1"] {
        let answer = api.post(&format!("providers/keys/test?{query}"), json!({})).await;
        answer.assert_field("query");
        let answer = api.post("vms/web/start?dry_run=maybe", Value::Null).await;
        answer.assert_field("query");
    }
    api.post("vms/web/start?dryrun=true", Value::Null).await.assert_field("query");
    assert_eq!(everything(&api).await, before);
}

/// The request for a VM with so much memory, so many processors, and disks of these sizes.
fn larger(memory: u64, vcpus: u32, disks: &[u64]) -> Value {
    let disks: Vec<_> = disks
        .iter()
        .enumerate()
        .map(|(index, size)| json!({ "name": format!("d{index}"), "datastore": "local", "size": size }))
        .collect();
    let mut request = vm_with("/name", json!("large"));
    request["memory"] = json!(memory);
    request["vcpus"] = json!(vcpus);
    request["disks"] = json!(disks);
    request
}

#[tokio::test]
async fn what_the_host_has_no_room_for_is_refused_or_said() {
    const DISK: u64 = 3 << 20;
    let api = Api::new().await;
    let dry = |request: Value| api.post("vms?dry_run=true", request);
    // The host has 64 GiB and 8 processors.
    let fits = dry(larger(64 << 30, 8, &[DISK])).await;
    assert_eq!((fits.status.as_u16(), fits.body.get("warnings")), (200, None), "{}", fits.body);
    let understood = "choose host 'here': virtual processors 8; memory 64 GiB; disks d0 (3 MiB on datastore 'local')";
    assert_eq!(fits.body["steps"][0], understood);
    for path in ["vms?dry_run=true", "vms"] {
        let refused = api.post(path, larger((64 << 30) + (1 << 20), 1, &[DISK])).await;
        refused.assert_field("memory");
        let said = refused.body["detail"].to_string();
        assert!(said.contains("has 64 GiB in all"), "{said}");
    }
    let set = api.raw(Method::PATCH, "vms/web", json!({ "memory": 65u64 << 30 }).to_string());
    let mut running = larger(40 << 30, 1, &[DISK]);
    running["name"] = json!("web");
    api.done(api.post("vms", running).await).await;
    set.await.assert_field("memory");
    let warned = |answer: &Answer, word: &str| {
        assert_eq!(answer.status.as_u16(), 200, "{}", answer.body);
        let said = answer.body["warnings"].to_string();
        assert!(said.contains(word), "{word}: {said}");
        assert_eq!(answer.body["warnings"].as_array().unwrap().len(), 1, "{said}");
    };
    // A VM that is off takes none of it.
    assert_eq!(dry(larger(30 << 30, 1, &[DISK])).await.body.get("warnings"), None);
    api.done(api.post("vms/web/start", Value::Null).await).await;
    let beside = dry(larger(30 << 30, 1, &[DISK])).await;
    warned(&beside, "have 40 GiB of its 64 GiB of memory: there is not enough for 30 GiB");
    assert_eq!(dry(larger(24 << 30, 1, &[DISK])).await.body.get("warnings"), None);
    let mut second = larger(30 << 30, 1, &[DISK]);
    second["name"] = json!("second");
    api.done(api.post("vms", second).await).await;
    let started = api.post("vms/second/start?dry_run=true", Value::Null).await;
    warned(&started, "there is not enough for 30 GiB");
    warned(&dry(larger(1 << 30, 9, &[DISK])).await, "has 8 processors, which 9 virtual ones");
    // Each disk has room, and both have not, with the headers of encrypted ones.
    api.fixture.agent.set_free(20 << 20);
    assert_eq!(dry(larger(1 << 30, 1, &[DISK])).await.body.get("warnings"), None);
    warned(&dry(larger(1 << 30, 1, &[DISK, DISK])).await, "grow to 38 MiB on datastore 'local'");
    for (name, encryption, free, both_take) in
        [("whole", false, 4 << 20, "take 6 MiB"), ("sealed", true, 35 << 20, "take 38 MiB")]
    {
        let policy =
            json!({ "name": name, "encryption": encryption, "allocation": "preallocated" });
        assert_eq!(api.post("policies", policy).await.status, 201);
        api.fixture.agent.set_free(free);
        let mut request = larger(1 << 30, 1, &[DISK]);
        request["policy"] = json!(name);
        let one = dry(request.clone()).await;
        let steps = one.body["steps"][0].to_string();
        assert!(steps.contains("'local', preallocated)"), "{}", one.body);
        request["disks"] = larger(1 << 30, 1, &[DISK, DISK])["disks"].clone();
        let both = dry(request).await;
        assert_eq!(both.status.as_u16(), 507, "{}", both.body);
        assert!(both.body["detail"].to_string().contains(both_take), "{}", both.body);
    }
}

/// The dry run of a request is refused, and for the same its task fails.
async fn refused_alike(api: &Api, (method, path, body): (Method, &str, Value), code: &str) {
    let dry = format!("{path}?dry_run=true");
    let planned = api.raw(method.clone(), &dry, body.to_string()).await;
    assert_eq!(planned.body["code"], code, "{path}: {}", planned.body);
    let said = planned.body["detail"].as_str().unwrap();
    let task = api.done(api.raw(method, path, body.to_string()).await).await;
    let told = task["problem"]["detail"].as_str().unwrap_or_default();
    assert!(told.contains(said), "{path}: '{said}' is not in {task}");
}

#[tokio::test]
async fn what_the_host_refuses_is_refused_by_dry_runs_in_the_same_words() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let agent = &api.fixture.agent;
    let start = || (Method::POST, "vms/web/start", Value::Null);
    let grow = || (Method::POST, "vms/web/disks/data/resize", json!({ "size": 1 << 22 }));
    let disk = json!({ "name": "more", "datastore": "local", "size": 1 << 20 });
    let add = || (Method::POST, "vms/web/disks", disk.clone());

    agent.set_full(true);
    refused_alike(&api, grow(), "no-space").await;
    agent.set_full(false);
    let place = Path::new("/store");
    let local = agent.mark(place).unwrap();
    agent.change_mark(place);
    refused_alike(&api, start(), "wrong-state").await;
    refused_alike(&api, grow(), "wrong-state").await;
    agent.mount(place, local);

    api.done(api.post("vms/web/start", Value::Null).await).await;
    agent.set_full(true);
    refused_alike(&api, (Method::POST, "vms/web/dumps", json!({})), "no-space").await;
    agent.set_full(false);
    // Its first disk is on no port.
    let first = (Method::DELETE, "vms/web/disks/root", Value::Null);
    refused_alike(&api, first, "wrong-state").await;

    // One that was added goes, and so does a dry run.
    api.done(api.raw(Method::POST, "vms/web/disks", disk.to_string()).await).await;
    let added = api.delete("vms/web/disks/more?dry_run=true").await;
    assert_eq!((added.status.as_u16(), added.body.get("warnings")), (200, None), "{}", added.body);
    api.done(api.delete("vms/web/disks/more").await).await;

    // What a card is to be connected to is missing, or another VM's.
    let card = |backend: Value| (Method::POST, "vms/web/nics", json!({ "backend": backend }));
    let forward = json!({ "protocol": "tcp", "host_port": 62_000, "guest_port": 80 });
    let user = json!({ "kind": "user", "forwards": [forward] });
    let tap = json!({ "kind": "tap", "tap": "lan0" });
    let mut other = vm_with("/name", json!("other"));
    other["nics"] = json!([{ "backend": user }, { "backend": tap }]);
    api.done(api.post("vms", other).await).await;
    api.done(api.post("vms/other/start", Value::Null).await).await;
    refused_alike(&api, card(json!({ "kind": "bridge", "bridge": "missing0" })), "wrong-state")
        .await;
    refused_alike(&api, card(tap), "wrong-state").await;
    refused_alike(&api, card(user), "in-use").await;

    // All ports of the guest are taken: one by a disk from the start on, the last by another one.
    let cards = async || api.get("vms/web").await.body["nics"].as_array().map_or(0, Vec::len);
    let one = || card(json!({ "kind": "user" }));
    for _ in cards().await..6 {
        let (_, path, body) = one();
        api.done(api.post(path, body).await).await;
    }
    api.done(api.raw(Method::POST, "vms/web/disks", disk.to_string()).await).await;
    refused_alike(&api, one(), "limit-exceeded").await;
    api.done(api.delete("vms/web/disks/more").await).await;
    for (path, body) in [("set", json!({ "link": "down" })), ("remove", Value::Null)] {
        let method = if path == "set" { Method::PATCH } else { Method::DELETE };
        let dry = api.raw(method, "vms/web/nics/nic0?dry_run=true", body.to_string()).await;
        assert_eq!((dry.status.as_u16(), dry.body.get("warnings")), (200, None), "{}", dry.body);
    }
    let (_, path, body) = one();
    api.done(api.post(path, body).await).await;
    assert_eq!(cards().await, 7);
    refused_alike(&api, add(), "limit-exceeded").await;
    let left = api.get("vms/web").await.body["disks"].as_array().unwrap().len();
    assert_eq!(left, 2, "a disk is left of what was refused");
}

#[tokio::test]
async fn a_dry_run_says_what_an_earlier_agent_was_not_asked() {
    use vmseal_api::host::version::{EXAMINE_CHANGE, EXAMINE_NIC_CHANGE};
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    api.fixture.agent.lack_features(&[EXAMINE_CHANGE, EXAMINE_NIC_CHANGE]);
    api.fixture.agent.restart();
    let said = async |path: &str, body: Value| {
        let planned = api.post(path, body).await;
        let warnings = planned.body["warnings"].to_string();
        let told = warnings.contains("was not asked") && warnings.contains("earlier vmseal");
        (planned.status == 200 && told).then_some(())
    };
    let start = async || said("vms/web/start?dry_run=true", Value::Null).await;
    api.fixture.eventually("the server sees that the agent cannot say it", start).await;
    let grown = said("vms/web/disks/root/resize?dry_run=true", json!({ "size": 1 << 22 })).await;
    assert_eq!(grown, Some(()));
    let card = json!({ "backend": { "kind": "user" } });
    assert_eq!(said("vms/web/nics?dry_run=true", card).await, Some(()));
    // One for a VM that is off is looked at when that starts.
    let bridge = json!({ "backend": { "kind": "bridge", "bridge": "missing0" } });
    let planned = api.post("vms/web/nics?dry_run=true", bridge).await;
    let warnings = planned.body["warnings"].to_string();
    assert!(planned.status == 200 && warnings.contains("no 'missing0'"), "{}", planned.body);
}

#[tokio::test]
async fn who_asks_for_redundancy_is_told_what_guests_risk_that_go_on() {
    let api = Api::new().await;
    let told = async |method: Method, path: &str, body: Value| {
        let planned = api.raw(method, &format!("{path}?dry_run=true"), body.to_string()).await;
        assert_eq!(planned.status, 200, "{}", planned.body);
        let warnings = planned.body["warnings"].as_array().cloned().unwrap_or_default();
        let risk = |it: &&Value| it.to_string().contains("lose writes that were acknowledged");
        warnings.iter().filter(risk).count()
    };
    let failures = |failures: u8| json!({ "failures": failures });
    let policy =
        |asked: u8| json!({ "name": "new", "encryption": true, "redundancy": failures(asked) });
    assert_eq!(told(Method::POST, "policies", policy(1)).await, 1);
    assert_eq!(told(Method::POST, "policies", policy(0)).await, 0);
    for (change, times) in [
        (json!({ "redundancy": failures(2) }), 1),
        (json!({ "redundancy": failures(0) }), 0),
        (json!({ "iops": 100 }), 0),
    ] {
        let said = told(Method::PATCH, "policies/encrypted", change.clone()).await;
        assert_eq!(said, times, "{change}");
    }
    let mut pool = json!({
        "monitors": "192.0.2.1", "user": "client.a", "keyring": "/etc/ceph/keyring", "pool": "vms",
    });
    pool["create"] = failures(1);
    let location = json!({ "kind": "rbd", "path": "/more", "pool": pool });
    let mut datastore = json!({ "name": "more", "host": "here", "location": location });
    assert_eq!(told(Method::POST, "datastores", datastore.clone()).await, 1);
    // The same where a policy says it.
    let asked = json!({ "redundancy": failures(1) });
    let set = api.raw(Method::PATCH, "policies/encrypted", asked.to_string()).await;
    assert_eq!(set.status, 200, "{}", set.body);
    datastore["create_for_policy"] = json!("encrypted");
    datastore["location"]["pool"]["create"] = Value::Null;
    assert_eq!(told(Method::POST, "datastores", datastore).await, 1);
}
