//! TLS on accepted connections, by rustls: from the first byte, or begun within a connection.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    NoServerSessionStorage, ServerSessionMemoryCache, StoresServerSessions, WebPkiClientVerifier,
};
use rustls::{
    CertificateError, CipherSuite, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme, SupportedCipherSuite,
    SupportedProtocolVersion,
};

/// OpenSSL's names of the cipher suites of TLS 1.2 that are spoken, in the order of preference.
pub const CIPHERS: [&str; 6] = [
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-RSA-CHACHA20-POLY1305",
];

/// Whether clients must show a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// They are not asked.
    None,
    /// They are asked; one that is shown must be good.
    Request,
    /// They must.
    Require,
}

/// A lowest version of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsVersion {
    /// 1.2.
    V12,
    /// 1.3.
    V13,
}

/// A server's certificate, and whose signature clients must show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// Authorities: clients that show a certificate must show one that one of these has signed, PEM.
    pub client_ca: Option<PathBuf>,
}

/// TLS as a server is to speak it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsOptions {
    /// Its files.
    pub files: TlsFiles,
    /// Lowest version.
    pub min_version: TlsVersion,
    /// Of [`CIPHERS`], those that are spoken; `None`: all.
    pub ciphers: Option<Vec<&'static str>>,
    /// Sessions that can be resumed at a time; 0: none.
    pub sessions: usize,
    /// Bytes of plaintext, and as many of ciphertext, that it may hold for a connection that takes nothing.
    pub buffer: usize,
}

/// One of [`TlsFiles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsFile {
    /// The server's chain.
    Certificate,
    /// Its key.
    Key,
    /// The clients' authorities.
    ClientCa,
}

/// A file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{}' {reason}", path.display())]
pub struct TlsError {
    /// Which.
    pub file: TlsFile,
    /// Where it is.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// The certificates in use, for connections that ask clients for theirs or do not. Read anew by [`Certificates::reload`].
pub struct Certificates {
    options: TlsOptions,
    current: RwLock<Loaded>,
    /// Sessions that can be resumed, ever.
    new_sessions: Arc<AtomicU64>,
}

/// What one reading of the files gave.
struct Loaded {
    none: Arc<ServerConfig>,
    request: Arc<ServerConfig>,
    require: Arc<ServerConfig>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Certificates {
    /// Loads certificates and key.
    ///
    /// # Errors
    /// Names the file that cannot be used.
    pub fn load(options: TlsOptions) -> Result<Certificates, TlsError> {
        let new_sessions = Arc::default();
        let loaded = read(&options, &new_sessions)?;
        Ok(Certificates { options, current: RwLock::new(loaded), new_sessions })
    }

    /// Reads the files again, for connections to come. Those that are open go on as they began; where a file cannot be used,
    /// nothing changes.
    ///
    /// # Errors
    /// Names that file.
    pub fn reload(&self) -> Result<(), TlsError> {
        let loaded = read(&self.options, &self.new_sessions)?;
        *self.current.write() = loaded;
        Ok(())
    }

    /// Sessions that could be resumed, ever.
    pub fn new_sessions(&self) -> u64 {
        self.new_sessions.load(Ordering::Relaxed)
    }

    /// TLS for one connection.
    ///
    /// # Errors
    /// When rustls refuses the configuration.
    pub fn session(&self, clients: ClientCertificates) -> io::Result<Tls> {
        let config = {
            let current = self.current.read();
            match clients {
                ClientCertificates::None => current.none.clone(),
                ClientCertificates::Request => current.request.clone(),
                ClientCertificates::Require => current.require.clone(),
            }
        };
        let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(self.options.buffer));
        Ok(Tls { session, eof: false })
    }
}

/// OpenSSL's name of a cipher suite of TLS 1.2; `None` for those of TLS 1.3.
fn openssl_name(suite: CipherSuite) -> Option<&'static str> {
    let index = match suite {
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384 => 0,
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 => 1,
        CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256 => 2,
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384 => 3,
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 => 4,
        CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256 => 5,
        _ => return None,
    };
    Some(CIPHERS[index])
}

fn bad(file: TlsFile, path: &Path, reason: impl Into<String>) -> TlsError {
    TlsError { file, path: path.to_owned(), reason: reason.into() }
}

fn certificates(file: TlsFile, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let list: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|e| bad(file, path, format!("cannot be read: {e}")))?;
    if list.is_empty() {
        let reason = "holds no certificate: give a PEM file with BEGIN CERTIFICATE";
        return Err(bad(file, path, reason));
    }
    Ok(list)
}

