//! TLS, begun within a connection by the option STARTTLS.

use std::io;

use larder_net::tls::{
    Certificates as Loaded, ClientCertificates, Tls, TlsError, TlsFiles, TlsOptions, TlsVersion,
};

use super::ServerError;

/// Plaintext and ciphertext that TLS may hold per connection, bytes.
const BUFFER_LIMIT: usize = 256 << 10;
/// Sessions that can be resumed at a time.
const SESSIONS: usize = 256;

/// The certificate in use, and what is asked of clients: a certificate of their own where there are authorities for it.
pub(super) struct Certificates {
    loaded: Loaded,
    clients: ClientCertificates,
}

impl Certificates {
    /// Loads certificates and key.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(super) fn load(files: &TlsFiles) -> Result<Certificates, ServerError> {
        let loaded = Loaded::load(TlsOptions {
            files: files.clone(),
            min_version: TlsVersion::V12,
            ciphers: None,
            sessions: SESSIONS,
            buffer: BUFFER_LIMIT,
        })?;
        let clients = match files.client_ca {
            Some(_) => ClientCertificates::Require,
            None => ClientCertificates::None,
        };
        Ok(Certificates { loaded, clients })
    }

    /// Reads the files again, for connections to come; where one cannot be used, nothing changes.
    ///
    /// # Errors
    /// [`ServerError::Tls`] naming the file.
    pub(super) fn reload(&self) -> Result<(), ServerError> {
        Ok(self.loaded.reload()?)
    }

    /// For a connection that begins TLS now.
    ///
    /// # Errors
    /// When rustls refuses the configuration.
    pub(super) fn session(&self) -> io::Result<Tls> {
        self.loaded.session(self.clients)
    }
}

impl From<TlsError> for ServerError {
    fn from(error: TlsError) -> ServerError {
        ServerError::Tls { path: error.path, reason: error.reason }
    }
}
