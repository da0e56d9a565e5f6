//! Joining: a machine with a one-time token becomes a host.

use std::time::Duration;

use jiff::Timestamp;
use vmseal_api::id::{HostId, check_name};
use vmseal_api::join_token;
use vmseal_api::model::JoinToken;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{JoinHost, Joined};

use crate::authority::{Authority, AuthorityError, REQUEST_MAX};
use crate::store::events::NewEvent;
use crate::store::hosts::Host;
use crate::store::{Store, hosts, users};

/// How long a token is valid: long enough to carry it to another machine.
pub(crate) const TOKEN_VALID: Duration = Duration::from_secs(15 * 60);

/// The longest address of an agent, in bytes: a DNS name and a port.
const ADDRESS_MAX: usize = 253 + 6;

/// Makes a token; only its hash is kept.
///
/// # Errors
/// `internal`.
pub async fn make_token(
    store: &Store,
    authority: &Authority,
    actor: &str,
) -> Result<JoinToken, Problem> {
    let mut secret = [0; join_token::SECRET_LEN];
    aws_lc_rs::rand::fill(&mut secret)
        .map_err(|_| Problem::new(ErrorCode::Internal, "the random generator failed"))?;
    let expires = Timestamp::now() + TOKEN_VALID;
    let mut write = store.write().await?;
    users::insert_join_token(&mut write, &crate::sha256_hex(&secret), expires).await?;
    let (kind, target) = ("host.token-made", "hosts");
    let detail = format!("valid until {expires:.0}");
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await?;
    let token = join_token::JoinToken { secret, authority: authority.fingerprint() };
    Ok(JoinToken { token: token.to_string(), expires })
}

/// Lets a machine join; the token is used up exactly when it does.
///
/// # Errors
/// `unauthenticated`: no such token; `already-exists`: the name is taken; `invalid-request`.
pub async fn join(
    store: &Store,
    authority: &Authority,
    request: JoinHost,
) -> Result<(Host, Joined), Problem> {
    let refused = || {
        let detail =
            "the join token is wrong, used or has expired: make another (vmseal host token)";
        Problem::new(ErrorCode::Unauthenticated, detail)
    };
    let token: join_token::JoinToken = request.token.parse().map_err(|_| refused())?;
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    check_address(&request.address)?;
    if request.certificate_request.len() > REQUEST_MAX {
        let detail = format!("longer than {REQUEST_MAX} bytes");
        return Err(Problem::invalid("certificate_request", detail));
    }
    let mut write = store.write().await?;
    // Before anything that costs work: nobody without a token gets so far.
    if !users::take_join_token(&mut write, &crate::sha256_hex(&token.secret)).await? {
        return Err(refused());
    }
    let host =
        Host { id: HostId::new(), name: request.name, address: request.address, description: None };
    let certificate = authority
        .host_certificate(&request.certificate_request, host.id, &host.address)
        .map_err(|error| match error {
            AuthorityError::Request(why) => {
                Problem::invalid("certificate_request", why.to_string())
            }
            other => crate::internal(&other),
        })?;
    hosts::insert(&mut write, &host).await?;
    let detail = format!("at {}, id {}", host.address, host.id);
    let (kind, actor) = ("host.joined", host.name.as_str());
    write.event(NewEvent { kind, actor, target: &host.name, detail: &detail }).await?;
    write.commit().await?;
    let joined = Joined { certificate, authority: authority.pem().to_owned(), host: host.id };
    Ok((host, joined))
}

fn check_address(address: &str) -> Result<(), Problem> {
    let invalid = |why| Err(Problem::invalid("address", why));
    if address.len() > ADDRESS_MAX {
        return invalid("longer than a DNS name and a port");
    }
    let Some((host, port)) = address.rsplit_once(':') else {
        return invalid("must have the form HOST:PORT");
    };
    if port.parse::<u16>().is_ok_and(|port| port > 0) {
        let bare = host.trim_matches(['[', ']']);
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let is_name = !host.is_empty()
            && host.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.');
        if is_name || (bracketed && bare.parse::<std::net::Ipv6Addr>().is_ok()) {
            return Ok(());
        }
    }
    invalid("must have the form HOST:PORT, with an IPv6 address in brackets")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_host_and_port() {
        for good in ["127.0.0.1:8444", "h-1.example:1", "[::1]:8444"] {
            check_address(good).unwrap();
        }
        let long = format!("{}:1", "a".repeat(300));
        for bad in ["", "h", "h:", ":1", "h:0", "h:65536", "::1:8444", "[h]:1", "a b:1", &long] {
            assert_eq!(check_address(bad).unwrap_err().field.as_deref(), Some("address"), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_token_serves_once_and_only_for_a_join_that_succeeds() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let authority = Authority::open(directory.path()).unwrap();
        let token = make_token(&store, &authority, "me").await.unwrap().token;
        let key = rcgen::KeyPair::generate().unwrap();
        let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
        let request = JoinHost {
            token: token.clone(),
            name: "here".to_owned(),
            address: "127.0.0.1:8444".to_owned(),
            certificate_request: csr.pem().unwrap(),
        };
        let bad = JoinHost { certificate_request: "none".to_owned(), ..request.clone() };
        let refused = join(&store, &authority, bad).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("certificate_request"));
        let (host, joined) = join(&store, &authority, request.clone()).await.unwrap();
        assert_eq!((host.id, joined.authority.as_str()), (joined.host, authority.pem()));
        let again = JoinHost { name: "there".to_owned(), ..request.clone() };
        let refused = join(&store, &authority, again).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unauthenticated);

        let second = make_token(&store, &authority, "me").await.unwrap().token;
        let taken = JoinHost { token: second.clone(), ..request.clone() };
        let refused = join(&store, &authority, taken).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::AlreadyExists);
        let free = JoinHost { token: second, name: "there".to_owned(), ..request };
        join(&store, &authority, free).await.unwrap();
    }

    #[tokio::test]
    async fn an_expired_token_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let mut write = store.write().await.unwrap();
        let past = Timestamp::now() - Duration::from_millis(1500);
        users::insert_join_token(&mut write, "old", past).await.unwrap();
        assert!(!users::take_join_token(&mut write, "old").await.unwrap());
        let soon = Timestamp::now() + Duration::from_secs(60);
        users::insert_join_token(&mut write, "new", soon).await.unwrap();
        assert!(users::take_join_token(&mut write, "new").await.unwrap());
        assert!(!users::take_join_token(&mut write, "new").await.unwrap());
    }
}
