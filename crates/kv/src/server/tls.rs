//! TLS of memcached's listeners: which of them speak it, and what they ask of clients.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use larder_net::tls::{
    Certificates as Loaded, ClientCertificates, Tls, TlsError, TlsFile, TlsFiles, TlsOptions,
};

use super::ServerError;
use crate::config::{ListenTls, TlsConfig};

/// Sessions that can be resumed at a time.
const SESSIONS: usize = 4096;

/// The certificates in use, and how each kind of listener uses them.
pub(crate) struct Certificates {
    loaded: Loaded,
    config: TlsConfig,
    /// When they were last read, seconds since the server's start.
    since: AtomicU32,
}

impl Certificates {
    /// Loads certificates and key.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(crate) fn load(config: TlsConfig) -> Result<Certificates, ServerError> {
        let loaded = Loaded::load(TlsOptions {
            files: TlsFiles {
                certificate: config.certificate.clone(),
                key: config.key.clone(),
                client_ca: config.client_ca.clone(),
            },
            min_version: config.min_version,
            ciphers: config.ciphers.clone(),
            sessions: if config.session_cache { SESSIONS } else { 0 },
            buffer: config.buffer,
        })?;
        Ok(Certificates { loaded, config, since: AtomicU32::new(0) })
    }

    /// Reads the files again, for connections to come; where one cannot be used, nothing changes.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(crate) fn reload(&self, now: u32) -> Result<(), ServerError> {
        self.loaded.reload()?;
        self.since.store(now, Ordering::Relaxed);
        Ok(())
    }

    /// When the files were last read, seconds since the server's start.
    pub(crate) fn since(&self) -> u32 {
        self.since.load(Ordering::Relaxed)
    }

    /// Sessions that can be resumed, ever; `None` when none can be.
    pub(crate) fn new_sessions(&self) -> Option<u64> {
        self.config.session_cache.then(|| self.loaded.new_sessions())
    }

    /// For a connection of a listener of this kind; `None` when it goes without TLS.
    ///
    /// # Errors
    /// When rustls refuses the configuration.
    pub(super) fn accept(&self, how: ListenTls) -> io::Result<Option<Tls>> {
        let clients = match how {
            ListenTls::Off => return Ok(None),
            ListenTls::Default => self.config.verify,
            ListenTls::Basic => ClientCertificates::None,
            ListenTls::Mutual => ClientCertificates::Require,
        };
        self.loaded.session(clients).map(Some)
    }
}

impl From<TlsError> for ServerError {
    fn from(error: TlsError) -> ServerError {
        let key = match error.file {
            TlsFile::Certificate => "tls-certificate",
            TlsFile::Key => "tls-key",
            TlsFile::ClientCa => "tls-client-ca",
        };
        ServerError::Tls { key, path: error.path, reason: error.reason }
    }
}
