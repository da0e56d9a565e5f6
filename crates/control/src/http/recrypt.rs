//! Shallow recryption: another KEK for a VM.

use std::sync::Arc;

use axum::extract::State;
use vmseal_api::host::Power;
use vmseal_api::model::{self, Plan};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::RecryptVm;

use super::App;
use super::auth::User;
use super::body::{Asked, Named, OptionalJson};
use super::dry_run::{Intent, Outcome};
use super::problem::Refusal;
use super::tasks::Accepted;
use super::vms::{Caller, begin, check_key, find, power, require_ready, usable, word};
use crate::store::{providers, vms};
use crate::tasks::Operation;

/// Gives a VM that is off another key-encryption key, of its provider or another one, and destroys the one that it
/// had. The data of its disks is not rewritten.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/recrypt", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    request_body = Option<RecryptVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn recrypt(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(request): OptionalJson<RecryptVm>,
) -> Result<Outcome<Accepted>, Refusal> {
    let (vm, _) = find(&app, &name).await?;
    require_ready(&vm)?;
    let power = power(&app, &vm).await?.unwrap_or(Power::Off);
    if power != Power::Off {
        let (name, word) = (&vm.name, word(power));
        let detail = format!(
            "VM '{name}' is {word}: a VM is recrypted while it is off (vmseal vm stop {name})"
        );
        return Err(Problem::new(ErrorCode::WrongState, detail).into());
    }
    let mut write = app.store.write().await?;
    // As it is now: a task may have ended since.
    let vm = vms::get(&mut write, vm.id).await?.ok_or_else(|| Problem::not_found("VM", &name))?;
    let Some(old) = vm.key.clone() else {
        let detail = format!("VM '{}' has no key: nothing of it is encrypted", vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail).into());
    };
    let wanted = request.provider.unwrap_or_else(|| old.provider.to_string());
    let provider = providers::find(&mut write, &wanted).await?.ok_or_else(|| Problem {
        field: Some("provider".to_owned()),
        ..Problem::not_found("provider", &wanted)
    })?;
    let provider = usable(&app, provider)?.id;
    if intent.dry_run {
        check_key(&app, &vm)?;
    }
    let operation = Operation::RecryptVm { vm: vm.id, old, provider };
    begin(&app, write, operation, &vm, Caller { actor: &actor, intent }).await
}
