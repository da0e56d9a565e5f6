//! A real KMS that is unreachable for half a second, at every step that may need it.

use vmseal_api::key_fault::KeyFault;
use vmseal_api::request::MigrateVm;
use vmseal_secret::sealed_box::Recipient;

use super::revoked::WithKms;
use super::*;
use crate::services::{Caller, Outcome, migrate};

/// Stops the KMS when a step begins, for half a second.
fn away_at(here: &WithKms, step: &'static str) -> (Faults, Arc<AtomicU32>) {
    let (kms, done) = (Arc::clone(&here.kms), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&done);
    let faults: Faults = Arc::new(move |at_step, state, point| {
        let first = (at_step, state, point) == (step, TaskState::Running, FaultPoint::Before)
            && count.fetch_add(1, Ordering::SeqCst) == 0;
        if first {
            kms.lock().unwrap().kill();
            let kms = Arc::clone(&kms);
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(500));
                kms.lock().unwrap().restart();
            });
        }
        Fault::None
    });
    (faults, done)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_goes_on_when_its_kms_was_away() {
    let mut here = WithKms::new().await;
    let vm = here.fixture.made("web", "encrypted").await;
    // At the first step nothing is done yet, and the failure is reported at once.
    let steps: Vec<_> = recrypt::steps().into_iter().skip(1).collect();
    for step in Part::of_run().of(&steps) {
        let (faults, done) = away_at(&here, step);
        here.fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let old = here.fixture.vm(vm).await.unwrap().key.unwrap();
        let recrypt = Operation::RecryptVm { vm, old: old.clone(), provider: here.provider };
        let ended = here.fixture.ended(here.fixture.begin(recrypt, "web").await).await;
        assert_eq!(ended.state, TaskState::Done, "{step}: {:?}", ended.problem);
        assert_eq!(done.load(Ordering::SeqCst).min(1), 1, "{step}: it was not away");
        let new = here.fixture.vm(vm).await.unwrap().key.unwrap();
        assert_ne!(new, old, "{step}");
        // The old key is destroyed as soon as the KMS answers.
        here.fixture
            .eventually("one key is left", async || {
                let mut read = here.fixture.store.read().await.unwrap();
                let living = crate::store::keys::living(&mut read, here.provider).await.unwrap();
                (living.len() == 1 && living[0].key_id == new.key_id).then_some(())
            })
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_goes_on_when_its_kms_was_away() {
    let mut here = WithKms::new().await;
    for step in ["make-key", "deliver-key"] {
        let (faults, _) = away_at(&here, step);
        here.fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let vm = here.fixture.made(step, "encrypted").await;
        here.fixture.assert_whole(vm, Power::Off, step).await;
        let delete = Operation::DeleteVm { vm, was: Lifecycle::Ready };
        here.done(delete, step).await;
    }
}

/// The host that holds the key gives it to no other one, so that a plan asks the KMS.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_stays_on_its_host_while_its_kms_is_away() {
    let here = WithKms::new().await;
    let (there, _) = here.fixture.add_host("there").await;
    here.fixture.share_datastore(there, "there").await;
    here.fixture.running("web").await;
    let services = here.fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let asked = async || migrate::migrate(&services, &me, "web", MigrateVm::default(), true).await;
    here.kms.lock().unwrap().kill();
    let refused = asked().await.unwrap_err();
    assert!(refused.reason.is_some_and(KeyFault::is_of_provider), "{refused:?}");
    assert!(refused.detail.contains("VM 'web' stays on host 'here'"), "{refused}");
    here.kms.lock().unwrap().restart();
    let goes = async || matches!(asked().await, Ok(Outcome::Planned(_))).then_some(());
    here.fixture.eventually("it can go", goes).await;
}
