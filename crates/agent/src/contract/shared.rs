//! A datastore that hosts share: the agent is asked as the one host, and as the other.

use uuid::Uuid;
use vmseal_api::host::{DatastoreSpec, HostAgent, Sharing, SharingStep};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::ErrorCode;

use super::{Session, done, refused};

/// The lock that the other host must see, from its beginning to its end. From here on the suite's datastore is shared.
pub async fn between_hosts(agent: &dyn HostAgent, session: &Session) {
    let (check, code) = (Uuid::new_v4(), ErrorCode::WrongState);
    let step = |check, step| {
        agent.share_datastore(Sharing { datastore: session.place.clone(), check, step })
    };
    refused(step(check, SharingStep::Try).await, code, "trying a lock that no host holds");
    refused(step(check, SharingStep::Release).await, code, "releasing it");
    done(step(check, SharingStep::Hold).await, "holding a lock");
    done(step(check, SharingStep::Hold).await, "the same again");
    done(step(check, SharingStep::Try).await, "trying it");
    refused(step(Uuid::new_v4(), SharingStep::Try).await, code, "trying that of another check");
    done(step(check, SharingStep::Release).await, "releasing it");
    refused(step(check, SharingStep::Release).await, code, "releasing it again");
    refused(step(check, SharingStep::Try).await, code, "trying it after that");
    let other = DatastoreSpec { datastore: DatastoreId::new(), ..session.place.clone() };
    for step in [SharingStep::Hold, SharingStep::Try, SharingStep::Mark] {
        let sharing = Sharing { datastore: other.clone(), check, step };
        refused(agent.share_datastore(sharing).await, code, "another datastore");
    }
    done(step(check, SharingStep::Mark).await, "marking it as shared");
    done(step(check, SharingStep::Mark).await, "the same again");
    done(agent.probe_datastore(session.place.clone()).await, "probing a shared datastore");
}
