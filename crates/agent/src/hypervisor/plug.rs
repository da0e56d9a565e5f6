//! Devices that are plugged into a running QEMU, and out of it.
//!
//! Every step may be repeated: what an agent that ended in the middle has left is removed before it is made again.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vmseal_api::host::NicSpec;
use vmseal_api::id::{DiskId, NicId};
use vmseal_api::nic::NicModel;

use super::network::{Card, OpenTap, QUEUES_MAX};
use super::qmp::{Qmp, QmpError};
use super::{guest_agent, qemu};

/// How long a guest may take to let a device go before the caller is told to ask again. A guest that runs does in a
/// second or two.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between looks.
const RELEASE_INTERVAL: Duration = Duration::from_millis(50);

/// The descriptors of a network card: those of its tap, and those of the kernel's virtio-net.
const QUEUE: &str = "queue";
const VHOST: &str = "vhost";

/// The path of QEMU's objects that have an id (docs/devel/qom.rst).
pub const DEVICES: &str = "/machine/peripheral";

/// How QEMU's monitor knows a network card.
#[must_use]
pub fn nic_device(nic: NicId) -> String {
    qemu::card_id(nic)
}

/// The devices that QEMU has, by id.
///
/// # Errors
/// QEMU's.
pub async fn devices(qmp: &Qmp) -> Result<Vec<String>, QmpError> {
    let listed = qmp.execute("qom-list", json!({"path": DEVICES})).await?;
    let names = listed.as_array().into_iter().flatten();
    Ok(names.filter_map(|it| it["name"].as_str()).map(str::to_owned).collect())
}

/// Whether a network card has a ROM, by which a guest is started from the network.
///
/// # Errors
/// QEMU's.
pub async fn has_rom(qmp: &Qmp, nic: NicId) -> Result<bool, QmpError> {
    let path = format!("{DEVICES}/{}", nic_device(nic));
    let file = qmp.execute("qom-get", json!({"path": path, "property": "romfile"})).await?;
    Ok(file.as_str().is_some_and(|file| !file.is_empty()))
}

/// Has QEMU listen for the filter of a disk.
///
/// # Errors
/// QEMU's.
pub async fn listen(qmp: &Qmp, socket: u32, listener: &UnixListener) -> Result<(), QmpError> {
    drop_listener(qmp, socket).await;
    let name = qemu::chardev_id(socket);
    qmp.pass_descriptor(&name, listener.as_fd()).await?;
    let address = json!({"type": "fd", "data": {"str": name}});
    let data = json!({"addr": address, "server": true, "wait": false});
    let backend = json!({"type": "socket", "data": data});
    qmp.execute("chardev-add", json!({"id": name, "backend": backend})).await.map(drop)
}

/// Ends that; one that is not there is no error.
pub async fn drop_listener(qmp: &Qmp, socket: u32) {
    let removed = qmp.execute("chardev-remove", json!({"id": qemu::chardev_id(socket)})).await;
    if let Err(error) = removed {
        tracing::debug!(%error, socket, "the socket of a disk is not QEMU's");
    }
}

/// Whether QEMU takes another filter for a disk that its guest does not use: not before 9.0 (docs/decisions/020).
///
/// # Errors
/// QEMU's.
pub async fn takes_filters_at_any_time(qmp: &Qmp) -> Result<bool, QmpError> {
    is_at_least(qmp, 9).await
}

/// Whether QEMU is of this version or a later one.
///
/// # Errors
/// QEMU's.
pub async fn is_at_least(qmp: &Qmp, wanted: u64) -> Result<bool, QmpError> {
    let version = qmp.execute("query-version", Value::Null).await?;
    Ok(version["qemu"]["major"].as_u64().is_some_and(|major| major >= wanted))
}

