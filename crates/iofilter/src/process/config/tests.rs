use serde_json::{Value, json};
use vmseal_api::filter::{
    BACKING_MAX, CACHE_BYTES_MAX, CACHE_BYTES_MIN, CHAIN_MAX, DELAY_MAX, NBD_SOCKETS_MAX,
    REPLICATE_RATE_MIN,
};

use super::*;

fn good() -> Value {
    json!({
        "version": 1,
        "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
        "control": { "path": "/run/x" },
        "disks": [{
            "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
            "size": 8192,
            "serial": "vmseal-0",
            "chain": [{ "kind": "crypt", "key": { "fd": 5 }, "holes": "zero" }],
            "export": null,
            "backend": { "kind": "file", "file": { "fd": 6 }, "offset": 16777216 },
            "front_end": { "kind": "vhost_user_blk", "socket": { "fd": 7 }, "queues": 2 }
        }]
    })
}

fn read_value(value: &Value) -> Result<FilterConfig, ConfigError> {
    read(value.to_string().as_bytes())
}

#[test]
fn a_good_configuration_is_read() {
    assert_eq!(read_value(&good()).unwrap().disks.len(), 1);
}

#[test]
fn the_files_below_an_image_are_checked() {
    let file = |format: &str| json!({ "file": { "fd": 8 }, "format": format });
    let image = |backing: Vec<Value>, offset: u64| {
        let mut config = good();
        let file = json!({ "fd": 6 });
        config["disks"][0]["backend"] =
            json!({ "kind": "qcow2", "file": file, "backing": backing, "offset": offset });
        read_value(&config).map_err(|error| error.to_string())
    };
    assert!(image(vec![], 0).is_ok());
    assert!(image(vec![file("qcow2"), file("raw")], 4096).is_ok());
    for (backing, offset, reason) in [
        (vec![file("raw"), file("qcow2")], 0, "last of its chain"),
        (vec![file("qcow2"); BACKING_MAX + 1], 0, "9 files below"),
        (vec![file("vmdk")], 0, "vmdk"),
        (vec![], 512, "not a multiple"),
    ] {
        let refusal = image(backing, offset).unwrap_err();
        assert!(refusal.contains(reason), "{refusal}");
    }
    let mut memory = good();
    memory["disks"][0]["backend"] = json!({ "kind": "mem" });
    assert!(read_value(&memory).is_ok());
}

#[test]
fn the_connections_to_a_server_are_counted() {
    let served = |count: usize, export: String| {
        let mut config = good();
        let sockets: Vec<_> = (0..count).map(|fd| json!({ "fd": 10 + fd })).collect();
        config["disks"][0]["backend"] =
            json!({ "kind": "nbd", "sockets": sockets, "export": export });
        read_value(&config).map(drop).map_err(|error| error.to_string())
    };
    served(1, String::new()).unwrap();
    served(NBD_SOCKETS_MAX, "x".repeat(255)).unwrap();
    for (count, length) in [(0, 0), (NBD_SOCKETS_MAX + 1, 0), (1, 256)] {
        let refused = served(count, "x".repeat(length)).unwrap_err();
        assert!(refused.contains("NBD server") || refused.contains("255 bytes"), "{refused}");
    }
}

