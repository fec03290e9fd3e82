//! How a store is named.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::BackingError;

/// The longest name in a URI, bytes: NBD has no longer ones.
const MAX_NAME: usize = 4096;

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
    /// `s3://BUCKET/PREFIX`, with `endpoint=URL` and `region=NAME` as parameters
    S3 {
        /// The bucket.
        bucket: String,
        /// What the names of the volume's objects begin with; may be empty.
        prefix: String,
        /// Where the store is, if not at AWS and not as the environment says.
        endpoint: Option<String>,
        /// Its region, if not as the environment says.
        region: Option<String>,
    },
}

impl FromStr for Uri {
    type Err = BackingError;

    fn from_str(text: &str) -> Result<Uri, BackingError> {
        parse(text).map_err(|reason| BackingError::Uri { uri: text.to_owned(), reason })
    }
}

/// Where something beside a store is: a path, or a URI.
///
/// # Errors
/// What is wrong, and what may be written.
pub fn path_or_uri(text: &str) -> Result<Uri, String> {
    let schemes = ["file:", "nbd:", "nbd+unix:", "s3:"];
    let is_uri = text.contains("://") || schemes.iter().any(|scheme| text.starts_with(scheme));
    match is_uri {
        true => parse(text).map_err(|reason| {
            format!(
                "{reason}; write a path, nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or s3://BUCKET/PREFIX"
            )
        }),
        false if text.is_empty() => Err("name a file".into()),
        false => Ok(Uri::File { path: text.into() }),
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
        if host.contains(['[', ']']) {
            return Err(format!("'{host}' is not a host"));
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
    if let Some(rest) = text.strip_prefix("s3://") {
        return parse_s3(rest);
    }
    Err(match text.split_once(':') {
        Some((scheme, _)) => format!("'{scheme}' is not known"),
        None => "it has no scheme".into(),
    })
}

fn parse_s3(rest: &str) -> Result<Uri, String> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if !(3..=255).contains(&bucket.len()) || !bucket.bytes().all(fits) {
        return Err(format!(
            "'{bucket}' is not a bucket's name: 3 to 255 letters, digits, '.', '-' and '_'"
        ));
    }
    let prefix = decode(prefix.trim_end_matches('/'))?;
    // Names of objects have at most 1,024 bytes, and the volume's own parts need some.
    if prefix.len() > 900 || prefix.chars().any(char::is_control) {
        return Err("the prefix has at most 900 bytes and no control characters".into());
    }
    if !prefix.is_empty() && prefix.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err("the prefix has an empty part, or '.' or '..'".into());
    }
    let (mut endpoint, mut region) = (None, None);
    for parameter in query.split('&').filter(|p| !p.is_empty()) {
        match parameter.split_once('=') {
            Some(("endpoint", url)) => {
                let url = decode(url)?;
                if !url.starts_with("http://") && !url.starts_with("https://") {
                    return Err(format!(
                        "endpoint '{url}' does not begin with http:// or https://"
                    ));
                }
                endpoint = Some(url);
            }
            Some(("region", name)) if !name.is_empty() => region = Some(decode(name)?),
            _ => {
                return Err(format!(
                    "'{parameter}' is not a parameter: endpoint=URL and region=NAME are"
                ));
            }
        }
    }
    Ok(Uri::S3 { bucket: bucket.to_owned(), prefix, endpoint, region })
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
    if text.len() > MAX_NAME {
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
            Uri::S3 { bucket, prefix, endpoint, region } => {
                write!(f, "s3://{bucket}/{}", encode(prefix))?;
                let parameters = [("endpoint", endpoint), ("region", region)];
                let mut sign = '?';
                for (name, value) in parameters {
                    if let Some(value) = value {
                        write!(f, "{sign}{name}={}", encode(value))?;
                        sign = '&';
                    }
                }
                Ok(())
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
        let s3 = |prefix: &str| Uri::S3 {
            bucket: "bucket".into(),
            prefix: prefix.into(),
            endpoint: None,
            region: None,
        };
        assert_eq!(uri("s3://bucket"), s3(""));
        assert_eq!(uri("s3://bucket/"), s3(""));
        assert_eq!(uri("s3://bucket/a/b/"), s3("a/b"));
        for text in [
            "file:/srv/x",
            "nbd+unix:///a%20%25%3F%C3%A9?socket=/run/a%26b",
            "nbd://[::1]:99/x",
            "nbd://h:10809/",
            "s3://bucket/a/b%20c",
            "s3://bucket/a?endpoint=http://127.0.0.1:9000&region=eu-1",
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
            "s3://",
            "s3://a",
            "s3://bu cket/x",
            "s3://bucket//x",
            "s3://bucket/x/../y",
            "s3://bucket/%0a",
            "s3://bucket/x?endpoint=ftp://x",
            "s3://bucket/x?zone=1",
            "s3://bucket/x?region=",
        ] {
            let error = text.parse::<Uri>().expect_err(text).to_string();
            assert!(error.starts_with(&format!("'{text}'")), "{error}");
        }
    }

    /// Whatever is typed: refused, or a name that reads back as itself.
    #[test]
    fn mutated_names() {
        let mut rng = larder_base::Rng::new(11);
        let names = [
            "file:/srv/disk.img",
            "nbd+unix:///a%20b?socket=/run/x",
            "nbd://[::1]:99/x",
            "s3://bucket/a/b?endpoint=http://h:1/%3f&region=eu",
        ];
        let mut kept = 0;
        for round in 0..8_000 {
            let mut text = names[round % names.len()].as_bytes().to_vec();
            for _ in 0..rng.range(1, 4) {
                let at = rng.below(text.len() as u64) as usize;
                match rng.below(3) {
                    0 => text[at] = rng.below(128) as u8,
                    1 if text.len() > 1 => drop(text.remove(at)),
                    _ => text.insert(at, b"%/?&=:[].s"[rng.below(10) as usize]),
                }
            }
            let text = String::from_utf8_lossy(&text).into_owned();
            if let Ok(uri) = text.parse::<Uri>() {
                kept += 1;
                assert_eq!(uri.to_string().parse::<Uri>().ok(), Some(uri), "{text}");
            }
        }
        assert!(kept > 500, "{kept}");
    }
}
