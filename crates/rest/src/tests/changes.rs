//! VMs and policies that are changed: what is refused, what waits for the next start, and what a dry run says.

use super::*;

impl Api {
    async fn patch(&self, path: &str, body: Value) -> Answer {
        self.raw(Method::PATCH, path, body.to_string()).await
    }

    async fn running(&self) {
        self.done(self.post("vms", vm()).await).await;
        self.done(self.post("vms/web/start", Value::Null).await).await;
    }

    /// What a request could have changed of the VM and its policy.
    async fn resources(&self) -> [Value; 3] {
        let tasks = self.get("tasks?limit=1000").await.body["items"].as_array().unwrap().len();
        [self.get("vms/web").await.body, self.get("policies").await.body, json!(tasks)]
    }
}

#[tokio::test]
async fn bad_changes_are_refused_and_change_nothing() {
    let api = Api::new().await;
    api.running().await;
    let before = api.resources().await;
    for (field, body) in [
        ("name", json!({ "name": "a b" })),
        ("name", json!({ "name": "a..b" })),
        ("vcpus", json!({ "vcpus": 0 })),
        ("vcpus", json!({ "vcpus": 256 })),
        ("memory", json!({ "memory": 1000 })),
        ("description", json!({ "description": "x".repeat(5000) })),
        ("labels", json!({ "labels": { "a b": "c" } })),
        ("labels", json!({ "labels": { "": "c" } })),
        ("labels", json!({ "labels": { "a": "b=c" } })),
        ("labels", json!({ "labels": { "a": "x".repeat(64) } })),
    ] {
        api.patch("vms/web", body).await.assert_field(field);
    }
    let many: serde_json::Map<_, _> =
        (0..65).map(|index| (format!("key{index}"), json!("value"))).collect();
    api.patch("vms/web", json!({ "labels": many })).await.assert_field("labels");
    api.patch("vms/none", json!({ "vcpus": 2 })).await.assert_problem(404, "not-found");
    let missing = api.patch("vms/web", json!({ "policy": "none" })).await;
    missing.assert_problem(404, "not-found");
    let plain = api.patch("vms/web", json!({ "policy": "plain" })).await;
    let told = plain.assert_problem(409, "wrong-state").body["detail"].as_str().unwrap().to_owned();
    assert!(told.contains("decrypted"), "{told}");

    let disk = |more: Value| {
        let mut disk = json!({ "name": "more", "datastore": "local", "size": 1 << 20 });
        disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        disk
    };
    for (field, more) in [
        ("name", json!({ "name": "a b" })),
        ("name", json!({ "name": "cloud-init" })),
        ("size", json!({ "size": 1000 })),
        ("image", json!({ "image": "relative", "format": "raw" })),
    ] {
        api.post("vms/web/disks", disk(more)).await.assert_field(field);
    }
    let taken = api.post("vms/web/disks", disk(json!({ "name": "root" }))).await;
    taken.assert_problem(409, "already-exists");
    let nowhere = api.post("vms/web/disks", disk(json!({ "datastore": "none" }))).await;
    nowhere.assert_problem(404, "not-found");
    for size in [1 << 20, 4096, (1 << 21) + 512] {
        let resized = api.post("vms/web/disks/root/resize", json!({ "size": size })).await;
        resized.assert_field("size");
    }
    api.delete("vms/web/disks/none").await.assert_problem(404, "not-found");
    api.delete("vms/web/nics/none").await.assert_problem(404, "not-found");
    let card = json!({ "backend": { "kind": "user" }, "mac": "01:00:00:00:00:00" });
    api.post("vms/web/nics", card).await.assert_field("mac");

    api.post("vms/web/unpause", Value::Null).await;
    api.post("vms/web/reboot", json!({ "timeout_seconds": 0 }))
        .await
        .assert_field("timeout_seconds");
    api.get("vms?label=%3Dx").await.assert_field("label");
    assert_eq!(api.resources().await, before);
    api.done(api.post("vms/web/stop", json!({ "force": true })).await).await;
    for what in ["pause", "unpause", "reset", "reboot", "wakeup"] {
        let refused = api.post(&format!("vms/web/{what}"), Value::Null).await;
        let told = refused.assert_problem(409, "wrong-state").body["detail"].to_string();
        assert!(told.contains("vmseal vm start web"), "{told}");
    }
}

