//! The servers of a provider: adds, removes and reorders them, and changes their addresses.

use vmseal_api::id::ProviderId;
use vmseal_api::kmip::{AddKmipServer, SERVERS_MAX};
use vmseal_api::problem::{ErrorCode, Problem};

use super::life::check_servers;
use crate::providers::Providers;
use crate::store::events::NewEvent;
use crate::store::providers::Provider;
use crate::store::{StoreError, Write, key_requests, kmip};

/// A change of the servers of a provider.
#[derive(Clone, Debug)]
pub enum ServerChange {
    /// Adds one as the last in the order; it is not trusted yet.
    Add(AddKmipServer),
    /// Removes the one with this alias.
    Remove(String),
    /// Changes the address of the server with this alias. Its trust stays.
    Set(AddKmipServer),
    /// Moves the server with this alias to another place in the order, from 1.
    Move(String, usize),
}

impl ServerChange {
    /// The servers after the change, with the text of its event.
    fn apply(
        &self,
        provider: &str,
        mut servers: Vec<kmip::Server>,
    ) -> Result<(Vec<kmip::Server>, (&'static str, String)), Problem> {
        let find = |alias: &str| {
            servers.iter().position(|server| server.alias == alias).ok_or_else(|| {
                Problem::not_found(&format!("server of provider '{provider}',"), alias)
            })
        };
        let told = match self {
            Self::Add(new) => {
                if servers.iter().any(|server| server.alias == new.alias) {
                    let detail = format!("provider '{provider}' has a server '{}'", new.alias);
                    return Err(Problem::new(ErrorCode::AlreadyExists, detail));
                }
                if servers.len() == SERVERS_MAX {
                    let detail = format!("a KMIP provider has at most {SERVERS_MAX} servers");
                    return Err(Problem::invalid("alias", detail));
                }
                check_servers(std::slice::from_ref(new))?;
                servers.push(kmip::Server {
                    alias: new.alias.clone(),
                    host: new.host.clone(),
                    port: new.port,
                    trust: None,
                });
                let detail = format!("server '{}' at {} port {}", new.alias, new.host, new.port);
                ("provider.server-added", detail)
            }
            Self::Remove(alias) => {
                let place = find(alias)?;
                if servers.len() == 1 {
                    let detail = format!(
                        "'{alias}' is the only server of provider '{provider}': add another one first, or remove the provider"
                    );
                    return Err(Problem::new(ErrorCode::WrongState, detail));
                }
                servers.remove(place);
                ("provider.server-removed", format!("server '{alias}'"))
            }
            Self::Set(to) => {
                let place = find(&to.alias)?;
                check_servers(std::slice::from_ref(to))?;
                let server = &mut servers[place];
                (server.host, server.port) = (to.host.clone(), to.port);
                let detail = format!("server '{}' is at {} port {}", to.alias, to.host, to.port);
                ("provider.server-changed", detail)
            }
            Self::Move(alias, place) => {
                let now = find(alias)?;
                let Some(to) = place.checked_sub(1).filter(|to| *to < servers.len()) else {
                    let detail = format!("the places are 1 to {}", servers.len());
                    return Err(Problem::invalid("place", detail));
                };
                let server = servers.remove(now);
                servers.insert(to, server);
                ("provider.server-moved", format!("server '{alias}' is asked as number {place}"))
            }
        };
        Ok((servers, told))
    }

    /// Has what was asked of a server follow it to its new address, and stay with the old one of a server that is
    /// removed: it is not to be looked for at whatever has the alias later.
    async fn move_requests(
        &self,
        write: &mut Write<'_>,
        provider: ProviderId,
        before: &[kmip::Server],
    ) -> Result<(), StoreError> {
        let find = |alias: &str| before.iter().find(|server| server.alias == alias);
        match self {
            Self::Remove(alias) => {
                let Some(server) = find(alias) else { return Ok(()) };
                let former = format!("{alias} at {} port {}", server.host, server.port);
                key_requests::set_server(write, provider, alias, &former).await
            }
            Self::Set(to) => {
                let is_there = |it: &kmip::Server| (&it.host, it.port) == (&to.host, to.port);
                if find(&to.alias).is_none_or(is_there) {
                    return Ok(());
                }
                key_requests::set_moved(write, provider, &to.alias).await
            }
            Self::Add(_) | Self::Move(..) => Ok(()),
        }
    }
}

impl Providers {
    /// Changes the servers of a KMIP provider, and tries them.
    ///
    /// # Errors
    /// `not-found`; `already-exists`; `invalid-request`; `wrong-state` for the last server.
    pub async fn change_servers(
        &self,
        provider: &Provider,
        change: &ServerChange,
        actor: &str,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let mut write = self.store.write().await?;
        let servers = kmip::servers(&mut write, provider.id).await?;
        change.move_requests(&mut write, provider.id, &servers).await?;
        let (servers, (kind, detail)) = change.apply(&provider.name, servers)?;
        kmip::replace_servers(&mut write, provider.id, &servers).await?;
        write.event(NewEvent { kind, actor, target: &provider.name, detail: &detail }).await?;
        write.commit().await?;
        self.refreshed(provider, None).await
    }

