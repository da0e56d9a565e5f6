//! Joining: a machine with a one-time token becomes a host.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use jiff::Timestamp;
use sqlx::SqliteConnection;
use tokio::sync::Semaphore;
use vmseal_api::host::version::CONTRACT;
use vmseal_api::id::{HostId, check_name};
use vmseal_api::join_token;
use vmseal_api::model::JoinToken;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{ADDRESS_MAX, AGENT_PORT, JoinHost, Joined};

use crate::setup::authority::{Authority, AuthorityError, REQUEST_MAX};
use crate::store::events::NewEvent;
use crate::store::hosts::Host;
use crate::store::{Part, Store, Write, hosts, users};

/// How long a token is valid: long enough to carry it to another machine.
pub(crate) const TOKEN_VALID: Duration = Duration::from_secs(15 * 60);

/// Makes a token; only its hash is stored.
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

/// How many joins are handled at a time: the request is anonymous, and each one costs a query of the inventory.
const JOINS_MAX: usize = 4;

/// How long a join may wait for others.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

static JOINS: Semaphore = Semaphore::const_new(JOINS_MAX);

/// Lets a machine join whose request comes from `source`; the token is used up exactly when it does.
///
/// # Errors
/// `unauthenticated`: no such token; `already-exists`: the name or address is taken; `invalid-request`;
/// `timed-out`: too many joins at once; `unsupported`: its agent and this server have no common version.
pub async fn join(
    store: &Store,
    authority: &Authority,
    request: JoinHost,
    source: Option<IpAddr>,
) -> Result<(Host, Joined), Problem> {
    let refused = || {
        let detail =
            "the join token is wrong, used or has expired: make another (vmseal host token)";
        Problem::new(ErrorCode::Unauthenticated, detail)
    };
    let token: join_token::JoinToken = request.token.parse().map_err(|_| refused())?;
    let secret = crate::sha256_hex(&token.secret);
    let Ok(Ok(_turn)) = tokio::time::timeout(JOIN_TIMEOUT, JOINS.acquire()).await else {
        let detail = "too many machines want to join at this moment: try again";
        return Err(Problem::new(ErrorCode::TimedOut, detail));
    };
    // First, before expensive work and before the store's only writer: without a token a request ends here.
    if !users::has_join_token(&mut *store.read().await?, &secret).await? {
        return Err(refused());
    }
    // The token stays valid for an agent of a supported version.
    if let Some(theirs) = request.contract {
        CONTRACT.agree(theirs, "the agent that joins")?;
    }
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let address = address_of(request.address, source)?;
    if request.certificate_request.len() > REQUEST_MAX {
        let detail = format!("longer than {REQUEST_MAX} bytes");
        return Err(Problem::invalid("certificate_request", detail));
    }
    let mut write = store.write().await?;
    if !users::take_join_token(&mut write, &secret).await? {
        return Err(refused());
    }
    let host = Host {
        id: HostId::new(),
        name: request.name,
        address,
        description: None,
        maintenance: Default::default(),
    };
    let certificate =
        authority.host_certificate(&request.certificate_request, host.id).map_err(|error| {
            match error {
                AuthorityError::Request(why) => {
                    Problem::invalid("certificate_request", why.to_string())
                }
                other => crate::internal(&other),
            }
        })?;
    address_is_free(&mut write, &host.address, host.id).await?;
    hosts::insert(&mut write, &host).await?;
    let detail = format!("at {}, id {}", host.address, host.id);
    let (kind, actor) = ("host.joined", host.name.as_str());
    write.event(NewEvent { kind, actor, target: &host.name, detail: &detail }).await?;
    write.commit().await?;
    let (authority, address) = (authority.pem().to_owned(), Some(host.address.clone()));
    let joined = Joined { certificate, authority, host: host.id, address };
    Ok((host, joined))
}

/// Changes the address of a host's agent. Returns the host.
///
/// # Errors
/// `not-found`; `already-exists`: another host is there; `invalid-request`.
pub async fn change_address(
    write: &mut Write<'_>,
    actor: &str,
    host: Host,
    address: &str,
) -> Result<Host, Problem> {
    check_address(address)?;
    address_is_free(write, address, host.id).await?;
    hosts::set_address(write, host.id, address).await?;
    let detail = format!("from {} to {address}", host.address);
    let (kind, target) = ("host.address-changed", host.name.as_str());
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    Ok(Host { address: address.to_owned(), ..host })
}

/// The address of a joining machine: the one that it sends, or the source of its request.
fn address_of(given: Option<String>, source: Option<IpAddr>) -> Result<String, Problem> {
    let source = source.map(|source| source.to_canonical());
    let Some(given) = given else {
        let source = source.ok_or_else(|| Problem::invalid("address", "is missing"))?;
        return Ok(SocketAddr::new(source, AGENT_PORT).to_string());
    };
    check_address(&given)?;
    let host = given.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']);
    let here = |address: IpAddr| address.is_loopback() || address.is_unspecified();
    let claims_here =
        host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|host: IpAddr| here(host));
    match source {
        Some(source) if claims_here && !source.is_loopback() => {
            let detail = format!(
                "is the server's own machine, as the server sees it, and the request comes from {source}: give the address at which the server reaches this machine, or none"
            );
            Err(Problem::invalid("address", detail))
        }
        _ => Ok(given),
    }
}

