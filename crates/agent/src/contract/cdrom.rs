//! A CD-ROM drive: what is in it changes while the VM runs, and the VM starts from it once.

use std::path::Path;

use vmseal_api::boot::{BootDevice, Cdrom};
use vmseal_api::hardware::Hardware;
use vmseal_api::host::{HostAgent, Power, PowerOff, VmSpec};
use vmseal_api::problem::ErrorCode;

use super::{Session, done, refused};

/// The VM is off before and after, and is as it was.
pub async fn drive(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    let [first, second, missing] = ["first.iso", "second.iso", "missing.iso"]
        .map(|name| session.fixture.image.with_file_name(name));
    for medium in [&first, &second] {
        std::fs::write(medium, [0; 4096]).expect("a medium");
    }
    let hardware = |medium: Option<&Path>, boot: &[BootDevice]| Hardware {
        cdrom: Some(Cdrom { medium: medium.map(Path::to_owned) }),
        boot: boot.to_vec(),
        ..Hardware::default()
    };
    let with = |medium: Option<&Path>, boot: &[BootDevice]| VmSpec {
        hardware: hardware(medium, boot),
        ..session.spec.clone()
    };
    let code = ErrorCode::InvalidRequest;
    done(agent.examine_hardware(hardware(Some(&first), &[]), None).await, "examining a medium");
    let examined = agent.examine_hardware(hardware(Some(&missing), &[]), None).await;
    refused(examined, code, "a medium that is not there");
    let facts = done(agent.measure_medium(vm, first.clone()).await, "measuring a medium");
    assert_eq!(facts.bytes, 4096);
    let same = done(agent.measure_medium(vm, second.clone()).await, "measuring its copy");
    assert_eq!(facts, same);
    let measured = agent.measure_medium(vm, missing.clone()).await;
    refused(measured, code, "measuring a medium that is not there");
    let relative = with(Some(Path::new("first.iso")), &[]);
    refused(agent.register_vm(relative).await, code, "a medium without a whole path");
    let twice = with(None, &[BootDevice::Disk, BootDevice::Disk]);
    refused(agent.register_vm(twice).await, code, "a boot order with a device twice");
    refused(agent.power_on_from(vm, BootDevice::Cdrom).await, code, "starting from no drive");

    done(agent.register_vm(with(Some(&first), &[])).await, "registering a drive");
    done(agent.power_on_from(vm, BootDevice::Cdrom).await, "starting from the drive");
    done(agent.power_on_from(vm, BootDevice::Cdrom).await, "starting from it again");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    for medium in [Some(&second), Some(&second), None, None, Some(&first)] {
        let changed = with(medium.map(AsRef::as_ref), &[]);
        done(agent.register_vm(changed).await, "changing what is in the drive");
    }
    refused(
        agent.register_vm(with(Some(&missing), &[])).await,
        code,
        "a medium that is not there, while the guest runs",
    );
    let none = agent.register_vm(session.spec.clone()).await;
    refused(none, ErrorCode::WrongState, "taking the drive from a guest that runs");
    let later = with(Some(&first), &[BootDevice::Cdrom]);
    done(agent.register_vm(later).await, "another boot order while it runs");
    let now = session.now(agent).await.started_with.expect("what it runs with");
    assert_eq!(now.boot, [], "the boot order of a guest that runs");
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    done(agent.register_vm(session.spec.clone()).await, "registering without a drive");
}