    /// A text that says what [`Providers::change_servers`] would do.
    ///
    /// # Errors
    /// Those of [`Providers::change_servers`].
    pub async fn check_change_of_servers(
        &self,
        provider: &Provider,
        change: &ServerChange,
    ) -> Result<String, Problem> {
        self.kmip(provider.id)?;
        let servers = kmip::servers(&mut *self.store.read().await?, provider.id).await?;
        let (servers, _) = change.apply(&provider.name, servers)?;
        let names: Vec<_> = servers.iter().map(|server| server.alias.as_str()).collect();
        Ok(format!("ask these servers, in this order: {}", names.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(alias: &str) -> kmip::Server {
        kmip::Server { alias: alias.to_owned(), host: "kms".to_owned(), port: 5696, trust: None }
    }

    fn new(alias: &str) -> AddKmipServer {
        AddKmipServer { alias: alias.to_owned(), host: "other".to_owned(), port: 7 }
    }

    fn after(change: &ServerChange) -> Result<Vec<String>, ErrorCode> {
        let servers = ["one", "two", "three"].map(server).to_vec();
        let (servers, _) = change.apply("kms", servers).map_err(|problem| problem.code)?;
        Ok(servers.into_iter().map(|it| format!("{} {}:{}", it.alias, it.host, it.port)).collect())
    }

    #[test]
    fn servers_come_and_go_and_change_places() {
        use ServerChange::{Add, Move, Remove, Set};
        let is =
            |change, wanted: &[&str]| assert_eq!(after(&change).unwrap(), wanted, "{change:?}");
        let [one, two, three] = ["one kms:5696", "two kms:5696", "three kms:5696"];
        is(Add(new("four")), &[one, two, three, "four other:7"]);
        is(Remove("two".to_owned()), &[one, three]);
        is(Set(new("two")), &[one, "two other:7", three]);
        is(Move("three".to_owned(), 1), &[three, one, two]);
        is(Move("one".to_owned(), 3), &[two, three, one]);
        is(Move("two".to_owned(), 2), &[one, two, three]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        use ServerChange::{Add, Move, Remove, Set};
        assert_eq!(after(&Add(new("two"))), Err(ErrorCode::AlreadyExists));
        assert_eq!(
            after(&Add(AddKmipServer { port: 0, ..new("x") })),
            Err(ErrorCode::InvalidRequest)
        );
        for change in [Remove("x".to_owned()), Set(new("x")), Move("x".to_owned(), 1)] {
            assert_eq!(after(&change), Err(ErrorCode::NotFound), "{change:?}");
        }
        for place in [0, 4] {
            assert_eq!(after(&Move("one".to_owned(), place)), Err(ErrorCode::InvalidRequest));
        }
        let last = Remove("one".to_owned()).apply("kms", vec![server("one")]).unwrap_err();
        assert_eq!(last.code, ErrorCode::WrongState);
        let many = (0..SERVERS_MAX).map(|number| server(&format!("s{number}"))).collect();
        assert!(Add(new("more")).apply("kms", many).is_err());
    }
}
