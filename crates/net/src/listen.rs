//! Sockets to listen on, as every server of this project wants them: none of them waits in accept.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use rustix::fs::Mode;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Whom a Unix socket lets in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Those may connect to whom these permissions (as of a file, 0o777 at most) let write.
    pub mode: u32,
    /// The group that it belongs to; `None`: the process's.
    pub group: Option<u32>,
}

impl SocketAccess {
    /// Its owner alone.
    pub const OWNER: SocketAccess = SocketAccess { mode: 0o600, group: None };

    /// By these permissions.
    pub fn mode(mode: u32) -> SocketAccess {
        SocketAccess { mode, group: None }
    }
}

/// Removes a Unix socket's path when the server ends, if it is still ours.
#[derive(Debug)]
pub struct UnixPath {
    path: PathBuf,
    which: Which,
}

impl UnixPath {
    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Which file it is. An inode's number is soon another file's, which was not made at the same time.
type Which = (u64, u64, Option<SystemTime>);

fn which(m: &Metadata) -> Which {
    (m.dev(), m.ino(), m.created().ok())
}

impl Drop for UnixPath {
    fn drop(&mut self) {
        if let Ok(m) = std::fs::symlink_metadata(&self.path)
            && which(&m) == self.which
        {
            std::fs::remove_file(&self.path).ok();
        }
    }
}

/// A socket bound to `address`, which does not listen yet: until it does, clients are refused, not kept waiting.
///
/// # Errors
/// The system's: in use, not an address of this machine, no such family.
pub fn bind_tcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_cloexec(true)?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Accepted sockets inherit both on Linux, which saves two system calls each.
    socket.set_keepalive(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// [`bind_tcp`], and listens.
///
/// # Errors
/// The system's.
pub fn listen_tcp(address: SocketAddr, backlog: i32) -> io::Result<TcpListener> {
    let socket = bind_tcp(address)?;
    socket.listen(backlog)?;
    Ok(socket.into())
}

/// Listens on a path, which lets in whom `access` says. What a server that is gone has left there goes away.
///
/// # Errors
/// Why not, and what to do: the path is no socket, somebody listens there, its directory is missing or closed to us.
pub fn listen_unix(
    path: &Path,
    access: SocketAccess,
    backlog: i32,
) -> Result<(UnixListener, UnixPath), String> {
    if let Ok(meta) = std::fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err("exists and is not a socket: remove it or choose another path".into());
        }
        match UnixStream::connect(path) {
            Ok(_) => {
                return Err("another server listens there: stop it or choose another path".into());
            }
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)
                    .map_err(|e| format!("is stale and cannot be removed: {e}"))?;
            }
            Err(e) => return Err(format!("exists and cannot be tried: {e}")),
        }
    }
    let make = || -> io::Result<UnixListener> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // Or else whoever accepts waits in accept, where nothing tells it to stop.
        socket.set_nonblocking(true)?;
        socket.set_cloexec(true)?;
        // The permissions must hold from the first moment, so they go through the umask, not a chmod after the bind.
        // (There is one for the whole process.)
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = rustix::process::umask(Mode::from_raw_mode(!access.mode & 0o777));
        let bound = SockAddr::unix(path).and_then(|address| socket.bind(&address));
        rustix::process::umask(before);
        drop(one);
        bound?;
        if access.group.is_some() {
            // Nobody can connect before it listens.
            std::os::unix::fs::chown(path, None, access.group)?;
        }
        socket.listen(backlog)?;
        Ok(socket.into())
    };
    let listener = make().map_err(|e| format!("{e}: the directory must exist and be writable"))?;
    let meta = std::fs::symlink_metadata(path).map_err(|e| e.to_string())?;
    Ok((listener, UnixPath { path: path.to_owned(), which: which(&meta) }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_path_is_open_to_whom_it_says_and_goes_with_its_guard() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (listener, guard) = listen_unix(&path, SocketAccess::OWNER, 8).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let second = listen_unix(&path, SocketAccess::OWNER, 8).unwrap_err();
        assert!(second.contains("another server listens there"), "{second}");
        drop(listener);
        // Nobody listens any more: what is left is replaced, and the first guard leaves the new one alone.
        let (_again, second) = listen_unix(&path, SocketAccess::mode(0o640), 8).unwrap();
        drop(guard);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_belongs_to_the_group_that_it_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Any user may give its own file to a group of its own.
        let group = rustix::process::getegid().as_raw();
        let other = if rustix::process::geteuid().is_root() { 12_345 } else { group };
        let access = SocketAccess { mode: 0o660, group: Some(other) };
        let _listening = listen_unix(&path, access, 8).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.permissions().mode() & 0o777, meta.gid()), (0o660, other));
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "data").unwrap();
        let e = listen_unix(&path, SocketAccess::OWNER, 8).unwrap_err();
        assert!(e.contains("is not a socket"), "{e}");
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
        let e = listen_unix(&dir.path().join("no/s"), SocketAccess::OWNER, 8).unwrap_err();
        assert!(e.contains("the directory must exist"), "{e}");
    }
}
