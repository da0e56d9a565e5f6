//! The control planes that this one knows.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::client::shown_authority;
use vmseal_api::fingerprint;
use vmseal_api::id::{RemoteId, check_name};
use vmseal_api::model::{About, Page};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ARRIVALS, AddRemote, LookAtRemote, Remote, RemoteChecked, RemoteShown};
use vmseal_kmip::client::Fingerprint;

use super::caller::{Caller, Privilege};
use super::passphrases::open_passphrase;
use super::{Outcome, PageRequest, Services, page_of};
use crate::operation::Operation;
use crate::providers::kmip::certificate::{of_der, pem_of};
use crate::store::events::NewEvent;
use crate::store::{remotes, tasks};

fn shown(remote: remotes::Remote) -> Remote {
    let der = CertificateDer::from_pem_slice(remote.authority.as_bytes());
    let fingerprint = der.map(|der| Fingerprint::of(&der).to_string()).unwrap_or_default();
    Remote { id: remote.id, name: remote.name, url: remote.url, fingerprint }
}

/// Lists the remotes.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
) -> Result<Page<Remote>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let found = remotes::list(&mut *services.store.read().await?, &part).await?;
    let items = found.into_iter().map(shown).collect();
    Ok(page_of(items, part.limit, |it: &Remote| it.id.to_string()))
}

/// Shows a remote.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Remote, Problem> {
    caller.require(Privilege::Read)?;
    services.remotes.find(name).await.map(shown)
}

/// The certificate of the authority that a server shows, which is not trusted by that.
pub async fn look(
    services: &Services,
    caller: &Caller,
    request: LookAtRemote,
) -> Result<RemoteShown, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let authority = other_authority(services, &request.url).await?;
    let certificate = of_der(&authority).ok_or_else(|| {
        Problem::new(ErrorCode::Unreachable, "the certificate that it shows cannot be read")
    })?;
    Ok(RemoteShown { certificate })
}

/// The authority that a server shows, which is not this one's.
async fn other_authority(
    services: &Services,
    url: &str,
) -> Result<CertificateDer<'static>, Problem> {
    let authority = shown_authority(url).await.map_err(|problem| match problem.field {
        Some(_) => Problem { field: Some("url".to_owned()), ..problem },
        None => problem,
    })?;
    if authority == *services.authority.der() {
        let detail =
            "this control plane's own server answers there: a remote is another control plane";
        return Err(Problem::invalid("url", detail));
    }
    Ok(authority)
}

/// Adds a remote: connects to its server, which must be known by the fingerprint and take the token.
pub async fn add(
    services: &Services,
    caller: &Caller,
    request: AddRemote,
    dry_run: bool,
) -> Result<Outcome<Remote>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let AddRemote { name, url, fingerprint: compared, token } = request;
    check_name(&name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    fingerprint::check(&compared)
        .map_err(|error| Problem::invalid("fingerprint", error.to_string()))?;
    let token = open_passphrase(services, &name, &token, "token")?;
    let token = std::str::from_utf8(token.expose())
        .map(str::trim)
        .map_err(|_| Problem::invalid("token", "it is not an access token"))?;
    let authority = other_authority(services, &url).await?;
    let found = Fingerprint::of(&authority);
    if !fingerprint::is_same(&compared, &found.to_string()) {
        let detail = format!(
            "the server there shows an authority with the fingerprint {found}: it is another control plane, or somebody is between"
        );
        return Err(Problem::invalid("fingerprint", detail));
    }
    let remote = remotes::Remote { id: RemoteId::new(), name, url, authority: pem_of(&authority) };
    let about = services.remotes.connect(&remote, token)?.about().await?;
    require_arrivals(&remote.name, &about)?;
    let mut write = services.store.write().await?;
    remotes::insert(&mut write, &remote).await?;
    if dry_run {
        let step = format!("keep the address, the authority {found} and the token");
        return Ok(Outcome::planned("remote.add", &remote.name, step));
    }
    services.remotes.keep_token(remote.id, token)?;
    let (kind, actor, target) = ("remote.added", caller.name(), remote.name.as_str());
    let detail = format!("at {}, authority {found}", remote.url);
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await?;
    Ok(Outcome::Done(shown(remote)))
}

/// Refuses a control plane of an earlier version.
pub(super) fn require_arrivals(name: &str, about: &About) -> Result<(), Problem> {
    if about.features.iter().any(|it| it == ARRIVALS) {
        return Ok(());
    }
    let detail = format!(
        "remote '{name}' runs vmseal {}, which takes no VMs of other control planes: upgrade it first",
        about.vmseal
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// Asks a remote whether it answers, and takes VMs.
pub async fn check(
    services: &Services,
    caller: &Caller,
    name: &str,
) -> Result<RemoteChecked, Problem> {
    caller.require(Privilege::Read)?;
    let remote = services.remotes.find(name).await?;
    let about = services.remotes.of(&remote)?.about().await?;
    let arrivals = about.features.iter().any(|it| it == ARRIVALS);
    Ok(RemoteChecked { vmseal: about.vmseal, arrivals })
}

/// Removes a remote. With `force` also while a VM is on its way there: an operator says that it is gone for good.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    name: &str,
    force: bool,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let remote = services.remotes.find(name).await?;
    let mut write = services.store.write().await?;
    for task in tasks::open(&mut write).await? {
        let goes_there =
            matches!(task.operation, Operation::MigrateAway { remote: to, .. } if to == remote.id);
        if goes_there && !force {
            let detail = format!(
                "VM '{}' is on its way to remote '{}' (task {}): wait for it, or cancel it. If that control plane and its hosts are gone for good, --force has the VM go on here",
                task.target, remote.name, task.id
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
    }
    if dry_run {
        let step = "forget its address, its authority and its token".to_owned();
        return Ok(Outcome::planned("remote.remove", &remote.name, step));
    }
    remotes::delete(&mut write, remote.id).await?;
    let (kind, actor, target) = ("remote.removed", caller.name(), remote.name.as_str());
    let detail = if force { "by force" } else { "" };
    write.event(NewEvent { kind, actor, target, detail }).await?;
    write.commit().await?;
    services.remotes.forget_token(remote.id);
    Ok(Outcome::Done(()))
}