#[tokio::test]
async fn dry_runs_of_changes_change_nothing() {
    let api = Api::new().await;
    api.running().await;
    let before = api.resources().await;
    let disk = json!({ "name": "more", "datastore": "local", "size": 1 << 20 });
    let beside = json!({ "name": "more", "size": 1 << 20 });
    let plain = json!({ "name": "more", "size": 1 << 20, "encrypted": false });
    let card = json!({ "backend": { "kind": "user" } });
    let set = json!({ "vcpus": 3, "labels": { "env": "prod" }, "autostart": true });
    let root = "vms/web/disks/root";
    for (method, path, body, kind, step) in [
        (Method::PATCH, "vms/web", set, "vm.set", "at the next start"),
        (Method::POST, "vms/web/reboot", Value::Null, "vm.reboot", "shut the guest down"),
        (Method::POST, "vms/web/reset", Value::Null, "vm.reset", "reset the guest"),
        (Method::POST, "vms/web/pause", Value::Null, "vm.pause", "pause the guest"),
        (Method::POST, "vms/web/disks", disk, "disk.add", "create the disk"),
        (Method::POST, "vms/web/disks", beside, "disk.add", "choose datastore 'local'"),
        (Method::POST, "vms/web/disks", plain, "disk.add", "leave disk 'more' in the clear"),
        (Method::POST, "vms/web/nics", card, "nic.add", "give it to the VM"),
        (
            Method::POST,
            &format!("{root}/resize"),
            json!({ "size": 1 << 22 }),
            "disk.resize",
            "longer",
        ),
        (Method::PATCH, "policies/encrypted", json!({ "iops": 9 }), "policy.set", "VM 'web'"),
    ] {
        let answer = api.raw(method, &format!("{path}?dry_run=true"), body.to_string()).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        assert_eq!(answer.body["kind"], kind, "{path}");
        assert!(answer.body["steps"].to_string().contains(step), "{path}: {}", answer.body);
    }
    assert_eq!(api.resources().await, before);
}

#[tokio::test]
async fn what_waits_for_the_next_start_is_shown_until_then() {
    let api = Api::new().await;
    api.running().await;
    let set = json!({
        "name": "web.1_a", "vcpus": 3, "description": "the shop", "autostart": true,
        "labels": { "env": "prod", "team": "a" }
    });
    let changed = api.patch("vms/web", set).await;
    assert_eq!(changed.status, 200, "{}", changed.body);
    let vm = changed.body;
    assert_eq!((&vm["vcpus"], &vm["at_next_start"]), (&json!(3), &json!(["vcpus"])));
    assert_eq!((&vm["description"], &vm["autostart"]), (&json!("the shop"), &json!(true)));
    let listed = async |label: &str| {
        let page = api.get(&format!("vms?label={label}")).await.body;
        page["items"].as_array().unwrap().len()
    };
    assert_eq!(
        (listed("env%3Dprod").await, listed("env").await, listed("env%3Dtest").await),
        (1, 1, 0)
    );
    let removed = json!({ "labels": { "env": null } });
    assert_eq!(api.patch("vms/web.1_a", removed).await.body["labels"], json!({ "team": "a" }));
    api.done(api.post("vms/web.1_a/reboot", Value::Null).await).await;
    let vm = api.get("vms/web.1_a").await.body;
    assert_eq!((vm["power"].as_str(), &vm["at_next_start"]), (Some("running"), &Value::Null));
    let started = async || {
        let events = api.get("events?limit=1000").await.body["items"].clone();
        let kinds = events.as_array().unwrap().iter();
        kinds.filter(|it| it["kind"] == "vm.started").count()
    };
    let before = started().await;
    for (what, power) in [("pause", "paused"), ("pause", "paused"), ("unpause", "running")] {
        let vm = api.post(&format!("vms/web.1_a/{what}"), Value::Null).await;
        assert_eq!((vm.status.as_u16(), vm.body["power"].as_str()), (200, Some(power)));
    }
    assert_eq!(started().await, before, "a guest that goes on was not started");
    // The links of its cards change while something waits.
    api.patch("vms/web.1_a", json!({ "memory": 64 << 20 })).await;
    let card = json!({ "backend": { "kind": "user" }, "name": "lan" });
    api.done(api.post("vms/web.1_a/nics", card).await).await;
    let pulled = api.patch("vms/web.1_a/nics/lan", json!({ "link": "down" })).await.body;
    assert_eq!(pulled["nics"][0]["link"], "down", "{pulled}");
    assert_eq!(pulled["at_next_start"], json!(["memory"]));
}

