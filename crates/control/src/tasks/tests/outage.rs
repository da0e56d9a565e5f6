//! A real KMS that is unreachable for half a second, at every step that may need it.

use super::revoked::WithKms;
use super::*;

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