#[test]
fn a_chain_is_checked_for_sense() {
    let crypt = || json!({ "kind": "crypt", "key": { "fd": 5 }, "holes": "zero" });
    let budget = json!({ "per_second": 100, "burst": 10 });
    let limit = json!({ "kind": "limit", "requests": budget, "bytes": budget });
    let delay = |reorders: bool| json!({ "kind": "delay", "microseconds": 5, "jitter_microseconds": 5, "reorders": reorders });
    let fault = |kind: Value, operations: &[&str]| {
        let rule = json!({ "kind": kind, "operations": operations, "one_in": 10 });
        json!({ "kind": "fault", "rules": [rule] })
    };
    let lost = || json!({ "is": "lost" });
    let cache = |bytes: u64| json!({ "kind": "cache", "bytes": bytes });
    let copy = |to: i32, map: i32, offset: u64, rate: u64| {
        json!({
            "kind": "replicate", "replica": { "fd": to }, "map": { "fd": map },
            "offset": offset, "bytes_per_second": rate
        })
    };
    let replica = || copy(10, 11, 16 << 20, REPLICATE_RATE_MIN);
    // The form of today: a leg.
    let leg = |chain: Value, backend: Value| {
        json!({
            "kind": "replicate", "to": { "chain": chain, "backend": backend }, "map": { "fd": 11 },
            "bytes_per_second": REPLICATE_RATE_MIN
        })
    };
    let file =
        |fd: i32, offset: u64| json!({ "kind": "file", "file": { "fd": fd }, "offset": offset });
    let server = || json!({ "kind": "nbd", "sockets": [{ "fd": 12 }] });
    let other_key = || json!({ "kind": "crypt", "key": { "fd": 13 }, "holes": "zero" });
    let stall = |milliseconds: u64| json!({ "kind": "stall", "milliseconds": milliseconds });
    let good_chains = [
        json!([limit, stall(60_000), crypt(), cache(1 << 20), replica()]),
        json!([stall(1), delay(true)]),
        json!([limit, crypt(), leg(json!([]), file(10, 16 << 20))]),
        json!([crypt(), leg(json!([]), server()), delay(false)]),
        json!([leg(json!([limit, other_key(), delay(false)]), server())]),
        json!([limit, crypt(), delay(false), fault(json!({ "is": "error", "errno": 5 }), &[])]),
        json!([delay(true), limit, fault(lost(), &["flush", "write"])]),
        json!([crypt(), fault(json!({ "is": "torn" }), &["write"])]),
        json!([limit, crypt(), cache(1 << 20), delay(false)]),
        json!([limit, cache(CACHE_BYTES_MAX)]),
        json!([limit, crypt(), cache(1 << 20), replica(), delay(false)]),
        json!([limit, replica()]),
        json!([]),
    ];
    for chain in good_chains {
        let mut config = good();
        config["disks"][0]["chain"] = chain.clone();
        read_value(&config).unwrap_or_else(|error| panic!("{chain}: {error}"));
    }
    let bad = [
        (json!([crypt(), limit, crypt()]), "more than once"),
        (json!([{ "kind": "limit" }]), "limits nothing"),
        (json!([{ "kind": "limit", "bytes": { "per_second": 0, "burst": 1 } }]), "limit of 0"),
        (json!([delay(false), crypt()]), "reorders"),
        (json!([delay(false)]), "reorders"),
        (json!([{ "kind": "delay", "microseconds": DELAY_MAX + 1 }]), "a delay of more"),
        (json!([fault(lost(), &[])]), "cannot be lost"),
        (json!([fault(lost(), &["read"])]), "cannot be lost"),
        (json!([fault(json!({ "is": "torn" }), &["write", "read"])]), "only writes"),
        (json!([fault(json!({ "is": "torn" }), &[])]), "only writes"),
        (json!([fault(json!({ "is": "error", "errno": 0 }), &[])]), "no error number"),
        (json!([{ "kind": "fault", "rules": [{ "kind": lost(), "one_in": 0 }] }]), "one_in"),
        (json!([cache(1 << 20), crypt()]), "would keep plaintext"),
        (json!([crypt(), cache(1 << 20), cache(1 << 20)]), "cached more than once"),
        (json!([crypt(), cache(0)]), "a cache of 0 bytes"),
        (json!([crypt(), cache((1 << 20) + 4096)]), "give a multiple"),
        (json!([crypt(), cache(CACHE_BYTES_MAX + CACHE_BYTES_MIN)]), "in all"),
        (json!([replica(), crypt()]), "replica above the encryption"),
        (json!([crypt(), replica(), replica()]), "replicated more than once"),
        (json!([crypt(), replica(), cache(1 << 20)]), "only `delay` and `fault`"),
        (json!([replica(), limit]), "only `delay` and `fault`"),
        (json!([copy(10, 11, 0, REPLICATE_RATE_MIN - 1)]), "give at least 1048576"),
        (json!([copy(10, 11, 512, REPLICATE_RATE_MIN)]), "begins at 512"),
        (json!([copy(10, 10, 0, REPLICATE_RATE_MIN)]), "the same file"),
        (json!([leg(json!([]), file(10, 512))]), "begins at 512"),
        (json!([leg(json!([]), file(11, 0))]), "the same file"),
        (json!([leg(json!([]), json!({ "kind": "mem" }))]), "to memory"),
        (json!([leg(json!([replica()]), server())]), "neither mirrored nor replicated"),
        (json!([leg(json!([cache(1 << 20)]), server())]), "nobody reads a replica"),
        (json!([leg(json!([{ "kind": "bounce" }]), server())]), "nobody reads a replica"),
        (json!([leg(json!([{ "kind": "limit" }]), server())]), "limits nothing"),
        (json!([leg(json!([]), json!({ "kind": "nbd", "sockets": [] }))]), "NBD server"),
        (json!([leg(json!([other_key()]), server()), crypt()]), "replica above the encryption"),
        (json!([stall(0)]), "at least 1"),
        (json!([stall(1), crypt(), stall(1)]), "more than one `stall`"),
        (json!([crypt(), stall(1)]), "only `limit` may stand above `stall`"),
        (json!([stall(1), limit, crypt()]), "none below it"),
        (json!([leg(json!([stall(1)]), server())]), "needs no `stall`"),
        (json!([{ "kind": "tape" }]), "tape"),
        (Value::from(vec![limit.clone(); CHAIN_MAX + 1]), "filters"),
    ];
    for (chain, reason) in bad {
        let mut config = good();
        config["disks"][0]["chain"] = chain.clone();
        let refusal = read_value(&config).expect_err(&chain.to_string()).to_string();
        assert!(refusal.contains(reason), "{chain}: {refusal}");
    }
}

