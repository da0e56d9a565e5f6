//! Network cards: what is seen of them while the VM runs, and what is refused.

use vmseal_api::host::{Device, HostAgent, NicSpec};
use vmseal_api::id::NicId;
use vmseal_api::nic::{NicBackend, NicLink, NicModel};
use vmseal_api::problem::ErrorCode;

use super::{Session, done, refused};

/// A card with a port of the host that the agent chooses.
pub(super) fn card() -> NicSpec {
    let forwards = vec!["tcp:22".parse().expect("a forwarded port")];
    NicSpec {
        nic: NicId::new(),
        name: "nic0".to_owned(),
        mac: "02:00:00:00:00:01".parse().expect("an address"),
        model: NicModel::Virtio,
        backend: NicBackend::User { forwards },
        link: NicLink::Up,
    }
}

/// Before the VM runs: nothing is connected, and what could not be is told.
pub(super) async fn examined(agent: &dyn HostAgent, session: &Session) {
    assert!(session.now(agent).await.nics.is_empty(), "cards of a VM that is off");
    done(agent.examine_nic(session.vm(), card()).await, "examining a card");
    let bridge = NicBackend::Bridge { bridge: "missing0".to_owned() };
    let missing = NicSpec { backend: bridge, ..card() };
    let examined = agent.examine_nic(session.vm(), missing).await;
    refused(examined, ErrorCode::WrongState, "a bridge that is not there");
}

/// While it runs.
pub(super) async fn connected(agent: &dyn HostAgent, session: &Session) {
    let nics = session.now(agent).await.nics;
    let [nic] = &nics[..] else { panic!("one card: {nics:?}") };
    assert_eq!(Some(nic.nic), session.spec.nics().next().map(|nic| nic.nic));
    let [forward] = &nic.forwards[..] else { panic!("one port: {nic:?}") };
    assert!(forward.host_port != 0 && forward.guest_port == 22, "{forward}");
    assert_eq!(nic.link, Some(NicLink::Up));
    // Its cable is plugged out and in; another card it does not become.
    for link in [NicLink::Down, NicLink::Up] {
        let mut spec = session.spec.clone();
        spec.devices.iter_mut().for_each(|device| {
            if let Device::Nic(nic) = device {
                nic.link = link;
            }
        });
        done(agent.register_vm(spec.clone()).await, "another link while it runs");
        assert_eq!(session.now(agent).await.nics[0].link, Some(link));
        let mut other = spec.clone();
        for nic in spec.nics() {
            let known = other.nic_mut(nic.nic).expect("the card");
            known.model = NicModel::E1000e;
        }
        refused(agent.register_vm(other).await, ErrorCode::WrongState, "another card");
    }
}
