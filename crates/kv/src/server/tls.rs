//! TLS on accepted connections, by rustls.

use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;

use mio::net::TcpStream;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::ServerError;
use crate::config::TlsFiles;

/// Plaintext and ciphertext that rustls may hold per connection, bytes.
const BUFFER_LIMIT: usize = 64 << 10;

/// Loads certificates and key.
///
/// # Errors
/// [`ServerError::Tls`] naming the file.
pub(super) fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, ServerError> {
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
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| bad("tls-certificate", &files.certificate, e.to_string()))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for ca in certificates("tls-client-ca", path)? {
                roots.add(ca).map_err(|e| bad("tls-client-ca", path, e.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|e| bad("tls-client-ca", path, e.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder
        .with_single_cert(chain, key)
        .map_err(|e| bad("tls-key", &files.key, format!("does not fit the certificate: {e}")))?;
    Ok(Arc::new(config))
}

/// One TLS connection.
pub(super) struct TlsStream {
    socket: TcpStream,
    tls: ServerConnection,
    /// The peer's TCP stream has ended.
    eof: bool,
}

impl TlsStream {
    /// # Errors
    /// When rustls refuses the configuration.
    pub(super) fn new(socket: TcpStream, config: Arc<ServerConfig>) -> io::Result<TlsStream> {
        let mut tls = ServerConnection::new(config).map_err(io::Error::other)?;
        tls.set_buffer_limit(Some(BUFFER_LIMIT));
        Ok(TlsStream { socket, tls, eof: false })
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
