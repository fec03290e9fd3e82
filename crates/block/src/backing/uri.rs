//! How a store is named.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::BackingError;

/// The port that NBD has by registration.
const NBD_PORT: u16 = 10809;

/// The name of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uri {
    /// `file:PATH`
    File {
        /// A regular file or a block device.
        path: PathBuf,
    },
    /// `nbd+unix:///EXPORT?socket=PATH`
    NbdUnix {
        /// The server's socket.
        socket: PathBuf,
        /// May be empty, for the default export.
        export: String,
    },
    /// `nbd://HOST:PORT/EXPORT`
    NbdTcp {
        /// Name or address, IPv6 without brackets.
        host: String,
        /// 10809 unless given.
        port: u16,
        /// May be empty, for the default export.
        export: String,
    },
}

impl FromStr for Uri {
    type Err = BackingError;

    fn from_str(text: &str) -> Result<Uri, BackingError> {
        parse(text).map_err(|reason| BackingError::Uri { uri: text.to_owned(), reason })
    }
}

fn parse(text: &str) -> Result<Uri, String> {
    if let Some(path) = text.strip_prefix("file:") {
        if path.is_empty() {
            return Err("the path is missing".into());
        }
        // file:///path is the same as file:/path.
        let path = path.strip_prefix("//").filter(|p| p.starts_with('/')).unwrap_or(path);
        return Ok(Uri::File { path: path.into() });
    }
    if let Some(rest) = text.strip_prefix("nbd+unix://") {
        let (place, query) = rest.split_once('?').ok_or("?socket=PATH is missing")?;
        let export = place.strip_prefix('/').ok_or("there is no host: write nbd+unix:///EXPORT")?;
        let socket = query
            .strip_prefix("socket=")
            .filter(|s| !s.is_empty() && !s.contains('&'))
            .ok_or("socket=PATH must be the only parameter")?;
        return Ok(Uri::NbdUnix { socket: decode(socket)?.into(), export: decode(export)? });
    }
    if let Some(rest) = text.strip_prefix("nbd://") {
        if rest.contains('?') {
            return Err("there are no parameters".into());
        }
        let (place, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = if let Some(rest) = place.strip_prefix('[') {
            let (host, port) = rest.split_once(']').ok_or("']' is missing")?;
            let port = port.strip_prefix(':').or(port.is_empty().then_some(""));
            (host, port.ok_or("behind ']' comes ':PORT'")?)
        } else {
            place.rsplit_once(':').unwrap_or((place, ""))
        };
        if host.is_empty() {
            return Err("the host is missing".into());
        }
        let port = match port {
            "" => NBD_PORT,
            text => text
                .parse()
                .ok()
                .filter(|p| *p > 0)
                .ok_or_else(|| format!("'{text}' is not a port"))?,
        };
        return Ok(Uri::NbdTcp { host: host.to_owned(), port, export: decode(export)? });
    }
    Err(match text.split_once(':') {
        Some((scheme, _)) => format!("'{scheme}' is not known"),
        None => "it has no scheme".into(),
    })
}

/// Resolves `%41`.
fn decode(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        if b != b'%' {
            out.push(b);
            continue;
        }
        let mut digit = || bytes.next().and_then(|d| char::from(d).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err("behind '%' come two hexadecimal digits".into());
        };
        out.push((high * 16 + low) as u8);
    }
    let text = String::from_utf8(out).map_err(|_| "it is not UTF-8 text".to_owned())?;
    if text.contains('\0') {
        return Err("it has a zero byte".into());
    }
    if text.len() > crate::nbd::wire::MAX_STRING {
        return Err("it is longer than 4096 bytes".into());
    }
    Ok(text)
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encode = |text: &str| {
            let mut out = String::new();
            for b in text.bytes() {
                match b {
                    b'%' | b'?' | b'&' | b'#' | b' ' | 0..=31 | 127.. => {
                        out.push_str(&format!("%{b:02X}"));
                    }
                    _ => out.push(char::from(b)),
                }
            }
            out
        };
        match self {
            Uri::File { path } => write!(f, "file:{}", path.display()),
            Uri::NbdUnix { socket, export } => {
                let socket = encode(&socket.to_string_lossy());
                write!(f, "nbd+unix:///{}?socket={socket}", encode(export))
            }
            Uri::NbdTcp { host, port, export } if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{}", encode(export))
            }
            Uri::NbdTcp { host, port, export } => {
                write!(f, "nbd://{host}:{port}/{}", encode(export))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_what_they_mean() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        let file = |path: &str| Uri::File { path: path.into() };
        assert_eq!(uri("file:/srv/disk?.img"), file("/srv/disk?.img"));
        assert_eq!(uri("file:disk.img"), file("disk.img"));
        assert_eq!(uri("file:///srv/disk.img"), file("/srv/disk.img"));
        let unix = |export: &str, socket: &str| Uri::NbdUnix {
            socket: socket.into(),
            export: export.into(),
        };
        assert_eq!(uri("nbd+unix:///?socket=/run/a b"), unix("", "/run/a b"));
        assert_eq!(uri("nbd+unix:///a%20/b?socket=x%25"), unix("a /b", "x%"));
        let tcp = |host: &str, port, export: &str| Uri::NbdTcp {
            host: host.into(),
            port,
            export: export.into(),
        };
        assert_eq!(uri("nbd://filer"), tcp("filer", 10809, ""));
        assert_eq!(uri("nbd://10.0.0.1:99/vol/1"), tcp("10.0.0.1", 99, "vol/1"));
        assert_eq!(uri("nbd://[::1]:99/x"), tcp("::1", 99, "x"));
        assert_eq!(uri("nbd://[::1]/x"), tcp("::1", 10809, "x"));
        for text in [
            "file:/srv/x",
            "nbd+unix:///a%20%25%3F%C3%A9?socket=/run/a%26b",
            "nbd://[::1]:99/x",
            "nbd://h:10809/",
        ] {
            assert_eq!(uri(text).to_string(), text);
        }
    }

    #[test]
    fn what_is_refused() {
        for text in [
            "",
            "disk.img",
            "file:",
            "http://x",
            "nbd+unix://host/x?socket=y",
            "nbd+unix:///x",
            "nbd+unix:///x?socket=",
            "nbd+unix:///x?sock=y",
            "nbd+unix:///x?socket=y&tls=1",
            "nbd+unix:///%4?socket=y",
            "nbd+unix:///%zz?socket=y",
            "nbd+unix:///%00?socket=y",
            "nbd+unix:///%ff?socket=y",
            "nbd://",
            "nbd:///x",
            "nbd://h:0/x",
            "nbd://h:99999/x",
            "nbd://h:x/x",
            "nbd://[::1/x",
            "nbd://[::1]x/x",
            "nbd://h/x?y",
        ] {
            let error = text.parse::<Uri>().expect_err(text).to_string();
            assert!(error.starts_with(&format!("'{text}'")), "{error}");
        }
    }
}