#[test]
fn only_a_guests_disk_whose_lock_lasts_fails_when_storage_does_not_answer() {
    let nbd = json!({ "kind": "nbd", "listen": { "fd": 7 } });
    let server = json!({ "kind": "nbd", "sockets": [{ "fd": 12 }], "export": "" });
    for (field, value, reason) in
        [("front_end", nbd, "a guest has"), ("backend", server, "an NBD server has none")]
    {
        let mut config = good();
        config["disks"][0]["chain"] = json!([{ "kind": "stall", "milliseconds": 1 }]);
        read_value(&config).unwrap();
        config["disks"][0][field] = value;
        let refusal = read_value(&config).unwrap_err().to_string();
        assert!(refusal.contains(reason), "{field}: {refusal}");
    }
}

#[test]
fn what_a_layer_is_written_to_is_checked_for_sense() {
    let crypt = |fd: i32| json!({ "kind": "crypt", "key": { "fd": fd }, "holes": "zero" });
    let below = json!([{ "file": { "fd": 8 }, "format": "raw" }]);
    let layer = |fd: i32, backing: &Value| json!({ "kind": "qcow2", "file": { "fd": fd }, "backing": backing, "offset": 0 });
    let raw = |fd: i32| json!({ "kind": "file", "file": { "fd": fd }, "offset": 0 });
    let memory = || json!({ "kind": "mem" });
    let read = |chain: Value, backend: Value, to_chain: Value, to: Value| {
        let mut config = good();
        let disk = &mut config["disks"][0];
        disk.as_object_mut().unwrap().remove("front_end");
        disk.as_object_mut().unwrap().remove("import");
        disk["read_only"] = json!(true);
        (disk["chain"], disk["backend"]) = (chain, backend);
        let into = json!({ "chain": to_chain, "backend": to });
        disk["merge"] = json!({ "into": into, "lock": { "fd": 20 } });
        read_value(&config).map(drop).map_err(|error| error.to_string())
    };
    let no = || json!([]);
    // Down to the image below; the copies of a layer and of an image.
    read(no(), layer(6, &below), no(), raw(9)).unwrap();
    read(json!([crypt(5)]), layer(6, &below), json!([crypt(11)]), layer(9, &below)).unwrap();
    read(json!([crypt(5)]), raw(6), no(), raw(9)).unwrap();
    let cache = || json!([{ "kind": "cache", "bytes": 1 << 20 }]);
    for (refused, reason) in [
        (read(no(), layer(6, &json!([])), no(), raw(9)), "another below it"),
        (read(no(), memory(), no(), raw(9)), "in memory"),
        (read(no(), raw(6), no(), memory()), "in memory"),
        (read(cache(), raw(6), no(), raw(9)), "without filters but encryption"),
        (read(no(), raw(6), cache(), raw(9)), "no filter but encryption"),
    ] {
        let refused = refused.unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn a_mirror_is_checked_for_sense() {
    let crypt = |fd: i32| json!({ "kind": "crypt", "key": { "fd": fd }, "holes": "zero" });
    let file = |fd: i32| json!({ "kind": "file", "file": { "fd": fd }, "offset": 0 });
    let mirror = |chain: Value, backend: Value, rate: u64| {
        json!({
            "kind": "mirror", "to": { "chain": chain, "backend": backend },
            "map": { "fd": 12 }, "pace": { "bytes_per_second": rate }
        })
    };
    let good_mirror = || mirror(json!([crypt(10)]), file(11), REPLICATE_RATE_MIN);
    let limit = json!({ "kind": "limit", "requests": { "per_second": 9, "burst": 9 } });
    let cache = json!({ "kind": "cache", "bytes": 1 << 20 });
    let replica = json!({
        "kind": "replicate", "replica": { "fd": 20 }, "map": { "fd": 21 },
        "bytes_per_second": REPLICATE_RATE_MIN
    });
    let with = |chain: &Value| {
        let mut config = good();
        config["disks"][0]["chain"] = chain.clone();
        config
    };
    for chain in [
        json!([good_mirror()]),
        json!([limit, good_mirror(), crypt(5), cache, replica]),
        json!([mirror(json!([]), file(11), REPLICATE_RATE_MIN), crypt(5)]),
        json!([mirror(json!([crypt(10), cache]), file(11), REPLICATE_RATE_MIN), crypt(5), cache]),
        json!([{
            "kind": "mirror", "to": { "chain": [], "backend": file(11) }, "map": { "fd": 12 }
        }]),
    ] {
        let config = read_value(&with(&chain));
        let config = config.unwrap_or_else(|error| panic!("{chain}: {error}"));
        assert_eq!(pools(&config.disks[0]), 4, "a queue of the disk, and one of the copy");
    }
    let rate = REPLICATE_RATE_MIN;
    for (chain, reason) in [
        (json!([crypt(5), good_mirror()]), "above `mirror`"),
        (json!([cache, good_mirror()]), "above `mirror`"),
        (json!([good_mirror(), good_mirror()]), "mirrored more than once"),
        (json!([mirror(json!([]), file(11), rate - 1)]), "give at least"),
        (json!([mirror(json!([replica]), file(11), rate)]), "neither mirrored nor"),
        (json!([mirror(json!([good_mirror()]), file(11), rate)]), "neither mirrored nor"),
        (json!([mirror(json!([]), json!({ "kind": "mem" }), rate)]), "to memory"),
        (json!([mirror(json!([crypt(8), crypt(9)]), file(11), rate)]), "more than once"),
        (json!([mirror(json!([cache]), file(11), rate)]), "at most the disk's own"),
    ] {
        let refusal = read_value(&with(&chain)).expect_err(&chain.to_string()).to_string();
        assert!(refusal.contains(reason), "{chain}: {refusal}");
    }
    for (field, value) in
        [("read_only", json!(true)), ("front_end", json!({ "kind": "nbd", "listen": { "fd": 7 } }))]
    {
        let mut config = with(&json!([good_mirror()]));
        config["disks"][0][field] = value;
        read_value(&config).unwrap_or_else(|error| panic!("{field}: {error}"));
    }
}

/// What another host gets, which says itself what is below the copy.
#[test]
fn a_layer_is_copied_for_another_host() {
    let (file, server) = (
        json!({ "kind": "file", "file": { "fd": 11 }, "offset": 0 }),
        json!({ "kind": "nbd", "sockets": [{ "fd": 11 }], "export": "" }),
    );
    let layer = json!({ "kind": "qcow2", "file": { "fd": 6 }, "offset": 0,
        "backing": [{ "file": { "fd": 8 }, "format": "raw" }] });
    let read = |(to, same_below, stays): (&Value, bool, bool), read_only: bool, served: bool| {
        let mut config = good();
        let disk = &mut config["disks"][0];
        disk.as_object_mut().unwrap().remove("import");
        if !served {
            disk.as_object_mut().unwrap().remove("front_end");
        }
        disk["read_only"] = json!(read_only);
        disk["backend"] = layer.clone();
        disk["chain"] = json!([{
            "kind": "mirror", "to": { "chain": [], "backend": to }, "map": { "fd": 12 },
            "same_below": same_below, "stays": stays
        }]);
        read_value(&config).map(drop).map_err(|error| error.to_string())
    };
    let away = |same_below| (&server, same_below, true);
    read(away(true), true, false).unwrap();
    read(away(false), true, false).unwrap();
    read(away(true), false, true).unwrap();
    for (refused, reason) in [
        (read((&server, true, false), false, true), "nothing below it"),
        (read((&file, true, true), false, true), "nothing below it"),
    ] {
        let refused = refused.unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn each_invalid_value_is_refused_with_its_reason() {
    let cases: [(&str, Value, &str); 12] = [
        ("/version", json!(2), "version 2"),
        ("/disks", json!([]), "0 disks"),
        ("/disks/0/size", json!(1000), "multiple of 4096"),
        ("/disks/0/size", json!(u64::MAX - 4095), "beyond what a file"),
        ("/disks/0/serial", json!("123456789012345678901"), "serial"),
        ("/disks/0/front_end/queues", json!(0), "0 queues"),
        ("/disks/0/front_end/queues", json!(17), "17 queues"),
        ("/disks/0/backend/kind", json!("tape"), "tape"),
        ("/disks/0/chain/0/holes", json!("maybe"), "maybe"),
        ("/disks/0/disk", json!("x"), "not understood"),
        (
            "/disks/0/export",
            json!({ "target": { "fd": 8 }, "format": { "kind": "raw" } }),
            "must be read-only",
        ),
        (
            "/disks/0",
            json!({
                "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                "size": 8192,
                "serial": "",
                "read_only": true,
                "chain": [],
                "backend": { "kind": "file", "file": { "fd": 6 }, "offset": 0 },
                "export": { "target": { "fd": 8 }, "format": { "kind": "sums" } }
            }),
            "no file is to get them",
        ),
    ];
    for (pointer, value, reason) in cases {
        let mut config = good();
        *config.pointer_mut(pointer).unwrap() = value;
        let refusal = read_value(&config).unwrap_err().to_string();
        assert!(refusal.contains(reason), "{pointer}: {refusal}");
    }
    let mut config = good();
    config["disks"][0]["beside"] = json!({ "listen": { "fd": 9 } });
    assert!(read_value(&config).unwrap().disks[0].beside.is_some());
    config["disks"][0]["front_end"] = Value::Null;
    assert!(read_value(&config).unwrap_err().to_string().contains("needs a front end"));
    let mut config = good();
    config["disks"][0]["backend"] = json!({ "kind": "mem" });
    assert!(read_value(&config).is_ok());
    config["disks"][0]["chain"] = json!([{
        "kind": "replicate", "replica": { "fd": 8 }, "map": { "fd": 9 },
        "bytes_per_second": REPLICATE_RATE_MIN
    }]);
    assert!(read_value(&config).unwrap_err().to_string().contains("disk in memory"));
    let mut config = good();
    config["surprise"] = json!(1);
    assert!(read_value(&config).unwrap_err().to_string().contains("surprise"));
    let mut config = good();
    let disk = config["disks"][0].clone();
    config["disks"] = json!([disk, disk]);
    assert!(read_value(&config).unwrap_err().to_string().contains("twice"));
    let mut config = good();
    let nbd = |number: usize| {
        let mut disk = disk.clone();
        disk["disk"] = json!(format!("01890a5d-ac96-774b-bcce-{number:012}"));
        disk["front_end"] = json!({ "kind": "nbd", "listen": { "path": "/run/y" } });
        disk
    };
    config["disks"] = (0..16).map(nbd).collect();
    assert_eq!(read_value(&config).unwrap().disks.iter().map(pools).sum::<usize>(), 128);
    config["disks"] = (0..17).map(nbd).collect();
    assert!(read_value(&config).unwrap_err().to_string().contains("68 queues in all"));
    config["disks"] = (0..3).map(nbd).collect();
    for disk in config["disks"].as_array_mut().unwrap() {
        disk["chain"] = json!([{ "kind": "cache", "bytes": CACHE_BYTES_MAX / 2 }]);
    }
    assert!(read_value(&config).unwrap_err().to_string().contains("384 MiB in all"));
    config["disks"].as_array_mut().unwrap().pop();
    assert!(read_value(&config).is_ok());
    let endless = std::io::repeat(b' ');
    assert!(matches!(read(endless), Err(ConfigError::TooLong)));
}