#[tokio::test]
async fn a_guest_that_sleeps_is_shown_and_woken() {
    use vmseal_api::host::HostAgent as _;
    let api = Api::new().await;
    api.running().await;
    let refused = async |path: &str, says: &str| {
        let answer = api.post(path, Value::Null).await;
        let told = answer.assert_problem(409, "wrong-state").body["detail"].to_string();
        assert!(told.contains(says), "{path}: {told}");
    };
    let woken = async || {
        let events = api.get("events?limit=1000").await.body["items"].clone();
        let kinds = events.as_array().unwrap().iter();
        kinds.filter(|it| it["kind"] == "vm.woken" && it["target"] == "web").count()
    };
    for path in ["vms/web/wakeup", "vms/web/wakeup?dry_run=true"] {
        refused(path, "is not suspended to RAM").await;
    }
    assert!(api.get("vms/web").await.body["suspended_to_ram"].is_null());
    let vm = api.get("vms/web").await.body["id"].as_str().unwrap().parse().unwrap();
    api.fixture.agent.falls_asleep(vm);
    let state = api.fixture.agent.state_now().await.unwrap();
    api.fixture.hosts.until_shown(api.fixture.host, &state).await;
    let asleep = api.get("vms/web").await.body;
    assert_eq!((&asleep["power"], &asleep["suspended_to_ram"]), (&json!("running"), &json!(true)));
    let planned = api.post("vms/web/wakeup?dry_run=true", Value::Null).await;
    assert_eq!((planned.status.as_u16(), &planned.body["kind"]), (200, &json!("vm.wakeup")));
    assert_eq!(api.get("vms/web").await.body["suspended_to_ram"], true, "by a dry run");
    // A paused guest is not woken.
    api.post("vms/web/pause", Value::Null).await;
    refused("vms/web/wakeup", "vmseal vm unpause web").await;
    api.post("vms/web/unpause", Value::Null).await;
    assert_eq!(woken().await, 0);
    let awake = api.post("vms/web/wakeup", Value::Null).await;
    assert_eq!((awake.status.as_u16(), awake.body["power"].as_str()), (200, Some("running")));
    assert!(awake.body["suspended_to_ram"].is_null(), "{}", awake.body);
    assert_eq!(woken().await, 1);
    refused("vms/web/wakeup", "is not suspended to RAM").await;
    assert_eq!(woken().await, 1);
}

