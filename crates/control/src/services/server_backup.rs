//! Backups of the server itself.

use vmseal_api::passphrase::SERVER_BACKUP;
use vmseal_api::problem::Problem;
use vmseal_api::request::GivePassphrase;

use super::caller::{Caller, Privilege};
use super::passphrases::open_passphrase;
use super::{Outcome, Services};
use crate::backup::make::{SealedBackup, make};
use crate::providers::check_new_passphrase;
use crate::store::events::NewEvent;

/// Returns a backup of the server, sealed under the passphrase of the request.
pub async fn back_up(
    services: &Services,
    caller: &Caller,
    request: GivePassphrase,
    dry_run: bool,
) -> Result<Outcome<SealedBackup>, Problem> {
    caller.require(Privilege::BackUpServer)?;
    let passphrase = open_passphrase(services, SERVER_BACKUP, &request.passphrase, "passphrase")?;
    check_new_passphrase(&passphrase, "passphrase")?;
    if dry_run {
        let step = "seal inventory, authority and provider files under the passphrase".to_owned();
        return Ok(Outcome::planned("server.backup", "server", step));
    }
    let sealed = make(&services.store, &services.data_dir, passphrase).await?;
    let mut write = services.store.write().await?;
    let (kind, target) = ("server.backed-up", "server");
    let detail = "a backup of inventory, authority and provider files was made";
    write.event(NewEvent { kind, actor: caller.name(), target, detail }).await?;
    write.commit().await?;
    Ok(Outcome::Done(sealed))
}
