//! What administrators state of the OSDs of pools' clusters.

use vmseal_api::osd_encryption::StatedOsds;
use vmseal_api::problem::Problem;

use super::caller::{Caller, Privilege};
use super::{Outcome, Services};
use crate::store::datastores::{self, Datastore};
use crate::store::events::NewEvent;

/// Why nothing is stated of the OSDs of a directory.
pub(super) const NO_OSDS: &str = "is of pools of Ceph: a directory has no OSDs";

/// What is noted of a cluster's OSDs, for people.
pub(super) fn said(stated: StatedOsds) -> &'static str {
    match stated {
        StatedOsds::Yes => "the OSDs of its cluster are stated to be encrypted",
        StatedOsds::No => "the OSDs of its cluster are stated not to be encrypted",
        StatedOsds::Ask => "its cluster is asked whether its OSDs are encrypted",
    }
}

/// Changes what is stated of the OSDs of a pool's cluster, and nothing else.
pub(super) async fn state(
    services: &Services,
    caller: &Caller,
    name: &str,
    stated: Option<StatedOsds>,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    let mut write = services.store.write().await?;
    let datastore = datastores::find(&mut write, name).await?;
    let datastore = datastore.ok_or_else(|| Problem::not_found("datastore", name))?;
    let Some(stated) = stated else {
        let detail = "must be given, or what else is to be changed: monitors, user, messenger, keyring or key";
        return Err(Problem::invalid("osd_encryption", detail));
    };
    if datastore.hosts.iter().all(|on| on.location.pool().is_none()) {
        return Err(Problem::invalid("osd_encryption", NO_OSDS));
    }
    let (kind, target) = ("datastore.changed", datastore.name.as_str());
    let detail = said(stated);
    datastores::set_osds_stated(&mut write, datastore.id, stated.stated()).await?;
    write.event(NewEvent { kind, actor: caller.name(), target, detail }).await?;
    if dry_run {
        return Ok(Outcome::planned("datastore.set", target, format!("note that {detail}")));
    }
    let now = datastores::find(&mut write, &datastore.id.to_string()).await?;
    let now = now.ok_or_else(|| Problem::not_found("datastore", target))?;
    write.commit().await?;
    Ok(Outcome::Done(now))
}
