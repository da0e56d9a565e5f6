//! Log levels of server, agent and filter, changed while they run.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;

#[test]
fn levels_change_at_once_are_the_filters_too_and_last_until_the_process_ends() {
    let mut here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let vm = here.vm("web").unwrap()["id"].as_str().unwrap().to_owned();
    let log = |here: &Installation, name: &str| std::fs::read_to_string(here.path(name)).unwrap();
    let filter = format!("run/vms/{vm}/filter.log");
    let levels = |here: &Installation, of: &[&str]| {
        here.json(of).unwrap()["levels"].as_str().unwrap().to_owned()
    };

    // The server: a read is worth a line at debug only.
    let shows = |here: &Installation, id: &str| {
        here.vmseal(&["vm", "list", "--request-id", id]).unwrap();
        log(here, "server.log").contains(id)
    };
    assert_eq!(levels(&here, &["server", "log-level"]), "info");
    assert!(!shows(&here, "quiet-1"));
    here.vmseal(&["server", "log-level", "info,vmseal_rest=debug"]).unwrap();
    assert!(shows(&here, "loud-1"));
    here.vmseal(&["server", "log-level", "info"]).unwrap();
    assert!(!shows(&here, "quiet-2"));

    // The host: agent, the filter that runs, and the one that starts later.
    let refused = here.refused(&["host", "log-level", "here", "debg"]).unwrap();
    assert!(refused.contains("is no log level"), "{refused}");
    here.vmseal(&["host", "log-level", "here", "vmseal=trace", "--request-id", "turn-1"]).unwrap();
    assert_eq!(levels(&here, &["host", "log-level", "here"]), "info,vmseal=trace");
    assert!(
        log(&here, "agent.log")
            .contains("logging at other levels from now on levels=info,vmseal=trace")
    );
    assert!(
        log(&here, &filter)
            .contains("logging at other levels from now on levels=info,vmseal=trace")
    );
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    assert!(log(&here, &filter).contains("logging=info,vmseal=trace"));
    let events = here.json(&["events", "--kind", "host.log-level-set"]).unwrap();
    assert_eq!(events.as_array().unwrap().len(), 1, "{events}");
    assert_eq!(
        (&events[0]["detail"], &events[0]["request_id"]),
        (&"info,vmseal=trace".into(), &"turn-1".into())
    );

    // With the agent's end it is over, for the filter that goes on too.
    here.kill_agent();
    here.start_agent().unwrap();
    assert_eq!(levels(&here, &["host", "log-level", "here"]), "info");
    eventually("the filter has the new level", || {
        log(&here, &filter)
            .contains("logging at other levels from now on levels=info\n")
            .then_some(())
    })
    .unwrap();
}