/// Whether a program in the guest has the port of the guest agent open.
pub async fn guest_agent_listens(qmp: &Qmp) -> bool {
    let listed = qmp.execute("query-chardev", Value::Null).await.unwrap_or_default();
    let mut listed = listed.as_array().into_iter().flatten();
    listed.any(|it| it["label"] == guest_agent::CHARDEV && it["frontend-open"] == true)
}

/// Whether QEMU has a connection to the filter of a disk.
///
/// # Errors
/// QEMU's.
pub async fn has_connection(qmp: &Qmp, socket: u32) -> Result<bool, QmpError> {
    let listed = qmp.execute("query-chardev", Value::Null).await?;
    let name = qemu::chardev_id(socket);
    let of_disk = |it: &&Value| it["label"].as_str() == Some(name.as_str());
    let known = listed.as_array().into_iter().flatten().find(of_disk);
    let file = known.and_then(|it| it["filename"].as_str());
    Ok(file.is_some_and(|file| !file.starts_with("disconnected:")))
}

/// Plugs in a disk whose filter is connected.
///
/// # Errors
/// QEMU's.
pub async fn disk(
    qmp: &Qmp,
    disk: DiskId,
    socket: u32,
    queues: u16,
    port: u32,
) -> Result<(), QmpError> {
    let device = json!({
        "driver": "vhost-user-blk-pci",
        "id": qemu::disk_device(disk),
        "chardev": qemu::chardev_id(socket),
        "num-queues": queues,
        "bus": qemu::port_id(port),
        "disable-legacy": "on",
    });
    qmp.execute("device_add", device).await.map(drop)
}

/// Plugs in a network card.
///
/// # Errors
/// QEMU's.
pub async fn nic(qmp: &Qmp, port: u32, nic: &NicSpec, card: &Card) -> Result<(), QmpError> {
    drop_network(qmp, nic.nic).await;
    let network = qemu::network_id(nic.nic);
    let mut backend = json!({"id": network});
    match &card.tap {
        None => {
            let forwards = card.state.forwards.iter().map(|it| json!({"str": qemu::forward(it)}));
            backend["type"] = "user".into();
            backend["hostfwd"] = Value::Array(forwards.collect());
        }
        Some(tap) => {
            backend["type"] = "tap".into();
            backend["fds"] = pass(qmp, QUEUE, nic.nic, tap.queues()).await?.into();
            if tap.vhost().next().is_some() {
                backend["vhost"] = true.into();
                backend["vhostfds"] = pass(qmp, VHOST, nic.nic, tap.vhost()).await?.into();
            }
        }
    }
    qmp.execute("netdev_add", backend).await?;
    let mut device = json!({
        "driver": qemu::driver(nic.model),
        "id": nic_device(nic.nic),
        "netdev": network,
        "bus": qemu::port_id(port),
        "mac": nic.mac.to_string(),
        "romfile": "",
    });
    if nic.model == NicModel::Virtio {
        device["disable-legacy"] = "on".into();
        if let several @ 2.. = card.tap.as_ref().map_or(0, |tap| tap.queues().count()) {
            device["mq"] = true.into();
            device["vectors"] = (2 * several + 2).into();
        }
        if let Some(mtu) = card.tap.as_ref().and_then(OpenTap::mtu) {
            device["host_mtu"] = mtu.into();
        }
    }
    qmp.execute("device_add", device).await.map(drop)
}

/// Passes descriptors to QEMU; their names, as `fds` takes them.
async fn pass(
    qmp: &Qmp,
    kind: &str,
    nic: NicId,
    descriptors: impl Iterator<Item = BorrowedFd<'_>>,
) -> Result<String, QmpError> {
    let mut names = Vec::new();
    for (index, descriptor) in descriptors.enumerate() {
        let name = descriptor_name(kind, index, nic);
        qmp.pass_descriptor(&name, descriptor).await?;
        names.push(name);
    }
    Ok(names.join(":"))
}

