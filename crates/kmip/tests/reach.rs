//! Which servers the client can reach and trusts: addresses, certificates on both sides, timeouts of
//! connecting.
#![allow(clippy::unwrap_used)] // in tests a panic is the report

mod server;

use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use tokio::net::TcpSocket;
use vmseal_kmip::client::{
    Client, Endpoint, Error, Fingerprint, Identity, OwnCertificate, Settings, SetupError, Step,
    Timeouts, TlsProblem, Trust, show_certificate,
};
use vmseal_kmip::testing::{
    Asked, Authority, Issued, PyKmip, Reaction, ScriptedServer, Validity, self_signed,
};

use server::AUTHORITY;

const SHORT: Duration = Duration::from_millis(300);

fn identity() -> Identity {
    AUTHORITY.client("vmseal", Validity::Now).identity()
}

fn unasked(_: &Asked) -> Reaction {
    panic!("a client that does not trust the server asks nothing")
}

fn shown_by(certificate: &Issued) -> ScriptedServer {
    ScriptedServer::start(certificate, None, unasked)
}

async fn discover(endpoint: Endpoint, trust: Trust) -> Result<(), Error> {
    let client = Client::new(Settings::new(endpoint, trust, identity())).unwrap();
    client.discover().await.map(|_| ())
}

fn problem(result: Result<(), Error>) -> TlsProblem {
    match result.unwrap_err() {
        Error::Tls { problem, .. } => problem,
        other => panic!("not TLS, but: {other}"),
    }
}

#[tokio::test]
async fn a_server_certificate_must_be_of_the_authority_valid_and_for_the_name() {
    let of = async |certificate: Issued, trust: Trust| {
        let server = shown_by(&certificate);
        let outcome = discover(server.endpoint(), trust).await;
        assert_eq!(
            server.requests(),
            usize::from(outcome.is_ok()),
            "only a trusted server gets a request"
        );
        outcome
    };
    let good = |validity| AUTHORITY.server(&["127.0.0.1"], validity);
    of(good(Validity::Now), AUTHORITY.trust()).await.unwrap();
    let other = Authority::new("another");
    assert_eq!(problem(of(good(Validity::Now), other.trust()).await), TlsProblem::UntrustedIssuer);
    // Another authority with the name of the right one.
    let impostor = Authority::new("vmseal tests").server(&["127.0.0.1"], Validity::Now);
    let refused = problem(of(impostor, AUTHORITY.trust()).await);
    assert!(matches!(refused, TlsProblem::UntrustedIssuer | TlsProblem::BadCertificate(_)));
    let expired = of(good(Validity::Expired), AUTHORITY.trust()).await;
    assert_eq!(problem(expired), TlsProblem::Expired);
    let early = of(good(Validity::NotYet), AUTHORITY.trust()).await;
    assert_eq!(problem(early), TlsProblem::NotYetValid);
    let elsewhere = AUTHORITY.server(&["kms.example.org", "127.0.0.2"], Validity::Now);
    assert_eq!(problem(of(elsewhere, AUTHORITY.trust()).await), TlsProblem::WrongName);
    let alone = self_signed(&["127.0.0.1"], Validity::Now);
    assert_eq!(problem(of(alone, AUTHORITY.trust()).await), TlsProblem::UntrustedIssuer);
    // A client certificate is not valid for a server.
    let client = AUTHORITY.client("127.0.0.1", Validity::Now);
    let wrong = problem(of(client, AUTHORITY.trust()).await);
    assert!(matches!(wrong, TlsProblem::BadCertificate(_) | TlsProblem::WrongName), "{wrong}");
}

#[tokio::test]
async fn only_the_pinned_certificate_is_trusted_and_only_while_valid() {
    let of = async |certificate: &Issued, trust: Trust| {
        let server = shown_by(certificate);
        let outcome = discover(server.endpoint(), trust).await;
        assert_eq!(
            server.requests(),
            usize::from(outcome.is_ok()),
            "only a trusted server gets a request"
        );
        outcome
    };
    // As a KMS makes it at its installation: its names do not matter.
    let alone = self_signed(&["kms.example.org"], Validity::Now);
    of(&alone, alone.pin()).await.unwrap();
    let other = self_signed(&["kms.example.org"], Validity::Now);
    assert_eq!(problem(of(&other, alone.pin()).await), TlsProblem::OtherCertificate);
    let signed = AUTHORITY.server(&["127.0.0.1"], Validity::Now);
    of(&signed, signed.pin()).await.unwrap();
    assert_eq!(problem(of(&signed, alone.pin()).await), TlsProblem::OtherCertificate);
    let expired = self_signed(&["127.0.0.1"], Validity::Expired);
    assert_eq!(problem(of(&expired, expired.pin()).await), TlsProblem::Expired);
    let early = self_signed(&["127.0.0.1"], Validity::NotYet);
    assert_eq!(problem(of(&early, early.pin()).await), TlsProblem::NotYetValid);
}

