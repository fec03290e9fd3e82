//! TLS: what is asked of clients, and with what.

use std::path::PathBuf;
use std::time::Duration;

use larder_base::ByteSize;
pub use larder_net::tls::{CIPHERS, ClientCertificates, TlsVersion};

use super::{ConfigError, ListenAddress, Settings, value};

/// For a handshake of TLS by default.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// What TLS may hold for a connection: by default (memcached's `ssl_wbuf_size`), the least and the most. Bytes.
const BUFFER: (u64, u64, u64) = (16 << 10, 1 << 10, 64 << 20);

/// TLS on TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// Certificate chain, PEM.
    pub certificate: PathBuf,
    /// Private key, PEM.
    pub key: PathBuf,
    /// CAs that clients' certificates must come from.
    pub client_ca: Option<PathBuf>,
    /// Whether they must have one.
    pub verify: ClientCertificates,
    /// Lowest version.
    pub min_version: TlsVersion,
    /// Of [`CIPHERS`], those that are spoken; `None`: all.
    pub ciphers: Option<Vec<&'static str>>,
    /// Sessions can be resumed.
    pub session_cache: bool,
    /// Bytes that it may hold for a connection that takes nothing.
    pub buffer: usize,
    /// A handshake that takes longer ends with its connection.
    pub handshake: Duration,
}

impl TlsConfig {
    /// With these files, and nothing asked of clients.
    pub fn new(certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> TlsConfig {
        TlsConfig {
            certificate: certificate.into(),
            key: key.into(),
            client_ca: None,
            verify: ClientCertificates::None,
            min_version: TlsVersion::V12,
            ciphers: None,
            session_cache: false,
            buffer: BUFFER.0 as usize,
            handshake: HANDSHAKE,
        }
    }
}

/// How a listener's connections are secured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenTls {
    /// As the server's: by TLS where it has a certificate.
    Default,
    /// `notls:`: not at all.
    Off,
    /// `btls:`: by TLS that asks clients for no certificate.
    Basic,
    /// `mtls:`: by TLS that requires one.
    Mutual,
}

impl ListenTls {
    /// The prefix of an address that says so.
    pub fn prefix(self) -> &'static str {
        match self {
            ListenTls::Default => "",
            ListenTls::Off => "notls:",
            ListenTls::Basic => "btls:",
            ListenTls::Mutual => "mtls:",
        }
    }
}

/// What `s` says of TLS. Whatever it asks for is done, or the start is refused.
pub(super) fn resolve(
    s: &mut Settings,
    listen: &[ListenAddress],
) -> Result<Option<TlsConfig>, ConfigError> {
    let Some(files) = s.tls.files()? else {
        let needs = "needs tls-certificate and tls-key too";
        for (key, given) in [
            // None is what there is without TLS.
            ("tls-verify", &s.tls_verify.clone().filter(|v| v != "none")),
            ("tls-min-version", &s.tls_min_version),
            ("tls-ciphers", &s.tls_ciphers),
        ] {
            if let Some(given) = given {
                return Err(value(key, given, needs));
            }
        }
        let wants = |l: &&ListenAddress| matches!(l.tls, ListenTls::Basic | ListenTls::Mutual);
        if let Some(l) = listen.iter().find(wants) {
            return Err(value("listen", format!("{}{}", l.tls.prefix(), l.host), needs));
        }
        return Ok(None);
    };
    let mut config = TlsConfig::new(files.certificate, files.key);
    config.client_ca = files.client_ca;
    let default = if config.client_ca.is_some() { "require" } else { "none" };
    let verify = s.tls_verify.get_or_insert_with(|| default.into());
    config.verify = match verify.as_str() {
        "none" => ClientCertificates::None,
        "request" | "require" if config.client_ca.is_none() => {
            return Err(value(
                "tls-verify",
                verify,
                "needs tls-client-ca (ssl_ca_cert), whose signature clients must show",
            ));
        }
        "request" => ClientCertificates::Request,
        "require" => ClientCertificates::Require,
        _ => return Err(value("tls-verify", verify, "must be none, request or require")),
    };
    let version = s.tls_min_version.get_or_insert_with(|| "1.2".into());
    config.min_version = match version.as_str() {
        "1.2" => TlsVersion::V12,
        "1.3" => TlsVersion::V13,
        _ => return Err(value("tls-min-version", version, "must be 1.2 or 1.3")),
    };
    config.ciphers = s.tls_ciphers.as_deref().map(ciphers).transpose()?;
    config.session_cache = s.tls_session_cache;
    let buffer = s.tls_buffer.0;
    if !(BUFFER.1..=BUFFER.2).contains(&buffer) {
        let remedy = format!("must be from {} to {}", ByteSize(BUFFER.1), ByteSize(BUFFER.2));
        return Err(value("tls-buffer", ByteSize(buffer), remedy));
    }
    config.buffer = buffer as usize;
    Ok(Some(config))
}

fn ciphers(list: &str) -> Result<Vec<&'static str>, ConfigError> {
    let names: Vec<&str> = list.split(':').filter(|n| !n.is_empty()).collect();
    let known = |name: &str| {
        CIPHERS.into_iter().find(|c| *c == name).ok_or_else(|| {
            let remedy = format!("'{name}' is not spoken: choose of {}", CIPHERS.join(":"));
            value("tls-ciphers", list, remedy)
        })
    };
    if names.is_empty() {
        return Err(value("tls-ciphers", list, format!("choose of {}", CIPHERS.join(":"))));
    }
    names.into_iter().map(known).collect()
}