#[tokio::test]
async fn a_policy_that_changes_says_what_its_vms_need() {
    let api = Api::new().await;
    api.running().await;
    let limits = json!({ "iops": 500, "bandwidth": 1 << 20, "cache": 1 << 20 });
    let planned =
        api.raw(Method::PATCH, "policies/encrypted?dry_run=true", limits.to_string()).await;
    assert!(planned.body["steps"][0].as_str().unwrap().contains("at its next start"));
    let set = api.patch("policies/encrypted", limits).await;
    assert_eq!(
        (set.status.as_u16(), &set.body["limits"]["iops"]),
        (200, &json!(500)),
        "{}",
        set.body
    );
    let vm = api.get("vms/web").await.body;
    assert_eq!(vm["at_next_start"], json!(["limits", "cache"]));
    assert_eq!(vm["disks"][0]["limits"]["iops"], 500);
    let plain = json!({ "encryption": false });
    let needs = api.raw(Method::PATCH, "policies/encrypted?dry_run=true", plain.to_string()).await;
    assert!(
        needs.body["steps"].to_string().contains("VM 'web': its disks would have to be decrypted")
    );
    let refused = api.patch("policies/encrypted", plain).await;
    assert!(refused.assert_problem(409, "in-use").body["detail"].to_string().contains("web"));
    for (field, body) in [
        ("limits.bandwidth", json!({ "bandwidth": 5 })),
        ("limits.stall_timeout", json!({ "stall_timeout": 4 })),
        ("cache", json!({ "cache": 5 })),
        ("name", json!({ "name": "a b" })),
    ] {
        api.patch("policies/encrypted", body).await.assert_field(field);
    }
    let missing = json!({ "replicate_to": "nowhere" });
    let missing = api.patch("policies/encrypted", missing).await;
    assert_eq!(missing.assert_problem(404, "not-found").body["field"], "replicate_to");
    let rate = api.patch("policies/encrypted", json!({ "replicate_rate": 1 << 20 })).await;
    assert_eq!(rate.assert_problem(409, "wrong-state").body["field"], "replicate_rate");
    let nowhere = json!({ "replicate_rate": 1 << 20, "replicate_to": "" });
    api.patch("policies/encrypted", nowhere).await.assert_field("replicate_rate");
    let there = json!({ "replicate_to": "local", "replicate_rate": 2 << 20 });
    let planned = api.raw(Method::PATCH, "policies/encrypted?dry_run=true", there.to_string());
    assert!(planned.await.body["steps"].to_string().contains("keep the replicas, or none"));
    let replica = async |body| api.patch("policies/encrypted", body).await.body["replica"].clone();
    let kept = json!({ "datastore": "local", "bytes_per_second": 2 << 20 });
    assert_eq!(replica(there).await, kept);
    assert_eq!(replica(json!({ "iops": 7 })).await, kept);
    assert!(replica(json!({ "replicate_to": "" })).await.is_null());
    let none = json!({ "iops": 0, "bandwidth": 0, "cache": 0 });
    assert_eq!(api.patch("policies/encrypted", none).await.body["limits"], json!({}));
    assert!(api.get("vms/web").await.body["at_next_start"].is_null());
}

/// A policy that no longer encrypts has keys of no provider.
#[tokio::test]
async fn a_policy_with_a_provider_can_be_made_plain() {
    let api = Api::new().await;
    let policy = json!({ "name": "vault", "encryption": true, "provider": "keys" });
    assert_eq!(api.post("policies", policy).await.body["provider"], "keys");
    let both = json!({ "encryption": false, "provider": "keys" });
    api.patch("policies/vault", both).await.assert_field("provider");
    let plain = api.patch("policies/vault", json!({ "encryption": false })).await.body;
    assert_eq!(
        (&plain["encryption"], &plain["provider"]),
        (&json!(false), &Value::Null),
        "{plain}"
    );
}

/// An agent of an earlier vmseal is asked for nothing that it does not know.
#[tokio::test]
async fn hosts_that_cannot_change_vms_that_run_are_not_asked_to() {
    use vmseal_agent::simulated::Call;
    let mut api = Api::new().await;
    api.fixture.agent.lack_features(&["guest-control", "wakeup", "set-running", "grow-disk"]);
    api.fixture.restart(|_| {}).await;
    api.fixture.connected().await;
    let control = Arc::new(api.fixture.services(Recipient::generate().unwrap()));
    api.router = router(control);
    api.running().await;
    let disk = json!({ "name": "more", "datastore": "local", "size": 1 << 20 });
    for (path, body) in [
        ("vms/web/pause", Value::Null),
        ("vms/web/reset", Value::Null),
        ("vms/web/wakeup", Value::Null),
        ("vms/web/disks", disk),
        ("vms/web/nics", json!({ "backend": { "kind": "user" } })),
        ("vms/web/disks/root/resize", json!({ "size": 1 << 22 })),
    ] {
        let refused = api.post(path, body).await;
        let told = refused.assert_problem(422, "unsupported").body["detail"].to_string();
        assert!(told.contains("upgrade vmseal"), "{path}: {told}");
    }
    let calls = api.fixture.calls(Call::RegisterVm);
    let set = api.patch("vms/web", json!({ "vcpus": 3 })).await;
    assert_eq!((set.status.as_u16(), &set.body["vcpus"]), (200, &json!(3)), "{}", set.body);
    assert_eq!(api.fixture.calls(Call::RegisterVm), calls);
}