#[tokio::test]
async fn a_server_shows_its_certificate_and_an_operator_trusts_it() {
    let certificate = self_signed(&["kms.example.org", "127.0.0.1"], Validity::Now);
    let server = PyKmip::start_with(&certificate, &AUTHORITY);
    let shown = show_certificate(&server.endpoint(), &Timeouts::default()).await.unwrap();
    assert_eq!(shown.names, ["kms.example.org", "127.0.0.1"]);
    assert_eq!((shown.subject.as_str(), &shown.subject), ("CN=kms", &shown.issuer));
    let Trust::Pinned(expected) = certificate.pin() else { panic!() };
    assert_eq!(shown.fingerprint, Fingerprint::of(&expected));
    let text = shown.fingerprint.to_string();
    assert_eq!((text.len(), text.matches(':').count()), (32 * 3 - 1, 31));
    discover(server.endpoint(), shown.pin()).await.unwrap();

    // Signed by an authority whose name the operator sees.
    let server = shown_by(&AUTHORITY.server(&["kms-2.example.org"], Validity::Expired));
    let shown = show_certificate(&server.endpoint(), &Timeouts::default()).await.unwrap();
    assert_eq!((shown.subject.as_str(), shown.issuer.as_str()), ("CN=kms", "CN=vmseal tests"));
    assert_eq!(shown.not_after, 1_609_459_200, "the first of January 2021");
}

async fn as_client(server: &PyKmip, identity: Identity) -> TlsProblem {
    let settings = Settings::new(server.endpoint(), AUTHORITY.trust(), identity);
    problem(Client::new(settings).unwrap().discover().await.map(|_| ()))
}

fn own(problem: &TlsProblem) -> OwnCertificate {
    match problem {
        TlsProblem::ClientCertificateRefused { own, .. } => *own,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn a_refused_client_certificate_is_reported() {
    let server = server::server();
    let stranger = Authority::new("another").client("vmseal", Validity::Now).identity();
    let refused = as_client(server, stranger).await;
    assert_eq!(own(&refused), OwnCertificate::Valid);
    assert!(
        refused.to_string().contains("refuses the client certificate (UnknownCA)"),
        "{refused}"
    );
    let expired = AUTHORITY.client("vmseal", Validity::Expired).identity();
    let refused = as_client(server, expired).await;
    assert_eq!(own(&refused), OwnCertificate::Expired);
    assert!(refused.to_string().contains("which has expired"), "{refused}");
    let early = AUTHORITY.client("vmseal", Validity::NotYet).identity();
    assert_eq!(own(&as_client(server, early).await), OwnCertificate::NotYetValid);
}

/// In TLS 1.3 the client's handshake ends before the server has seen its certificate.
#[tokio::test]
async fn a_client_certificate_that_is_refused_late_is_reported_too() {
    let certificate = AUTHORITY.server(&["127.0.0.1"], Validity::Now);
    let server = ScriptedServer::start(&certificate, Some(&AUTHORITY), unasked);
    discover(server.endpoint(), AUTHORITY.trust()).await.unwrap();
    let stranger = Authority::new("another").client("vmseal", Validity::Now).identity();
    let settings = Settings::new(server.endpoint(), AUTHORITY.trust(), stranger);
    let refused = problem(Client::new(settings).unwrap().discover().await.map(|_| ()));
    assert_eq!(own(&refused), OwnCertificate::Valid);
}

#[tokio::test]
async fn causes_of_an_unreachable_server_are_distinguished() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody = discover(Endpoint::new("127.0.0.1", free).unwrap(), AUTHORITY.trust()).await;
    assert!(matches!(nobody, Err(Error::ConnectionRefused { .. })), "{nobody:?}");
    let unknown = discover(Endpoint::new("kms.invalid", free).unwrap(), AUTHORITY.trust()).await;
    // If no name server answers, that takes long.
    assert!(
        matches!(
            unknown,
            Err(Error::NotResolved { .. } | Error::TimedOut { step: Step::Resolve, .. })
        ),
        "{unknown:?}"
    );
    // A class E address: the kernel has no route to it.
    let nowhere =
        discover(Endpoint::new("255.255.255.255", free).unwrap(), AUTHORITY.trust()).await;
    assert!(matches!(nowhere, Err(Error::Unreachable { .. })), "{nowhere:?}");
}

async fn with_short_timeouts(port: u16) -> Error {
    let endpoint = Endpoint::new("127.0.0.1", port).unwrap();
    let mut settings = Settings::new(endpoint, AUTHORITY.trust(), identity());
    settings.timeouts.connect = SHORT;
    settings.timeouts.handshake = SHORT;
    Client::new(settings).unwrap().discover().await.unwrap_err()
}

#[tokio::test]
async fn a_port_without_an_accept_or_a_handshake_times_out() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = with_short_timeouts(silent.local_addr().unwrap().port()).await;
    assert!(matches!(error, Error::TimedOut { step: Step::Handshake, .. }), "{error}");

    // The backlog of the listening socket is full.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = socket.listen(0).unwrap();
    let address = full.local_addr().unwrap();
    let _first = tokio::net::TcpStream::connect(address).await.unwrap();
    let error = with_short_timeouts(address.port()).await;
    assert!(matches!(error, Error::TimedOut { step: Step::Connect, .. }), "{error}");
}

