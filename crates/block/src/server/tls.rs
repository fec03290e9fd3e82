//! TLS, begun within a connection by the option STARTTLS, by rustls.

use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::ServerError;

/// Plaintext and ciphertext that rustls may hold per connection, bytes.
const BUFFER_LIMIT: usize = 256 << 10;

/// A server's certificate, and whose signature clients must show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// Clients that begin TLS must show a certificate that one of these has signed, PEM.
    pub client_ca: Option<PathBuf>,
}

/// The certificate in use.
pub(super) struct Certificates {
    files: TlsFiles,
    current: RwLock<Arc<ServerConfig>>,
}

impl Certificates {
    /// Loads certificates and key.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(super) fn load(files: &TlsFiles) -> Result<Certificates, ServerError> {
        Ok(Certificates { files: files.clone(), current: RwLock::new(load(files)?) })
    }

    /// Reads the files again, for connections to come; where one cannot be used, nothing changes.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(super) fn reload(&self) -> Result<(), ServerError> {
        let config = load(&self.files)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// What a connection that begins TLS now has.
    pub(super) fn current(&self) -> Arc<ServerConfig> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, ServerError> {
    let bad = |path: &Path, reason: String| ServerError::Tls { path: path.to_owned(), reason };
    let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, ServerError> {
        let list: Vec<_> = CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect)
            .map_err(|e| bad(path, format!("cannot be read: {e}")))?;
        if list.is_empty() {
            let reason = "holds no certificate: give a PEM file with BEGIN CERTIFICATE";
            return Err(bad(path, reason.into()));
        }
        Ok(list)
    };
    let chain = certificates(&files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|e| bad(&files.key, format!("cannot be read: {e}")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| bad(&files.certificate, e.to_string()))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for ca in certificates(path)? {
                roots.add(ca).map_err(|e| bad(path, e.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|e| bad(path, e.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder
        .with_single_cert(chain, key)
        .map_err(|e| bad(&files.key, format!("does not fit the certificate: {e}")))?;
    Ok(Arc::new(config))
}

/// The state of TLS on one connection; the socket is the caller's.
pub(super) struct Tls {
    session: ServerConnection,
    /// The peer's stream has ended.
    eof: bool,
}

impl Tls {
    /// # Errors
    /// When rustls refuses the configuration.
    pub(super) fn new(config: Arc<ServerConfig>) -> io::Result<Tls> {
        let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(BUFFER_LIMIT));
        Ok(Tls { session, eof: false })
    }

    /// The handshake is not over.
    pub(super) fn is_handshaking(&self) -> bool {
        self.session.is_handshaking()
    }

    /// Ciphertext is waiting for the socket.
    pub(super) fn wants_write(&self) -> bool {
        self.session.wants_write()
    }

    /// Plaintext; `WouldBlock` when there is none for now, 0 at the end. Handshake messages are answered on the way.
    pub(super) fn read(
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
    pub(super) fn write(
        &mut self,
        socket: &mut impl Write,
        slices: &[io::IoSlice<'_>],
    ) -> io::Result<usize> {
        let taken = self.session.writer().write_vectored(slices)?;
        match self.flush(socket) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            other => other?,
        }
        if taken == 0 && slices.iter().any(|s| !s.is_empty()) {
            // The buffer was full; it may have room now.
            let taken = self.session.writer().write_vectored(slices)?;
            return if taken == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(taken) };
        }
        Ok(taken)
    }

    /// Sends ciphertext until none is left.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes no more.
    pub(super) fn flush(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.session.wants_write() {
            if self.session.write_tls(socket)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Says goodbye, as far as the socket takes it.
    pub(super) fn close(&mut self, socket: &mut impl Write) {
        self.session.send_close_notify();
        self.flush(socket).ok();
    }
}