#[tokio::test]
async fn a_vm_is_created_with_what_its_users_say_of_it() {
    let api = Api::new().await;
    let disk = json!({ "name": "d", "datastore": "local", "size": 1 << 20 });
    let mut request = json!({
        "name": "said", "policy": "plain", "memory": 32 << 20, "disks": [disk],
        "description": "the shop", "labels": { "tier": "gold" }, "autostart": true,
    });
    api.done(api.post("vms", request.clone()).await).await;
    let vm = api.get("vms/said").await.body;
    assert_eq!((&vm["description"], &vm["autostart"]), (&json!("the shop"), &json!(true)), "{vm}");
    assert_eq!(vm["labels"], json!({ "tier": "gold" }));
    request["name"] = json!("other");
    request["labels"] = json!({ "a b": "c" });
    api.post("vms", request.clone()).await.assert_field("labels");
    request["labels"] = json!({});
    request["description"] = json!("x".repeat(100_000));
    api.post("vms", request).await.assert_field("description");
}

/// The host has huge pages for 32 MiB in all. Whether they are free is asked when a VM starts.
#[tokio::test]
async fn a_vm_whose_memory_could_never_be_in_huge_pages_is_refused() {
    let api = Api::new().await;
    api.fixture.agent.set_huge_pages(32 << 20);
    let disk = json!({ "name": "d", "datastore": "local", "size": 1 << 20 });
    let vm = |memory: u64| {
        json!({ "name": "huge", "policy": "plain", "memory": memory, "disks": [disk],
                "hardware": { "memory_backing": "hugepages" } })
    };
    let refused = |answer: Answer, field: &str| {
        let said = (&answer.body["code"], &answer.body["field"]);
        assert_eq!(said, (&json!("unsupported"), &json!(field)), "{}", answer.body);
    };
    for path in ["vms?dry_run=true", "vms"] {
        refused(api.post(path, vm(34 << 20)).await, "hardware.memory_backing");
    }
    api.done(api.post("vms", vm(32 << 20)).await).await;
    let larger = json!({ "memory": 34 << 20 }).to_string();
    refused(api.raw(Method::PATCH, "vms/huge", larger).await, "memory");
    // Less is no matter of huge pages, as its memory so far was not either.
    let smaller = api.raw(Method::PATCH, "vms/huge", json!({ "memory": 30 << 20 }).to_string());
    assert_eq!(smaller.await.status, 200);
    assert_eq!(api.get("vms/huge").await.body["memory"], 30 << 20);
}

/// The policy names the processor model of its VMs.
#[tokio::test]
async fn vms_have_the_processor_model_of_their_policy() {
    let api = Api::new().await;
    let policy = |model: &str| json!({ "name": "model", "encryption": false, "cpu_model": model });
    api.post("policies", policy("a,b")).await.assert_field("cpu_model");
    // One that a host does not have is told of, and may be one of a host that comes later.
    let tried = api.raw(Method::POST, "policies?dry_run=true", policy("missing").to_string()).await;
    assert!(tried.body["warnings"][0].to_string().contains("'missing'"), "{}", tried.body);
    assert_eq!(api.post("policies", policy("max")).await.body["cpu_model"], "max");
    let missing = json!({ "cpu_model": "missing" }).to_string();
    let tried = api.raw(Method::PATCH, "policies/model?dry_run=true", missing).await;
    assert!(tried.body["warnings"][0].to_string().contains("'missing'"), "{}", tried.body);
    let disk = json!({ "name": "d", "datastore": "local", "size": 1 << 20 });
    let vm = |name: &str, hardware: Value| {
        json!({ "name": name, "policy": "model", "memory": 32 << 20, "disks": [disk],
                "hardware": hardware })
    };
    let other = api.post("vms", vm("web", json!({ "cpu_model": "host" }))).await;
    other.assert_field("hardware.cpu_model");
    assert!(other.body["detail"].as_str().unwrap().contains("'max'"), "{}", other.body);
    api.done(api.post("vms", vm("web", json!({}))).await).await;
    assert_eq!(api.get("vms/web").await.body["hardware"]["cpu_model"], "max");
    // VMs that have another one keep it, and their policy its own.
    let host = json!({ "cpu_model": "host" });
    let planned = api.raw(Method::PATCH, "policies/model?dry_run=true", host.to_string()).await;
    assert!(planned.body["steps"].to_string().contains("processor model is max"));
    api.patch("policies/model", host).await.assert_problem(409, "in-use");
    let free = api.patch("policies/model", json!({ "cpu_model": "" })).await.body;
    assert!(free["cpu_model"].is_null(), "{free}");
    let moved = json!({ "policy": "plain" });
    assert_eq!(api.patch("vms/web", moved).await.body["policy"], "plain");
    assert_eq!(api.patch("policies/model", json!({ "cpu_model": "host" })).await.status, 200);
    let back = json!({ "policy": "model" });
    let planned = api.raw(Method::PATCH, "vms/web?dry_run=true", back.to_string()).await;
    let steps = planned.body["steps"].to_string();
    assert!(steps.contains("set cpu-model to host, in place of max"), "{}", planned.body);
    let model = async || api.get("vms/web").await.body["hardware"]["cpu_model"].clone();
    assert_eq!(model().await, "max");
    let given = api.patch("vms/web", back).await;
    assert_eq!((given.status.as_u16(), &given.body["policy"]), (200, &json!("model")));
    assert_eq!(model().await, "host");
    // A policy without a model leaves the one that is there.
    api.patch("vms/web", json!({ "policy": "plain" })).await;
    assert_eq!(model().await, "host");
}

