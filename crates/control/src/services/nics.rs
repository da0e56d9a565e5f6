//! Network cards of VMs: what is asked for, and what is shown.

use vmseal_api::host::version::NICS;
use vmseal_api::host::{HostAgent, NicSpec, VmState};
use vmseal_api::id::{HostId, NicId, VmId};
use vmseal_api::model::Nic;
use vmseal_api::nic::{MacAddress, MacPrefix, NicBackend, NicToCheck, check_nics};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::CreateNic;

use super::Services;
use crate::hosts::is_silence;
use crate::store::{Write, nics};

/// What a card is called that nobody has named.
fn name(index: usize, nic: &CreateNic) -> String {
    nic.name.clone().unwrap_or_else(|| format!("nic{index}"))
}

/// Checks the cards of a VM that is to be made.
pub(super) fn check(wanted: &[CreateNic]) -> Result<(), Problem> {
    let names: Vec<_> = wanted.iter().enumerate().map(|(index, nic)| name(index, nic)).collect();
    let nics = wanted.iter().zip(&names);
    let nics = nics.map(|(nic, name)| NicToCheck { name, mac: nic.mac, backend: &nic.backend });
    check_nics(&nics.collect::<Vec<_>>()).map_err(|(field, what)| Problem::invalid(field, what))
}

/// The cards of a VM that is to be made, each with an address that no other card has.
pub(super) async fn place(
    write: &mut Write<'_>,
    wanted: &[CreateNic],
) -> Result<Vec<NicSpec>, Problem> {
    for (index, mac) in wanted.iter().enumerate().filter_map(|(at, nic)| Some((at, nic.mac?))) {
        if let Some(vm) = nics::owner(write, mac).await? {
            let what = format!(
                "a network card of VM '{vm}' has the address {mac}: give this card another address, or none, and a free one is chosen"
            );
            let field = Some(format!("nics[{index}].mac"));
            return Err(Problem { field, ..Problem::new(ErrorCode::AlreadyExists, what) });
        }
    }
    let mut made: Vec<NicSpec> = Vec::new();
    for (index, nic) in wanted.iter().enumerate() {
        let mac = match nic.mac {
            Some(mac) => mac,
            None => loop {
                let mac = nics::new_mac(write, random).await?;
                let asked_for = wanted.iter().any(|other| other.mac == Some(mac));
                if !asked_for && !made.iter().any(|other| other.mac == mac) {
                    break mac;
                }
            },
        };
        made.push(spec(index, nic, mac));
    }
    Ok(made)
}

/// A card that is asked for, with this address.
fn spec(index: usize, nic: &CreateNic, mac: MacAddress) -> NicSpec {
    NicSpec {
        nic: NicId::new(),
        name: name(index, nic),
        mac,
        model: nic.model,
        backend: nic.backend.clone(),
        link: nic.link,
    }
}

/// Gives a new VM cards like those of another VM. Each gets a MAC address of its own; the ports of the host that are forwarded are chosen when
/// the VM starts.
pub(super) async fn place_alike(
    write: &mut Write<'_>,
    of: impl IntoIterator<Item = NicSpec>,
) -> Result<Vec<NicSpec>, Problem> {
    let alike: Vec<_> = of.into_iter().map(alike).collect();
    place(write, &alike).await
}

fn alike(of: NicSpec) -> CreateNic {
    let NicSpec { name, model, backend, link, .. } = without_ports(of);
    CreateNic { name: Some(name), mac: None, model, backend, link }
}

/// A card whose forwarded ports of the host are chosen when its VM starts.
pub(super) fn without_ports(mut of: NicSpec) -> NicSpec {
    if let NicBackend::User { forwards } = &mut of.backend {
        forwards.iter_mut().for_each(|forward| forward.host_port = 0);
    }
    of
}

fn random() -> [u8; 3] {
    let mut bytes = [0; 3];
    // Without random bytes it is an address that may be taken, and that is seen.
    let _ = aws_lc_rs::rand::fill(&mut bytes);
    bytes
}

/// Refuses network cards on a host whose agent knows none.
pub(super) fn known_to(services: &Services, host: HostId, name: &str) -> Result<(), Problem> {
    let description = services.hosts.view(host).description;
    if description.is_some_and(|it| it.features.iter().any(|feature| feature == NICS)) {
        return Ok(());
    }
    let what = format!("the agent of host '{name}' knows no network cards: upgrade vmseal there");
    let field = Some("nics".to_owned());
    Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, what) })
}

/// Asks the host whether it could connect the cards of a new VM. The cards have no MAC addresses yet; those that they are asked about
/// with are placeholders, as a host does not look at them.
pub(super) async fn examine_wanted(
    services: &Services,
    (host, host_name): (HostId, &str),
    vm: VmId,
    wanted: &[CreateNic],
) -> Result<(), Problem> {
    if wanted.is_empty() {
        return Ok(());
    }
    let agent = services.hosts.connected(host)?;
    known_to(services, host, host_name)?;
    let any = || MacPrefix::from_random(random()).address(random());
    let cards = wanted.iter().enumerate();
    let cards = cards.map(|(index, nic)| spec(index, nic, nic.mac.unwrap_or_else(any)));
    examine(&*agent, vm, &cards.collect::<Vec<_>>()).await
}

/// Asks the host whether the cards of a VM that is off could be connected.
pub(super) async fn examine(
    agent: &dyn HostAgent,
    vm: VmId,
    nics: &[NicSpec],
) -> Result<(), Problem> {
    for (index, nic) in nics.iter().enumerate() {
        agent.examine_nic(vm, nic.clone()).await.map_err(|problem| {
            // A host that does not answer says nothing of the card.
            let of_card = !is_silence(&problem);
            let field = of_card.then(|| format!("nics[{index}].backend"));
            Problem { field, ..problem }
        })?;
    }
    Ok(())
}

/// The cards as they are shown.
pub(super) fn shown(nics: Vec<NicSpec>, seen: Option<&VmState>) -> Vec<Nic> {
    let state = |nic: NicId| seen?.nics.iter().find(|state| state.nic == nic).cloned();
    let shown = nics.into_iter().map(|nic| {
        let state = state(nic.nic);
        let (forwards, interface, addresses) = state.map_or_else(Default::default, |state| {
            (state.forwards, state.interface, state.addresses)
        });
        Nic {
            id: nic.nic,
            name: nic.name,
            mac: nic.mac,
            model: nic.model,
            backend: nic.backend,
            link: nic.link,
            forwards,
            interface,
            addresses,
        }
    });
    shown.collect()
}
