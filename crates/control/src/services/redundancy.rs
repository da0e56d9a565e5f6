//! Whether disks are where they outlive the failures that their policy names.

use sqlx::SqliteConnection;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::store::datastores;
use crate::store::disks::Disk;
use crate::store::policies::Policy;

/// What the storage of a disk lacks.
struct Lacking {
    /// The disk.
    disk: String,
    /// What it lacks, for people.
    why: String,
}

/// A disk that is, or would be, where it does not outlive what its policy says; none where all do.
async fn lacking(
    from: &mut SqliteConnection,
    policy: &Policy,
    disks: &[Disk],
) -> Result<Option<Lacking>, Problem> {
    if policy.redundancy.is_nothing() {
        return Ok(None);
    }
    for disk in disks {
        let id = disk.datastore.datastore.to_string();
        let pools = datastores::find(from, &id).await?.map_or_else(Vec::new, |it| it.pools);
        if let Some(why) = policy.redundancy.lacking(&pools) {
            let why = format!("datastore '{}': {why}", disk.datastore_name);
            return Ok(Some(Lacking { disk: disk.name.clone(), why }));
        }
    }
    Ok(None)
}

/// Refuses places for disks where they do not outlive what their policy says.
pub(super) async fn require(
    from: &mut SqliteConnection,
    policy: &Policy,
    disks: &[Disk],
) -> Result<(), Problem> {
    let Some(Lacking { disk, why }) = lacking(from, policy, disks).await? else { return Ok(()) };
    let only = match policy.redundancy.failures {
        0 => "in pools with",
        _ => "where they outlive",
    };
    let detail = format!(
        "policy '{}' has disks only {only} {}, and disk '{disk}' would be in {why}. Choose another datastore, or change the policy (vmseal policy set {} --failures-to-tolerate NUMBER --failure-domain DOMAIN)",
        policy.name, policy.redundancy, policy.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}
