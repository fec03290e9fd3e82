//! TLS.

use std::path::{Path, PathBuf};

use larder_net::tls::TlsFiles;
use serde::Serialize;

use crate::Refused;

/// The files of TLS.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Tls {
    /// Certificate chain, PEM: turns TLS on for TCP
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    pub tls_certificate: Option<PathBuf>,
    /// Private key of the certificate, PEM
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    pub tls_key: Option<PathBuf>,
    /// CA certificates, PEM: clients that speak TLS must show a certificate signed by one of them
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    pub tls_client_ca: Option<PathBuf>,
}

impl Tls {
    /// The files, if TLS is on.
    ///
    /// # Errors
    /// One that needs another.
    pub fn files(&self) -> Result<Option<TlsFiles>, Refused> {
        let lacks = |key, path: &Path, other: &str| {
            Refused::new(key, path.display(), format!("needs {other} too"))
        };
        match (&self.tls_certificate, &self.tls_key, &self.tls_client_ca) {
            (Some(certificate), Some(key), client_ca) => Ok(Some(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                client_ca: client_ca.clone(),
            })),
            (Some(certificate), None, _) => Err(lacks("tls-certificate", certificate, "tls-key")),
            (None, Some(key), _) => Err(lacks("tls-key", key, "tls-certificate")),
            (None, None, Some(ca)) => {
                Err(lacks("tls-client-ca", ca, "tls-certificate and tls-key"))
            }
            (None, None, None) => Ok(None),
        }
    }
}