/// Removes what a network card was connected to; one that is not there is no error. Descriptors that an agent has passed
/// before it ended are closed, too: a tap is there, and taken, as long as QEMU has one of them.
pub async fn drop_network(qmp: &Qmp, nic: NicId) {
    let removed = qmp.execute("netdev_del", json!({"id": qemu::network_id(nic)})).await;
    if let Err(error) = removed {
        tracing::debug!(%error, %nic, "the network of a card is not QEMU's");
    }
    for kind in [QUEUE, VHOST] {
        for index in 0..QUEUES_MAX as usize {
            let name = descriptor_name(kind, index, nic);
            match qmp.execute("closefd", json!({"fdname": name})).await {
                Ok(_) => {}
                Err(error @ QmpError::Refused { .. }) => {
                    tracing::trace!(%error, name, "QEMU has no such descriptor");
                }
                Err(error) => {
                    return tracing::warn!(%error, %nic, "QEMU may still have a card's tap");
                }
            }
        }
    }
}

/// What a descriptor of a network card is called while it is passed.
fn descriptor_name(kind: &str, index: usize, nic: NicId) -> String {
    format!("{kind}{index}-{nic}")
}

/// Asks the guest to let a device go, and waits a while; whether QEMU no longer has it.
///
/// # Errors
/// QEMU's.
pub async fn out(qmp: &Qmp, device: &str) -> Result<bool, QmpError> {
    let give_up = Instant::now() + RELEASE_TIMEOUT;
    if !devices(qmp).await?.iter().any(|known| known == device) {
        return Ok(true);
    }
    match qmp.execute("device_del", json!({"id": device})).await {
        // It has been asked before, and has not answered yet.
        Ok(_) | Err(QmpError::Refused { .. }) => {}
        Err(error) => return Err(error),
    }
    while devices(qmp).await?.iter().any(|known| known == device) {
        if Instant::now() > give_up {
            return Ok(false);
        }
        sleep(RELEASE_INTERVAL).await;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vmseal_api::host::NicState;
    use vmseal_api::nic::NicBackend;

    use super::*;
    use crate::hypervisor::qmp::recording;

    /// Also on a machine whose kernel has no vhost-net.
    #[tokio::test]
    async fn the_kernel_moves_the_frames_of_a_card_that_is_plugged_in() {
        let (qmp, monitor) = recording::connect().await;
        let files = || Vec::from([(); 2].map(|()| File::open("/dev/null").unwrap()));
        let spec = NicSpec {
            nic: NicId::new(),
            name: "nic0".to_owned(),
            mac: "52:54:00:00:00:01".parse().unwrap(),
            model: NicModel::Virtio,
            backend: NicBackend::Bridge { bridge: "br0".to_owned() },
            link: Default::default(),
        };
        let id = spec.nic;
        let (forwards, addresses) = (vec![], vec![]);
        let state = NicState { nic: id, forwards, interface: None, addresses, link: None };
        let card = Card { state, tap: Some(OpenTap::made_of(files(), files())) };
        nic(&qmp, 0, &spec, &card).await.unwrap();
        drop(qmp);
        let taken = monitor.await.unwrap();
        let of = |wanted: &'static str| taken.iter().filter(move |it| it["execute"] == wanted);
        let passed: Vec<_> = of("getfd").map(|it| it["arguments"]["fdname"].clone()).collect();
        let [queue0, queue1, vhost0, vhost1] =
            ["queue0", "queue1", "vhost0", "vhost1"].map(|it| format!("{it}-{id}"));
        assert_eq!(passed, [&queue0, &queue1, &vhost0, &vhost1].map(|it| json!(it)));
        let wanted = json!({
            "id": qemu::network_id(id), "type": "tap", "fds": format!("{queue0}:{queue1}"),
            "vhost": true, "vhostfds": format!("{vhost0}:{vhost1}"),
        });
        assert_eq!(of("netdev_add").next().unwrap()["arguments"], wanted);
        assert_eq!(of("device_add").next().unwrap()["arguments"]["vectors"], 6);
    }
}
