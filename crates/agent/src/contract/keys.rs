//! The keys that open the disks of a VM, which is off or runs.

use vmseal_api::host::{HostAgent, KeyReference, OtherKey, Power, PowerOff, ShareDataKeys, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::ErrorCode;
use vmseal_secret::{KEK_LEN, SecretBytes};

use super::{Session, console, done, refused};
use crate::keys::{reference_of, seal_for};

/// Adds and drops keys of the disks. The VM is off and its key is there.
pub async fn others(agent: &dyn HostAgent, session: &mut Session) {
    let vm = session.vm();
    let first = session.spec.key.clone().expect("the VM has a key");
    let new = |id: &str| {
        let kek = SecretBytes::random(KEK_LEN).expect("locked memory");
        let key = reference_of(&kek, vm, id);
        (kek, key)
    };
    let key_box = session.key_box.clone();
    let other = |beside: &KeyReference, key: &KeyReference, kek: &SecretBytes| OtherKey {
        beside: beside.clone(),
        key: key.clone(),
        sealed: seal_for(&key_box, vm, key, kek),
    };
    let ((second_kek, second), (third_kek, third)) = (new("second"), new("third"));
    done(agent.check_key(vm, first.clone()).await, "the key that it has");
    let (another, code) = (agent.check_key(vm, second.clone()).await, ErrorCode::WrongState);
    refused(another, code, "checking one that it is not registered with");
    let wrong = agent.add_key(vm, other(&first, &second, &third_kek)).await;
    refused(wrong, ErrorCode::KeyMismatch, "another key than its reference says");
    let beside_another = agent.add_key(vm, other(&third, &second, &second_kek)).await;
    refused(beside_another, code, "beside one that it is not registered with");
    refused(
        agent.drop_other_keys(vm, second.clone()).await,
        code,
        "keeping a key that it does not have",
    );
    done(agent.drop_other_keys(vm, first.clone()).await, "dropping none");
    done(agent.add_key(vm, other(&first, &second, &second_kek)).await, "another key");
    done(agent.add_key(vm, other(&first, &second, &second_kek)).await, "the same again");
    // What another VM gets the data keys of: not while a key is changed, as its note would be lost.
    let shared = |key: &KeyReference, disk| ShareDataKeys { key: key.clone(), disks: vec![disk] };
    let encrypted = session.spec.disks().find(|disk| disk.encrypted).map(|disk| disk.disk);
    let encrypted = encrypted.expect("a disk is encrypted");
    let two = agent.share_data_keys(vm, shared(&first, encrypted)).await;
    refused(two, ErrorCode::InUse, "sharing a data key under two keys");
    let unknown = agent.share_data_keys(vm, shared(&first, DiskId::new())).await;
    refused(unknown, ErrorCode::NotFound, "sharing that of an unknown disk");
    done(agent.drop_other_keys(vm, first.clone()).await, "dropping the added key");
    let called_off = VmSpec { key: Some(second.clone()), ..session.spec.clone() };
    let new_kek = std::mem::replace(&mut session.kek, second_kek);
    let old_spec = std::mem::replace(&mut session.spec, called_off);
    done(agent.register_vm(session.spec.clone()).await, "registering with the dropped key");
    refused(agent.check_key(vm, second.clone()).await, ErrorCode::Locked, "without its key");
    done(session.offer(agent).await, "the dropped key");
    let gone = agent.check_key(vm, second.clone()).await;
    refused(gone, ErrorCode::KeyMismatch, "the dropped key");
    refused(agent.drop_other_keys(vm, second.clone()).await, ErrorCode::KeyMismatch, "keeping it");
    let second_kek = std::mem::replace(&mut session.kek, new_kek);
    session.spec = old_spec;
    done(agent.register_vm(session.spec.clone()).await, "and back");
    done(session.offer(agent).await, "the first key");
    done(agent.add_key(vm, other(&first, &second, &second_kek)).await, "the second once more");
    done(agent.add_key(vm, other(&first, &third, &third_kek)).await, "a third in its place");

    session.kek = third_kek;
    session.spec.key = Some(third.clone());
    done(agent.register_vm(session.spec.clone()).await, "registering with the third");
    done(session.offer(agent).await, "the third key");
    done(agent.drop_other_keys(vm, third.clone()).await, "dropping the first");
    done(agent.drop_other_keys(vm, third.clone()).await, "dropping it again");
    done(agent.power_on(vm).await, "starting with the third");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    console(agent, session).await;
    // The same while its guest uses the disks, which go on with the keys that they have.
    done(agent.check_key(vm, third.clone()).await, "checking while it runs");
    let unknown = VmSpec { key: Some(second.clone()), ..session.spec.clone() };
    let early = agent.register_vm(unknown.clone()).await;
    refused(early, code, "registering with a key that its disks do not have, while it runs");
    done(agent.add_key(vm, other(&third, &second, &second_kek)).await, "adding while it runs");
    session.kek = second_kek;
    session.spec = unknown;
    done(agent.register_vm(session.spec.clone()).await, "registering with it while it runs");
    let without = agent.check_key(vm, second.clone()).await;
    refused(without, ErrorCode::Locked, "checking without its key");
    done(session.offer(agent).await, "its key, while it runs");
    done(agent.drop_other_keys(vm, second.clone()).await, "dropping while it runs");
    done(agent.check_key(vm, second.clone()).await, "checking the new key");
    for what in ["sharing a data key while it runs", "sharing it again"] {
        match agent.share_data_keys(vm, shared(&second, encrypted)).await {
            // The suite's guest has no driver for its disks, and an old QEMU takes no other filter then.
            Err(problem) if problem.code == ErrorCode::TimedOut => {}
            answer => done(answer, what),
        }
    }
    console(agent, session).await;
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    done(agent.share_data_keys(vm, shared(&second, encrypted)).await, "sharing it while it is off");
    done(agent.power_on(vm).await, "starting with the key that it got while it ran");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
}
