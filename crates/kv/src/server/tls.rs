//! TLS on accepted connections, by rustls.

use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use mio::net::TcpStream;
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

use super::ServerError;
use crate::config::{CIPHERS, ClientCertificates, ListenTls, TlsConfig, TlsVersion};

/// The certificates in use, and how each kind of listener uses them. Read anew by [`Certificates::reload`].
pub(crate) struct Certificates {
    config: TlsConfig,
    current: RwLock<Loaded>,
    /// Sessions that can be resumed, ever.
    new_sessions: Arc<AtomicU64>,
}

/// What one reading of the files gave.
struct Loaded {
    default: Arc<ServerConfig>,
    basic: Arc<ServerConfig>,
    mutual: Arc<ServerConfig>,
    /// Seconds since the server's start.
    since: u32,
}

impl Certificates {
    /// Loads certificates and key.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(crate) fn load(config: TlsConfig) -> Result<Certificates, ServerError> {
        let new_sessions = Arc::default();
        let loaded = read(&config, &new_sessions, 0)?;
        Ok(Certificates { config, current: RwLock::new(loaded), new_sessions })
    }

    /// Reads the files again. Connections that are open go on as they began; where a file cannot be used, nothing changes.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(crate) fn reload(&self, now: u32) -> Result<(), ServerError> {
        let loaded = read(&self.config, &self.new_sessions, now)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = loaded;
        Ok(())
    }

    fn current(&self) -> RwLockReadGuard<'_, Loaded> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the files were last read, seconds since the server's start.
    pub(crate) fn since(&self) -> u32 {
        self.current().since
    }

    /// Sessions that can be resumed, ever; `None` when none can be.
    pub(crate) fn new_sessions(&self) -> Option<u64> {
        self.config.session_cache.then(|| self.new_sessions.load(Ordering::Relaxed))
    }

    /// A connection of a listener of this kind; `None` when it goes without TLS.
    ///
    /// # Errors
    /// When rustls refuses the configuration.
    pub(super) fn accept(&self, how: ListenTls) -> io::Result<Option<ServerConnection>> {
        let config = match how {
            ListenTls::Off => return Ok(None),
            ListenTls::Default => self.current().default.clone(),
            ListenTls::Basic => self.current().basic.clone(),
            ListenTls::Mutual => self.current().mutual.clone(),
        };
        let mut tls = ServerConnection::new(config).map_err(io::Error::other)?;
        tls.set_buffer_limit(Some(self.config.buffer));
        Ok(Some(tls))
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

fn read(files: &TlsConfig, sessions: &Arc<AtomicU64>, now: u32) -> Result<Loaded, ServerError> {
    let bad = |key: &'static str, path: &Path, reason: String| ServerError::Tls {
        key,
        path: path.to_owned(),
        reason,
    };
    let certificates =
        |key: &'static str, path: &Path| -> Result<Vec<CertificateDer<'static>>, ServerError> {
            let list: Vec<_> = CertificateDer::pem_file_iter(path)
                .and_then(Iterator::collect)
                .map_err(|e| bad(key, path, format!("cannot be read: {e}")))?;
            if list.is_empty() {
                return Err(bad(
                    key,
                    path,
                    "holds no certificate: give a PEM file with BEGIN CERTIFICATE".into(),
                ));
            }
            Ok(list)
        };
    let chain = certificates("tls-certificate", &files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|e| bad("tls-key", &files.key, format!("cannot be read: {e}")))?;
    let mut provider = rustls::crypto::ring::default_provider();
    if let Some(names) = &files.ciphers {
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
            for ca in certificates("tls-client-ca", path)? {
                roots.add(ca).map_err(|e| bad("tls-client-ca", path, e.to_string()))?;
            }
            Some((path, Arc::new(roots)))
        }
    };
    let versions: &[&SupportedProtocolVersion] = match files.min_version {
        TlsVersion::V12 => rustls::DEFAULT_VERSIONS,
        TlsVersion::V13 => &[&rustls::version::TLS13],
    };
    let make = |verify: ClientCertificates| -> Result<Arc<ServerConfig>, ServerError> {
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(|e| bad("tls-certificate", &files.certificate, e.to_string()))?;
        let builder = match (verify, &roots) {
            (ClientCertificates::None, _) => builder.with_no_client_auth(),
            // Nobody can show what nobody has signed.
            (_, None) => builder.with_client_cert_verifier(Arc::new(Nobody(provider.clone()))),
            (_, Some((path, roots))) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
                let verifier = match verify {
                    ClientCertificates::Request => verifier.allow_unauthenticated(),
                    _ => verifier,
                };
                let verifier =
                    verifier.build().map_err(|e| bad("tls-client-ca", path, e.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain.clone(), key.clone_key()).map_err(|e| {
            bad("tls-key", &files.key, format!("does not fit the certificate: {e}"))
        })?;
        // A store of its own for each reading: what was agreed under former certificates ends with them.
        config.session_storage = if files.session_cache {
            Arc::new(Counted {
                store: ServerSessionMemoryCache::new(SESSIONS),
                new: sessions.clone(),
            })
        } else {
            Arc::new(NoServerSessionStorage {})
        };
        Ok(Arc::new(config))
    };
    Ok(Loaded {
        default: make(files.verify)?,
        basic: make(ClientCertificates::None)?,
        mutual: make(ClientCertificates::Require)?,
        since: now,
    })
}

/// Sessions that can be resumed at a time.
const SESSIONS: usize = 4096;

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

/// One TLS connection.
pub(super) struct TlsStream {
    socket: TcpStream,
    tls: ServerConnection,
    /// The peer's TCP stream has ended.
    eof: bool,
}

impl TlsStream {
    pub(super) fn new(socket: TcpStream, tls: ServerConnection) -> TlsStream {
        TlsStream { socket, tls, eof: false }
    }

    /// The handshake is not over.
    pub(super) fn is_handshaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    pub(super) fn socket(&mut self) -> &mut TcpStream {
        &mut self.socket
    }

    pub(super) fn socket_ref(&self) -> &TcpStream {
        &self.socket
    }

    /// Ciphertext is waiting for the socket.
    pub(super) fn wants_write(&self) -> bool {
        self.tls.wants_write()
    }

    /// Plaintext; `WouldBlock` when there is none for now, 0 at the end. Handshake messages are answered on the way.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(buf) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                // A stream cut without close_notify is an end like any other: commands are complete or not at all.
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            if self.eof {
                return Ok(0);
            }
            match self.tls.read_tls(&mut self.socket) {
                Ok(0) => self.eof = true,
                Ok(_) => {}
                Err(e) => return Err(e),
            }
            let processed = self.tls.process_new_packets();
            // An alert about what was wrong goes out before the connection is closed.
            self.flush().ok();
            processed.map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
        }
    }

    /// Takes plaintext; `WouldBlock` when the socket takes no more and the buffer is full.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.tls.writer().write(bytes)?;
        let flushed = self.flush();
        if taken == 0 && !bytes.is_empty() {
            flushed?;
            let taken = self.tls.writer().write(bytes)?;
            self.flush().or_else(ignore_block)?;
            return if taken == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(taken) };
        }
        flushed.or_else(ignore_block)?;
        Ok(taken)
    }

    /// Sends ciphertext until none is left.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes no more.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            if self.tls.write_tls(&mut self.socket)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Says goodbye, as far as the socket takes it.
    pub(super) fn close(&mut self) {
        self.tls.send_close_notify();
        self.flush().ok();
    }
}

fn ignore_block(e: io::Error) -> io::Result<()> {
    if e.kind() == ErrorKind::WouldBlock { Ok(()) } else { Err(e) }
}
