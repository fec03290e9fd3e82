//! The server behind an NBD store, whatever URI it was named by.
//!
//! A store that is served as two volumes would be cached twice, and each would miss what is written by the other. So servers are
//! compared by where they are, not by how they are called: a Unix socket by its device and inode (links, `..` and relative paths lead
//! to the same), a TCP server by its addresses and port.
//!
//! NBD has no identity of an export. Two export names of one server may be one disk, and so may two servers, or two addresses of
//! one host: what may be one and may be two is [`Likeness::Perhaps`] where it can be seen at all.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::Uri;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At a Unix socket.
    Socket(PathBuf),
    /// At one of these addresses: those of a name, or one.
    Addresses(Vec<SocketAddr>),
}

/// A server and what it exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where it is.
    pub place: Place,
    /// The export's name.
    pub export: String,
}

/// What two stores are of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Likeness {
    /// Nothing suggests that they are one.
    None,
    /// They may be one: two exports of one server, or servers at two addresses of this host.
    Perhaps,
    /// One export of one server.
    Same,
}

/// Device and inode of a socket, if there is one.
fn socket_at(path: &Path) -> Option<(u64, u64)> {
    let found = path.metadata().ok().filter(|found| found.file_type().is_socket())?;
    Some((found.dev(), found.ino()))
}

/// The address as it is compared: an IPv4 address in IPv6 is that address, and to none leads the loopback.
fn plain(address: SocketAddr) -> SocketAddr {
    let ip = match unmapped(address.ip()) {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn unmapped(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(ip) => ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4),
        ip => ip,
    }
}

/// Whether an address is one of this host's, as far as that can be told: it may lead to another all the same, as those of a load
/// balancer's services do.
fn is_of_this_host(ip: IpAddr) -> bool {
    if ip.is_loopback() {
        return true;
    }
    let family = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
    let any = std::fs::read(format!("/proc/sys/net/{family}/ip_nonlocal_bind"));
    // Nobody else's can be bound, unless this host lets all be.
    !any.is_ok_and(|any| any.starts_with(b"1")) && UdpSocket::bind((ip, 0)).is_ok()
}

/// Whether what a URI names goes with this host, as far as that can be told: a file on no network file system, a block device, a server at a
/// Unix socket or at an address of this host.
///
/// # Errors
/// When an address cannot be looked up.
pub(crate) fn is_here(uri: &Uri) -> Result<bool, String> {
    match uri {
        Uri::File { path } => Ok(!is_on_network(path)),
        Uri::NbdUnix { .. } => Ok(true),
        Uri::NbdTcp { .. } => Ok(match Peer::of(uri)? {
            Some(Peer { place: Place::Addresses(list), .. }) => {
                list.iter().any(|address| is_of_this_host(plain(*address).ip()))
            }
            _ => true,
        }),
        Uri::S3 { endpoint, .. } => {
            let Some(endpoint) = endpoint else { return Ok(false) };
            let (scheme, rest) = endpoint.split_once("://").unwrap_or(("", endpoint));
            let host = rest.split(['/', '?']).next().unwrap_or(rest);
            let port = if scheme == "http" { 80 } else { 443 };
            let with_port = match host.rsplit_once(':') {
                Some((_, digits)) if digits.parse::<u16>().is_ok() => host.to_owned(),
                _ => format!("{host}:{port}"),
            };
            let found = with_port.to_socket_addrs();
            let found = found.map_err(|e| format!("the address of '{host}': {e}"))?;
            Ok(found.into_iter().any(|address| is_of_this_host(plain(address).ip())))
        }
    }
}

/// File systems whose files are on another host: NFS, SMB (three numbers), 9P, Ceph, AFS, Lustre, GPFS, OCFS2, GFS2.
const ON_NETWORK: [u32; 11] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x0102_1997,
    0x00c3_6400,
    0x5346_414f,
    0x0bd0_0bd0,
    0x4750_4653,
    0x7461_636f,
    0x0116_1970,
];