#[tokio::test]
async fn a_port_with_another_protocol_is_reported() {
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = web.local_addr().unwrap().port();
    let answer = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut socket, _) = web.accept().unwrap();
            socket.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").unwrap();
            // Stays until the client goes: what it has sent is not answered with a reset.
            std::io::copy(&mut socket, &mut std::io::sink()).unwrap();
        }
    });
    let endpoint = Endpoint::new("127.0.0.1", port).unwrap();
    let not_tls = problem(discover(endpoint.clone(), AUTHORITY.trust()).await);
    assert!(matches!(not_tls, TlsProblem::NotTls(_)), "{not_tls}");
    let error = show_certificate(&endpoint, &Timeouts::default()).await.unwrap_err();
    assert!(matches!(error, Error::Tls { problem: TlsProblem::NotTls(_), .. }), "{error}");
    answer.join().unwrap();
}

#[tokio::test]
async fn a_port_that_closes_in_the_handshake_is_reported() {
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closing.local_addr().unwrap().port();
    let close = std::thread::spawn(move || drop(closing.accept().unwrap()));
    let endpoint = Endpoint::new("127.0.0.1", port).unwrap();
    let ended = problem(discover(endpoint, AUTHORITY.trust()).await);
    assert_eq!(ended, TlsProblem::HandshakeEnded { own: OwnCertificate::Valid });
    close.join().unwrap();
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let (ours, other) =
        (AUTHORITY.client("a", Validity::Now), AUTHORITY.client("b", Validity::Now));
    let mixed = Identity::new(&ours.certificate, &other.private_key());
    assert!(matches!(mixed, Err(SetupError::Key)));
    let empty = Identity::new("", &ours.private_key());
    assert!(matches!(empty, Err(SetupError::Certificate(_))));
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for pem in ["", "nonsense", broken] {
        assert!(matches!(Trust::authorities(pem), Err(SetupError::Trust(_))), "{pem:?}");
        assert!(matches!(Trust::pinned(pem), Err(SetupError::Trust(_))), "{pem:?}");
    }
    let two = format!("{}{}", AUTHORITY.certificate(), AUTHORITY.certificate());
    assert!(matches!(Trust::pinned(&two), Err(SetupError::Trust(_))));
    assert!(Trust::authorities(&two).is_ok());

    let endpoint = Endpoint::new("127.0.0.1", 1).unwrap();
    let settings = || Settings::new(endpoint.clone(), AUTHORITY.trust(), ours.identity());
    let none = Settings { versions: Vec::new(), ..settings() };
    assert!(matches!(Client::new(none), Err(SetupError::NoVersion)));
    let mut none = settings();
    none.limits.connections = 0;
    assert!(matches!(Client::new(none), Err(SetupError::NoConnection)));
    assert!(!format!("{:?}", settings()).contains("key"));
}