/// A guest goes on with the processor that it has: another model is for a VM that is off, and of which no memory is kept.
#[tokio::test]
async fn the_processor_model_of_a_guest_does_not_change_under_it() {
    let api = Api::new().await;
    for (name, model) in [("named", "max"), ("lacked", "missing")] {
        let policy = json!({ "name": name, "encryption": true, "cpu_model": model });
        assert_eq!(api.post("policies", policy).await.body["cpu_model"], model);
    }
    api.running().await;
    let named = json!({ "policy": "named" });
    let refused = async |why: &str| {
        let refused = api.patch("vms/web", named.clone()).await;
        let body = &refused.assert_problem(409, "wrong-state").body;
        assert!(body["detail"].to_string().contains(why), "{why}: {body}");
        assert_eq!(body["field"], "policy", "{why}");
        assert!(api.get("vms/web").await.body["hardware"]["cpu_model"].is_null(), "{why}");
    };
    let power = async || api.get("vms/web").await.body["power"].clone();
    refused("vmseal vm stop web").await;
    let snapshot = json!({ "name": "kept", "memory": true });
    api.done(api.post("vms/web/snapshots", snapshot).await).await;
    api.done(api.post("vms/web/suspend", json!({})).await).await;
    assert_eq!(power().await, "suspended");
    refused("vmseal vm resume web").await;
    api.done(api.post("vms/web/resume", json!({})).await).await;
    api.done(api.post("vms/web/stop", json!({ "force": true })).await).await;
    assert_eq!(power().await, "off");
    refused("vmseal snapshot delete web kept").await;
    api.done(api.delete("vms/web/snapshots/kept").await).await;
    // The host of the VM has to know it.
    let lacked = api.patch("vms/web", json!({ "policy": "lacked" })).await;
    assert_eq!(lacked.body["field"], "policy", "{}", lacked.body);
    assert!(lacked.body["detail"].to_string().contains("no processor model 'missing'"));
    assert_eq!(api.patch("vms/web", named).await.status, 200);
    api.done(api.post("vms/web/start", Value::Null).await).await;
    let vm = api.get("vms/web").await.body["id"].as_str().unwrap().parse().unwrap();
    let runs_with = api.fixture.agent.runs_with(vm).unwrap();
    assert_eq!(runs_with.hardware.cpu_model.as_deref(), Some("max"));
}