/// Whether the file of that name, or its directory if there is none yet, lies on a file system of a network. A block device lies on none.
fn is_on_network(path: &Path) -> bool {
    if path.metadata().is_ok_and(|found| found.file_type().is_block_device()) {
        return false;
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let found = rustix::fs::statfs(path).or_else(|_| rustix::fs::statfs(dir));
    found.is_ok_and(|found| ON_NETWORK.contains(&(found.f_type as u32)))
}

impl Place {
    /// The place in words that are the same whatever it was called, and stay the same while the server is away.
    fn key(&self) -> String {
        match self {
            Place::Socket(path) => {
                // Its directory stays where the socket is made anew.
                let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
                let directory = whole.parent().and_then(|dir| dir.metadata().ok());
                match (directory, whole.file_name()) {
                    (Some(dir), Some(name)) => {
                        format!("socket {:x}:{:x}/{}", dir.dev(), dir.ino(), name.display())
                    }
                    _ => format!("socket {}", whole.display()),
                }
            }
            Place::Addresses(list) => {
                let least = list.iter().map(|address| plain(*address)).min();
                least.map_or_else(String::new, |address| format!("address {address}"))
            }
        }
    }

    fn likeness(&self, other: &Place) -> Likeness {
        match (self, other) {
            (Place::Socket(a), Place::Socket(b)) => {
                let one = socket_at(a).is_some_and(|found| socket_at(b) == Some(found));
                if one || self.key() == other.key() { Likeness::Same } else { Likeness::None }
            }
            (Place::Addresses(a), Place::Addresses(b)) => {
                let pairs = || a.iter().flat_map(|a| b.iter().map(move |b| (plain(*a), plain(*b))));
                if pairs().any(|(a, b)| a == b) {
                    return Likeness::Same;
                }
                let here = |a: SocketAddr, b: SocketAddr| {
                    a.port() == b.port() && is_of_this_host(a.ip()) && is_of_this_host(b.ip())
                };
                if pairs().any(|(a, b)| here(a, b)) { Likeness::Perhaps } else { Likeness::None }
            }
            _ => Likeness::None,
        }
    }

    /// Whether whoever connects there reaches a server that listens at one of these sockets or addresses. A wildcard address is
    /// every address of this host, of its family: of those that are not loopback addresses it is not certain whose they are.
    pub fn is_among(&self, sockets: &[PathBuf], addresses: &[SocketAddr]) -> Likeness {
        match self {
            Place::Socket(path) => {
                let found = socket_at(path);
                let one = found.is_some() && sockets.iter().any(|own| socket_at(own) == found);
                if one { Likeness::Same } else { Likeness::None }
            }
            Place::Addresses(list) => {
                let pairs = || list.iter().flat_map(|a| addresses.iter().map(move |b| (a, b)));
                let among = pairs().map(|(there, own)| is_at(plain(*there), *own));
                among.max().unwrap_or(Likeness::None)
            }
        }
    }
}

/// Whether whoever connects to `there` reaches a server that listens at `own`.
fn is_at(there: SocketAddr, own: SocketAddr) -> Likeness {
    let (ip, listens) = (there.ip(), unmapped(own.ip()));
    if there.port() != own.port() || ip.is_ipv4() != listens.is_ipv4() {
        Likeness::None
    } else if ip == listens || (listens.is_unspecified() && ip.is_loopback()) {
        Likeness::Same
    } else if listens.is_unspecified() && is_of_this_host(ip) {
        Likeness::Perhaps
    } else {
        Likeness::None
    }
}

impl Peer {
    /// The server and export that a URI names, if it names one; names of hosts are looked up.
    ///
    /// # Errors
    /// When the host has no address, or its name cannot be looked up.
    pub fn of(uri: &Uri) -> Result<Option<Peer>, String> {
        let (place, export) = match uri {
            Uri::NbdUnix { socket, export } => (Place::Socket(socket.clone()), export),
            Uri::NbdTcp { host, port, export } => {
                let found = (host.as_str(), *port)
                    .to_socket_addrs()
                    .map_err(|e| format!("the host's address: {e}"))?;
                let list: Vec<SocketAddr> = found.collect();
                if list.is_empty() {
                    return Err("the host has no address".into());
                }
                (Place::Addresses(list), export)
            }
            Uri::File { .. } | Uri::S3 { .. } => return Ok(None),
        };
        Ok(Some(Peer { place, export: export.clone() }))
    }

    /// What tells this store from others, whatever it was called.
    pub fn key(&self) -> String {
        format!("export '{}' at {}", self.export.escape_debug(), self.place.key())
    }

    /// What another is of this one.
    pub fn likeness(&self, other: &Peer) -> Likeness {
        match self.place.likeness(&other.place) {
            Likeness::Same if self.export != other.export => Likeness::Perhaps,
            found => found,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn peer(place: Place, export: &str) -> Peer {
        Peer { place, export: export.to_owned() }
    }

    fn tcp(addresses: &[&str]) -> Place {
        Place::Addresses(addresses.iter().map(|a| a.parse().unwrap()).collect())
    }

    #[test]
    fn a_socket_is_one_by_whatever_path() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| Place::Socket(dir.path().join(name));
        let _listener = UnixListener::bind(dir.path().join("a")).unwrap();
        let _other = UnixListener::bind(dir.path().join("b")).unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("a"), dir.path().join("link")).unwrap();
        std::fs::hard_link(dir.path().join("a"), dir.path().join("hard")).unwrap();
        for name in ["a", "link", "hard", "sub/../a"] {
            let (one, two) = (peer(at("a"), "x"), peer(at(name), "x"));
            assert_eq!(one.likeness(&two), Likeness::Same, "{name}");
            assert_eq!(one.likeness(&peer(at(name), "y")), Likeness::Perhaps, "{name}");
        }
        assert_eq!(peer(at("a"), "x").key(), peer(at("link"), "x").key());
        assert_eq!(peer(at("a"), "x").likeness(&peer(at("b"), "x")), Likeness::None);
        // Where the server is away it is known by its path.
        assert_eq!(peer(at("c"), "x").likeness(&peer(at("sub/../c"), "x")), Likeness::Same);
        let among = |at: Place, own: &str| at.is_among(&[dir.path().join(own)], &[]);
        assert_eq!(among(at("link"), "a"), Likeness::Same);
        assert_eq!(among(at("link"), "b"), Likeness::None);
        assert_eq!(among(at("c"), "c"), Likeness::None, "there is none");
    }

    #[test]
    fn a_server_is_one_by_whatever_address() {
        let likeness = |a: &[&str], b: &[&str]| peer(tcp(a), "").likeness(&peer(tcp(b), ""));
        assert_eq!(likeness(&["127.0.0.1:9"], &["[::1]:9", "127.0.0.1:9"]), Likeness::Same);
        // A server may listen at each.
        assert_eq!(likeness(&["127.0.0.1:9"], &["[::1]:9"]), Likeness::Perhaps);
        assert_ne!(peer(tcp(&["127.0.0.1:9"]), "").key(), peer(tcp(&["[::1]:9"]), "").key());
        assert_eq!(likeness(&["0.0.0.0:9"], &["[::ffff:127.0.0.1]:9"]), Likeness::Same);
        assert_eq!(likeness(&["127.0.0.1:9"], &["127.0.0.1:10"]), Likeness::None);
        assert_eq!(likeness(&["127.0.0.1:9"], &["127.0.0.2:9"]), Likeness::Perhaps);
        // Addresses of documentation, which no host has.
        assert_eq!(likeness(&["192.0.2.1:9"], &["192.0.2.2:9"]), Likeness::None);
        assert_eq!(likeness(&["192.0.2.1:9", "192.0.2.2:9"], &["192.0.2.2:9"]), Likeness::Same);
    }

    #[test]
    fn a_wildcard_is_every_address_of_this_host_and_its_family() {
        let among = |there: &[&str], own: &str| tcp(there).is_among(&[], &[own.parse().unwrap()]);
        for (there, own, likeness) in [
            ("127.0.0.1:9", "0.0.0.0:9", Likeness::Same),
            ("127.0.0.5:9", "0.0.0.0:9", Likeness::Same),
            ("0.0.0.0:9", "0.0.0.0:9", Likeness::Same),
            ("0.0.0.0:9", "127.0.0.1:9", Likeness::Same),
            ("[::ffff:127.0.0.1]:9", "127.0.0.1:9", Likeness::Same),
            ("[::1]:9", "[::]:9", Likeness::Same),
            ("[::]:9", "[::1]:9", Likeness::Same),
            ("192.0.2.1:9", "192.0.2.1:9", Likeness::Same),
            ("127.0.0.1:9", "0.0.0.0:10", Likeness::None),
            ("127.0.0.5:9", "127.0.0.1:9", Likeness::None),
            ("192.0.2.1:9", "0.0.0.0:9", Likeness::None),
            // Another server may listen there, with the same port.
            ("[::1]:9", "127.0.0.1:9", Likeness::None),
            ("[::1]:9", "0.0.0.0:9", Likeness::None),
            ("127.0.0.1:9", "[::]:9", Likeness::None),
        ] {
            assert_eq!(among(&[there], own), likeness, "{there} {own}");
        }
        let both = among(&["192.0.2.1:9", "127.0.0.1:9"], "127.0.0.1:9");
        assert_eq!(both, Likeness::Same, "one of its addresses");
    }
}
