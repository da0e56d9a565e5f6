//! Which host reads a VM's backups. Their directory may be a mount that several hosts have: a host that finds the same backup there
//! does with it what the host that wrote it did, which may be gone for good.

use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::services::Services;
use crate::store::backups::{self, Backup};
use crate::store::events::NewEvent;
use crate::tasks::backups::place;

/// A host that is to read a backup.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub id: HostId,
    pub name: &'a str,
}

/// The backup as this host reads it. From then on all backups of the VM in that directory are read by it.
pub(super) async fn read_by(
    services: &Services,
    backup: &Backup,
    reader: Reader<'_>,
    actor: &str,
    dry_run: bool,
) -> Result<Backup, Problem> {
    if reader.id == backup.host {
        return Ok(backup.clone());
    }
    require_found(services, backup, reader).await?;
    if !dry_run {
        let mut write = services.store.write().await?;
        backups::set_reader(&mut write, backup, (reader.id, reader.name)).await?;
        let detail = format!(
            "those in {} are read by host '{}', and no longer by host '{}'",
            backup.directory.display(),
            reader.name,
            backup.host_name
        );
        let (kind, target) = ("backup.read-by", backup.vm_name.as_str());
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        write.commit().await?;
    }
    Ok(Backup { host: reader.id, host_name: reader.name.to_owned(), ..backup.clone() })
}

/// Refuses a host that does not find the same backup in its directory.
pub(super) async fn require_found(
    services: &Services,
    backup: &Backup,
    reader: Reader<'_>,
) -> Result<(), Problem> {
    let found = services.hosts.connected(reader.id)?.read_backup(place(backup)).await;
    let why = match found {
        Ok(found) => {
            let same = (found.backup, found.vm.vm, found.vm.key)
                == (backup.id, backup.vm, backup.key.clone());
            if same {
                return Ok(());
            }
            "there is another one".to_owned()
        }
        Err(problem) => problem.detail,
    };
    let detail = format!(
        "backup '{}' was written by host '{}', and host '{}' does not find it in {} ({why}): mount that directory there, too",
        backup.name,
        backup.host_name,
        reader.name,
        backup.directory.display()
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}
