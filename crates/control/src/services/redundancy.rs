//! Whether disks are where they outlive the failures that their policy names.

use sqlx::SqliteConnection;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::store::datastores;
use crate::store::disks::Disk;
use crate::store::policies::Policy;

/// Refuses places for disks where they do not outlive what their policy says.
pub(super) async fn require(
    from: &mut SqliteConnection,
    policy: &Policy,
    disks: &[Disk],
) -> Result<(), Problem> {
    if policy.redundancy.is_nothing() {
        return Ok(());
    }
    for disk in disks {
        let id = disk.datastore.datastore.to_string();
        let pools = datastores::find(from, &id).await?.map_or_else(Vec::new, |it| it.pools);
        let Some(why) = policy.redundancy.lacking(&pools) else { continue };
        let only = match policy.redundancy.failures {
            0 => "in pools with",
            _ => "where they outlive",
        };
        let has_chunks = policy.redundancy.data_chunks.is_some();
        let chunks = if has_chunks { " --data-chunks NUMBER" } else { "" };
        let (policy, asked) = (&policy.name, &policy.redundancy);
        let (disk, datastore) = (&disk.name, &disk.datastore_name);
        let detail = format!(
            "policy '{policy}' has disks only {only} {asked}, and disk '{disk}' would be in datastore '{datastore}': {why}. Choose another datastore, or change the policy (vmseal policy set {policy} --failures-to-tolerate NUMBER{chunks} --failure-domain DOMAIN)"
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    Ok(())
}
