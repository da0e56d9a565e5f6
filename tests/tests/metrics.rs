//! What Prometheus sees of a guest that reads and writes.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::installation::Installation;
use vmseal_tests::rest;

fn scrape(here: &Installation, path: &str) -> String {
    rest::scrape(here, path).unwrap()
}

/// The sum over all samples of a name with this label.
fn sum(text: &str, name: &str, label: &str) -> f64 {
    let of =
        text.lines().filter(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
    of.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

#[test]
fn a_guests_requests_are_counted_and_timed_in_the_filter_and_reported_by_the_server() {
    let here = Installation::new().unwrap();
    let slow = ["policy", "create", "limited", "--encrypt", "--bandwidth", "4KiB"];
    let said = here.refused(&slow).unwrap();
    assert!(said.contains("--bandwidth"), "{said}");
    for (size, why) in [("512KiB", "give a multiple"), ("257MiB", "at most 256 MiB")] {
        let said =
            here.refused(&["policy", "create", "limited", "--encrypt", "--cache", size]).unwrap();
        assert!(said.contains(why), "{size}: {said}");
    }
    let limits = ["--iops", "4", "--bandwidth", "8MiB", "--cache", "1MiB"];
    here.vmseal(&[&["policy", "create", "limited", "--encrypt"][..], &limits].concat()).unwrap();
    here.create_counter("web", "limited").unwrap();
    let said = here.vmseal(&["vm", "show", "web"]).unwrap();
    assert!(said.contains("at most 4 IOPS, at most 8.0 MiB/s, 1.0 MiB of cache"), "{said}");
    assert_eq!(here.boot_counter("web").unwrap(), 1);

    let host = scrape(&here, "/metrics/hosts/here");
    let memory = sum(&host, "vmseal_vm_filter_memory_limit_bytes", "vm=");
    assert!(memory >= f64::from(32 << 20), "{memory}: {host}");
    for operation in ["operation=\"read\"", "operation=\"write\""] {
        let requests = sum(&host, "vmseal_disk_requests_total", operation);
        assert!(requests > 0.0, "{operation}: {host}");
        let timed = sum(&host, "vmseal_disk_latency_seconds_count", operation);
        assert_eq!(timed, requests, "{operation}: {host}");
        let infinite = format!("le=\"+Inf\",{operation}");
        let bucket = host
            .lines()
            .filter(|line| line.starts_with("vmseal_disk_latency_seconds_bucket{"))
            .filter(|line| line.contains("le=\"+Inf\"") && line.contains(operation))
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
            .sum::<f64>();
        assert_eq!(bucket, requests, "{infinite}: {host}");
        assert!(sum(&host, "vmseal_disk_bytes_total", operation) >= 512.0 * requests, "{host}");
        // From a microsecond to a minute each.
        let seconds = sum(&host, "vmseal_disk_latency_seconds_sum", operation);
        assert!((1e-6..60.0).contains(&(seconds / requests)), "{operation}: {host}");
    }
    // The first piece of work of a queue is always timed.
    assert!(sum(&host, "vmseal_disk_cipher_cpu_seconds_total", "decrypt") > 0.0, "{host}");
    // Each request after the first waits a quarter of a second for its turn, unless the guest paused.
    let held = sum(&host, "vmseal_disk_held_requests_total", "disk=");
    assert!(held > 0.0, "{host}");
    assert!(sum(&host, "vmseal_disk_held_seconds_total", "disk=") > 0.0, "{host}");
    // The guest's two sectors are one block, and the second one is read when that is known.
    for outcome in ["outcome=\"missed\"", "outcome=\"hit\""] {
        let reads = sum(&host, "vmseal_disk_cache_reads_total", outcome);
        assert!(reads >= 1.0, "{outcome}: {host}");
    }
    assert!(sum(&host, "vmseal_disk_cache_blocks_total", "event=\"installed\"") >= 1.0, "{host}");
    assert_eq!(sum(&host, "vmseal_disk_errors_total", "disk="), 0.0);
    assert_eq!(sum(&host, "vmseal_agent_vms", "power=\"running\""), 1.0);
    assert_eq!(sum(&host, "vmseal_agent_vm_keys", "key=\"held\""), 1.0);
    assert!(sum(&host, "vmseal_agent_keys_offered_total", "taken") >= 1.0);
    assert!(sum(&host, "vmseal_agent_process_starts_total", "qemu") >= 1.0);
    assert!(host.contains("vmseal_agent_filters_silent 0"), "{host}");

    let server = scrape(&here, "/metrics");
    let id = here.vm("web").unwrap()["id"].as_str().unwrap().to_owned();
    assert_eq!(sum(&server, "vmseal_vm_info", &format!("vm=\"{id}\",name=\"web\"")), 1.0);
    assert!(sum(&server, "vmseal_server_tasks_total", "kind=\"vm.start\",outcome=\"done\"") >= 1.0);
    assert!(sum(&server, "vmseal_server_key_operations_total", "operation=\"get\"") >= 1.0);
    assert!(sum(&server, "vmseal_datastore_capacity_bytes", "datastore=\"local\"") > 0.0);

    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let host = scrape(&here, "/metrics/hosts/here");
    assert_eq!(sum(&host, "vmseal_agent_vm_ends_total", "reason=\"powered_off\""), 1.0);
    assert_eq!(sum(&host, "vmseal_disk_requests_total", "vm="), 0.0, "a stopped VM has figures");
}