fn read(options: &TlsOptions, new_sessions: &Arc<AtomicU64>) -> Result<Loaded, TlsError> {
    let files = &options.files;
    let chain = certificates(TlsFile::Certificate, &files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|e| bad(TlsFile::Key, &files.key, format!("cannot be read: {e}")))?;
    let mut provider = rustls::crypto::ring::default_provider();
    if let Some(names) = &options.ciphers {
        let rank = |s: &SupportedCipherSuite| {
            openssl_name(s.suite()).map_or(Some(0), |n| names.iter().position(|c| *c == n))
        };
        provider.cipher_suites.retain(|s| rank(s).is_some());
        provider.cipher_suites.sort_by_key(|s| (s.tls13().is_none(), rank(s)));
    }
    let provider = Arc::new(provider);
    let roots = match &files.client_ca {
        None => None,
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for ca in certificates(TlsFile::ClientCa, path)? {
                roots.add(ca).map_err(|e| bad(TlsFile::ClientCa, path, e.to_string()))?;
            }
            Some((path, Arc::new(roots)))
        }
    };
    let versions: &[&SupportedProtocolVersion] = match options.min_version {
        TlsVersion::V12 => rustls::DEFAULT_VERSIONS,
        TlsVersion::V13 => &[&rustls::version::TLS13],
    };
    let make = |clients: ClientCertificates| -> Result<Arc<ServerConfig>, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(|e| bad(TlsFile::Certificate, &files.certificate, e.to_string()))?;
        let builder = match (clients, &roots) {
            (ClientCertificates::None, _) => builder.with_no_client_auth(),
            // Nobody can show what nobody has signed.
            (_, None) => builder.with_client_cert_verifier(Arc::new(Nobody(provider.clone()))),
            (_, Some((path, roots))) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
                let verifier = match clients {
                    ClientCertificates::Request => verifier.allow_unauthenticated(),
                    _ => verifier,
                };
                let verifier =
                    verifier.build().map_err(|e| bad(TlsFile::ClientCa, path, e.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain.clone(), key.clone_key()).map_err(|e| {
            bad(TlsFile::Key, &files.key, format!("does not fit the certificate: {e}"))
        })?;
        // A store of its own for each reading: what was agreed under former certificates ends with them.
        config.session_storage = match options.sessions {
            0 => Arc::new(NoServerSessionStorage {}),
            most => Arc::new(Counted {
                store: ServerSessionMemoryCache::new(most),
                new: new_sessions.clone(),
            }),
        };
        Ok(Arc::new(config))
    };
    Ok(Loaded {
        none: make(ClientCertificates::None)?,
        request: make(ClientCertificates::Request)?,
        require: make(ClientCertificates::Require)?,
    })
}

/// Counts what it keeps.
#[derive(Debug)]
struct Counted {
    store: Arc<ServerSessionMemoryCache>,
    new: Arc<AtomicU64>,
}

impl StoresServerSessions for Counted {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        let kept = self.store.put(key, value);
        self.new.fetch_add(u64::from(kept), Ordering::Relaxed);
        kept
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.store.get(key)
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.store.take(key)
    }

    fn can_cache(&self) -> bool {
        self.store.can_cache()
    }
}

/// Requires a certificate where there is no authority that could have signed one.
#[derive(Debug)]
struct Nobody(Arc<CryptoProvider>);

impl ClientCertVerifier for Nobody {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer))
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS on one connection; the socket is the caller's.
#[derive(Debug)]
pub struct Tls {
    session: ServerConnection,
    /// The peer's stream has ended.
    eof: bool,
}

impl Tls {
    /// The handshake is not over.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.session.is_handshaking()
    }

    /// Ciphertext is waiting for the socket.
    pub(crate) fn wants_write(&self) -> bool {
        self.session.wants_write()
    }

    /// Plaintext; `WouldBlock` when there is none for now, 0 at the end. Handshake messages are answered on the way.
    pub(crate) fn read(
        &mut self,
        socket: &mut (impl Read + Write),
        buf: &mut [u8],
    ) -> io::Result<usize> {
        loop {
            match self.session.reader().read(buf) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                // A stream cut without close_notify is an end like any other: requests are complete or not at all.
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            if self.eof {
                return Ok(0);
            }
            if self.session.read_tls(socket)? == 0 {
                self.eof = true;
            }
            let processed = self.session.process_new_packets();
            // An alert about what was wrong goes out before the connection is closed.
            self.flush(socket).ok();
            processed.map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
        }
    }

    /// Takes plaintext; `WouldBlock` when the socket takes no more and the buffer is full.
    pub(crate) fn write(
        &mut self,
        socket: &mut impl Write,
        slices: &[IoSlice<'_>],
    ) -> io::Result<usize> {
        let mut taken = self.session.writer().write_vectored(slices)?;
        self.flush(socket).or_else(unless_full)?;
        if taken == 0 && slices.iter().any(|s| !s.is_empty()) {
            // The buffer was full; it may have room now.
            taken = self.session.writer().write_vectored(slices)?;
            if taken == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            self.flush(socket).or_else(unless_full)?;
        }
        Ok(taken)
    }

    /// Sends ciphertext until none is left; `WouldBlock` when the socket takes no more.
    pub(crate) fn flush(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.session.wants_write() {
            if self.session.write_tls(socket)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Says goodbye, as far as the socket takes it.
    pub(crate) fn close(&mut self, socket: &mut impl Write) {
        self.session.send_close_notify();
        self.flush(socket).ok();
    }
}

fn unless_full(e: io::Error) -> io::Result<()> {
    if e.kind() == ErrorKind::WouldBlock { Ok(()) } else { Err(e) }
}