/// Refuses another host's address: the new host would get the calls meant for that one.
async fn address_is_free(
    from: &mut SqliteConnection,
    address: &str,
    host: HostId,
) -> Result<(), Problem> {
    let canonical = |address: &str| {
        let parsed = address.parse::<SocketAddr>();
        parsed.map_or_else(|_| address.to_ascii_lowercase(), |address| address.to_string())
    };
    let known = hosts::list(from, &Part::all()).await?;
    let taken = known
        .iter()
        .find(|known| known.id != host && canonical(&known.address) == canonical(address));
    match taken {
        None => Ok(()),
        Some(other) => {
            let detail = format!(
                "host '{}' is at {address}: give the machine's own address, or remove that host first",
                other.name
            );
            let mut problem = Problem::new(ErrorCode::AlreadyExists, detail);
            problem.field = Some("address".to_owned());
            Err(problem)
        }
    }
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
    use vmseal_api::host::ContractRange;

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
        let store = crate::testing::new_store(directory.path()).await;
        let authority = Authority::open(directory.path()).unwrap();
        let token = make_token(&store, &authority, "me").await.unwrap().token;
        let key = rcgen::KeyPair::generate().unwrap();
        let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
        let request = JoinHost {
            token: token.clone(),
            name: "here".to_owned(),
            address: Some("127.0.0.1:8444".to_owned()),
            certificate_request: csr.pem().unwrap(),
            contract: Some(CONTRACT),
        };
        let later = Some(ContractRange { min: 8, max: 9 });
        let strange = JoinHost { contract: later, ..request.clone() };
        let refused = join(&store, &authority, strange, None).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unsupported);
        assert!(refused.detail.contains("versions 8 to 9"), "{refused}");
        let bad = JoinHost { certificate_request: "none".to_owned(), ..request.clone() };
        let refused = join(&store, &authority, bad, None).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("certificate_request"));
        let (host, joined) = join(&store, &authority, request.clone(), None).await.unwrap();
        assert_eq!((host.id, joined.authority.as_str()), (joined.host, authority.pem()));
        let again = JoinHost { name: "there".to_owned(), ..request.clone() };
        let refused = join(&store, &authority, again, None).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unauthenticated);

        let second = make_token(&store, &authority, "me").await.unwrap().token;
        let taken = JoinHost { token: second.clone(), ..request.clone() };
        let refused = join(&store, &authority, taken, None).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::AlreadyExists);
        let there = JoinHost { token: second, name: "there".to_owned(), ..request };
        let refused = join(&store, &authority, there.clone(), None).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("address"), "another host's: {refused}");
        let free = JoinHost { address: Some("127.0.0.1:8445".to_owned()), ..there };
        join(&store, &authority, free, None).await.unwrap();
    }

    #[tokio::test]
    async fn a_join_without_a_token_does_not_wait_for_the_writer() {
        let directory = tempfile::tempdir().unwrap();
        let store = crate::testing::new_store(directory.path()).await;
        let authority = Authority::open(directory.path()).unwrap();
        let _taken = store.write().await.unwrap();
        let stranger = join_token::JoinToken { secret: [7; 32], authority: [0; 32] };
        let request = JoinHost {
            token: stranger.to_string(),
            name: "here".to_owned(),
            address: None,
            certificate_request: "none".to_owned(),
            contract: None,
        };
        let answer = join(&store, &authority, request, None);
        let answer = tokio::time::timeout(Duration::from_secs(20), answer).await;
        let refused = answer.expect("it waits for the writer").unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unauthenticated);
    }

    #[test]
    fn a_machine_is_called_where_it_comes_from_and_not_at_the_servers_own_address() {
        let from = |source: &str| Some(source.parse::<IpAddr>().unwrap());
        let seen = |source| address_of(None, from(source)).unwrap();
        assert_eq!(seen("192.0.2.7"), "192.0.2.7:8444");
        assert_eq!(seen("::ffff:192.0.2.7"), "192.0.2.7:8444");
        assert_eq!(seen("2001:db8::1"), "[2001:db8::1]:8444");
        assert_eq!(seen("127.0.0.1"), "127.0.0.1:8444");
        let given = |given: &str, source| address_of(Some(given.to_owned()), from(source));
        for local in
            ["127.0.0.1:8444", "localhost:8444", "[::1]:8444", "0.0.0.0:8444", "127.9.9.9:1"]
        {
            let refused = given(local, "192.0.2.7").unwrap_err();
            assert_eq!(refused.field.as_deref(), Some("address"), "{local}");
            given(local, "127.0.0.1").unwrap();
        }
        given("host.example:8444", "192.0.2.7").unwrap();
        given("10.0.0.1:8444", "192.0.2.7").unwrap();
    }

    #[tokio::test]
    async fn an_expired_token_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let store = crate::testing::new_store(directory.path()).await;
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
