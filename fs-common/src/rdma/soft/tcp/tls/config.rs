//! The configuration of rustls: keys, and TLS 1.3 only.

use super::super::packet::PACKET_VERSION;
use super::knock::{Doorkeeper, Knocker, key_name};
use crate::cluster_key::{ClusterKey, ClusterKeys, Role};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::ring::{cipher_suite, default_provider, kx_group, sign::any_eddsa_type};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use std::collections::HashMap;
use std::sync::Arc;

/// A PKCS#8 private key of Ed25519 (RFC 8410 section 7) is these bytes and the seed.
const ED25519_PKCS8_HEAD: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
/// Follows the fingerprint, to make it a host name. The name is reserved, so no such host exists (RFC 6761).
const NAME_TAIL: &str = ".key.invalid";

/// The name of the packet protocol, which both sides must agree on.
fn application_protocol() -> Vec<u8> {
    format!("cuttlefs/{PACKET_VERSION}").into_bytes()
}

/// AES comes first: machines with SSDs and RNICs have instructions for it.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![kx_group::X25519],
        ..default_provider()
    }
}

/// The key pair of a role, with its public half in the form that TLS sends.
fn key_pair(key: &ClusterKey, role: Role) -> Arc<CertifiedKey> {
    let pkcs8 = [&ED25519_PKCS8_HEAD[..], &key.seed(role)].concat();
    let signing = any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8)).expect("any 32 bytes are an Ed25519 seed");
    let public = signing.public_key().expect("an Ed25519 key tells its public half");
    let shown = CertificateDer::from(public.as_ref().to_vec());
    Arc::new(CertifiedKey::new(vec![shown], signing))
}

/// The public half of a role's key pair.
fn public_half(key: &ClusterKey, role: Role) -> CertificateDer<'static> {
    key_pair(key, role).cert[0].clone()
}

fn name_of(key: &ClusterKey) -> String {
    key.fingerprint() + NAME_TAIL
}

/// Checks the handshake's signature: that the peer has the private half of the key that it sent.
fn check_signature(
    provider: &CryptoProvider,
    message: &[u8],
    shown: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    let public = SubjectPublicKeyInfoDer::from(shown.as_ref());
    verify_tls13_signature_with_raw_key(
        message,
        &public,
        signature,
        &provider.signature_verification_algorithms,
    )
}

/// The answer to every question about TLS 1.2, which is not supported.
fn no_tls12() -> Error {
    Error::General("TLS 1.2 is not spoken".to_owned())
}

fn wrong_key() -> Error {
    Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
}

/// The verifier of a client: it accepts the server half of its own key.
#[derive(Debug)]
struct ExpectedServer {
    public: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ExpectedServer {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if *shown == self.public { Ok(ServerCertVerified::assertion()) } else { Err(wrong_key()) }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        check_signature(&self.provider, message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Names of clients by their public halves.
type Clients = HashMap<CertificateDer<'static>, Arc<str>>;

/// The verifier of a server: it accepts the client half of any of its keys.
#[derive(Debug)]
struct KnownClients {
    clients: Arc<Clients>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for KnownClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if self.clients.contains_key(shown) { Ok(ClientCertVerified::assertion()) } else { Err(wrong_key()) }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        check_signature(&self.provider, message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Chooses the key with which a server answers: the one that the client names.
#[derive(Debug)]
struct ByName(HashMap<String, Arc<CertifiedKey>>);

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.get(key_name(hello.server_name()?)?).cloned()
    }

    fn only_raw_public_keys(&self) -> bool {
        true
    }
}

/// The configurations for both roles of a process with these keys.
pub(in crate::rdma::soft) struct TlsConfigs {
    pub(super) client: Arc<ClientConfig>,
    knocker: Knocker,
    pub(super) server: Arc<ServerConfig>,
    pub(super) doorkeeper: Doorkeeper,
    clients: Arc<Clients>,
    own_name: Arc<str>,
}

impl TlsConfigs {
    /// The configurations for these keys.
    pub(in crate::rdma::soft) fn new(keys: &ClusterKeys) -> Self {
        Self::with_provider(keys, provider()).expect("the provider has what TLS 1.3 needs")
    }

    pub(super) fn with_provider(keys: &ClusterKeys, provider: CryptoProvider) -> Result<Self, Error> {
        let provider = Arc::new(provider);
        let versions = &[&rustls::version::TLS13];
        let own = keys.own();
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(ExpectedServer {
                public: public_half(own, Role::Server),
                provider: provider.clone(),
            }))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(key_pair(
                own,
                Role::Client,
            ))));
        client.resumption = Resumption::disabled();
        client.alpn_protocols = vec![application_protocol()];
        let named = |key: &Arc<ClusterKey>| (public_half(key, Role::Client), key.name().into());
        let clients: Arc<Clients> = Arc::new(keys.all().iter().map(named).collect());
        let by_name = |key: &Arc<ClusterKey>| (name_of(key), key_pair(key, Role::Server));
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(Arc::new(KnownClients { clients: clients.clone(), provider }))
            .with_cert_resolver(Arc::new(ByName(keys.all().iter().map(by_name).collect())));
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.max_early_data_size = 0;
        server.alpn_protocols = vec![application_protocol()];
        Ok(Self {
            client: Arc::new(client),
            knocker: Knocker::new(own, name_of(own)),
            server: Arc::new(server),
            doorkeeper: Doorkeeper::new(keys, name_of),
            clients,
            own_name: own.name().into(),
        })
    }

    /// The server's name that a client of its own key asks for. Each is good for one handshake.
    pub(super) fn server_name(&self) -> ServerName<'static> {
        ServerName::try_from(self.knocker.knock()).expect("hexadecimal digits are a name")
    }

    /// The name of the key whose client half this is.
    pub(super) fn name_of_client(&self, shown: &CertificateDer<'_>) -> Option<Arc<str>> {
        self.clients.get(shown).cloned()
    }

    /// The name of the key with which connections are made.
    pub(in crate::rdma::soft) fn own_name(&self) -> &Arc<str> {
        &self.own_name
    }
}

#[cfg(test)]
impl TlsConfigs {
    /// Makes it a server that pretends: to a client that names `asked` it sends the key pair of `shown`.
    pub(super) fn answer_to_as(&mut self, asked: &ClusterKey, shown: &ClusterKey) {
        let mut server = (*self.server).clone();
        server.cert_resolver = Arc::new(ByName([(name_of(asked), key_pair(shown, Role::Server))].into()));
        self.server = Arc::new(server);
    }
}