/// A disk that its VM lacks is no disk like the others.
#[tokio::test]
async fn a_disk_that_its_vm_lacks_is_marked() {
    let api = Api::new().await;
    api.running().await;
    let vm = api.get("vms/web").await.body["id"].as_str().unwrap().parse().unwrap();
    let attachments = async || {
        let shown = api.get("vms/web").await.body;
        let disks = shown["disks"].as_array().unwrap().clone();
        disks.iter().map(|disk| disk["attachment"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(attachments().await, [Value::Null, Value::Null]);
    let disk = api.fixture.disks(vm).await[1].id;
    let mut write = api.fixture.store.write().await.unwrap();
    vmseal_control::store::disks::set_detached(&mut write, disk, true).await.unwrap();
    write.commit().await.unwrap();
    assert_eq!(attachments().await, [Value::Null, json!("detached")]);
}

#[tokio::test]
async fn a_template_is_cloned_and_neither_started_nor_changed() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    api.done(api.post("vms/web/start", Value::Null).await).await;
    let template = |on: bool| json!({ "template": on });
    let refused = api.patch("vms/web", template(true)).await;
    let detail = refused.assert_problem(409, "wrong-state").body["detail"].to_string();
    assert!(detail.contains("vmseal vm stop web"), "{detail}");
    api.done(api.post("vms/web/stop", json!({ "force": true })).await).await;
    let planned = api.patch("vms/web?dry_run=true", template(true)).await;
    assert_eq!(planned.body["steps"], json!(["make it a template"]), "{}", planned.body);
    let before = api.get("vms/web").await.body;
    assert_eq!(before["template"], false);
    assert_eq!(api.patch("vms/web", template(true)).await.body["template"], true);

    for (path, body) in [
        ("vms/web/start", Value::Null),
        ("vms/web/disks", json!({ "name": "more", "datastore": "local", "size": 1 << 20 })),
        ("vms/web/nics", json!({ "backend": { "kind": "user" } })),
        ("vms/web/tpm", Value::Null),
    ] {
        let refused = api.post(path, body).await;
        let detail = refused.assert_problem(409, "wrong-state").body["detail"].to_string();
        assert!(detail.contains("is a template"), "{path}: {detail}");
    }
    for change in [json!({ "vcpus": 9 }), json!({ "memory": 1 << 30 })] {
        api.patch("vms/web", change).await.assert_problem(409, "wrong-state");
    }
    let described = api.patch("vms/web", json!({ "description": "the base" })).await;
    assert_eq!(described.body["description"], "the base", "{}", described.body);
    api.done(api.post("vms/web/clone", json!({ "name": "web2" })).await).await;
    assert_eq!(api.get("vms/web2").await.body["template"], false, "a clone is a template");
    api.done(api.post("vms/web2/start", Value::Null).await).await;

    assert_eq!(api.patch("vms/web", template(false)).await.body["template"], false);
    api.done(api.post("vms/web/start", Value::Null).await).await;
}

#[tokio::test]
async fn a_clone_is_made_on_the_datastore_that_is_named() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let second = api.fixture.directory.path().join("second");
    std::fs::create_dir(&second).unwrap();
    let place = json!({ "kind": "dir", "path": second });
    let added = json!({ "name": "second", "host": "here", "location": place });
    assert_eq!(api.post("datastores", added).await.status.as_u16(), 201);
    let copy = |datastore: &str| json!({ "name": "copy", "datastore": datastore });
    let places = async |name: &str| {
        let shown = api.get(&format!("vms/{name}")).await.body;
        let disks = shown["disks"].as_array().unwrap().clone();
        disks.iter().map(|disk| disk["datastore"].clone()).collect::<Vec<_>>()
    };

    let nowhere = api.post("vms/web/clone", copy("nowhere")).await;
    nowhere.assert_problem(404, "not-found");
    assert_eq!(nowhere.body["field"], "datastore", "{}", nowhere.body);
    let planned = api.post("vms/web/clone?dry_run=true", copy("second")).await;
    let step = planned.body["steps"][0].to_string();
    assert!(step.contains("on datastore 'second'") && !step.contains("'local'"), "{step}");
    api.done(api.post("vms/web/clone", copy("second")).await).await;
    let before = places("web").await;
    assert!(before.iter().all(|place| place == "local"), "{before:?}");
    let made = places("copy").await;
    assert_eq!(made.len(), before.len());
    assert!(made.iter().all(|place| place == "second"), "{made:?}");
}
