//! The authentication file of `--auth-file`: lines of `user:password`, at most [`ENTRIES_MAX`] of them.

use std::sync::{PoisonError, RwLock};

/// Most users in a file.
pub const ENTRIES_MAX: usize = 8;

/// Longest line in a file, bytes.
pub const LINE_MAX: usize = 255;

/// What is wrong with an authentication file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthFileError {
    /// A line has no colon.
    #[error("auth file line {line}: no ':' between user and password; write user:password")]
    NoColon {
        /// Which line, from 1.
        line: usize,
    },
    /// A line is too long.
    #[error("auth file line {line}: longer than {LINE_MAX} bytes; shorten user or password")]
    TooLong {
        /// Which line, from 1.
        line: usize,
    },
    /// Too many users.
    #[error("auth file line {line}: more than {ENTRIES_MAX} users; remove some")]
    TooMany {
        /// The first line over the limit, from 1.
        line: usize,
    },
    /// Nobody could ever log in.
    #[error("auth file: no user in it; write a line user:password")]
    Empty,
}

/// The users who may use the server.
#[derive(Clone, Default)]
pub struct AuthFile {
    entries: Vec<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for AuthFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Passwords stay out of logs.
        write!(f, "AuthFile({} users)", self.entries.len())
    }
}

impl AuthFile {
    /// Reads the contents of an authentication file. A blank last line is allowed.
    pub fn parse(contents: &[u8]) -> Result<AuthFile, AuthFileError> {
        let mut entries = Vec::new();
        for (index, line) in contents.split(|b| *b == b'\n').enumerate() {
            let text = line.strip_suffix(b"\r").unwrap_or(line);
            let line = index + 1;
            if text.is_empty() {
                continue;
            }
            if text.len() > LINE_MAX {
                return Err(AuthFileError::TooLong { line });
            }
            if entries.len() == ENTRIES_MAX {
                return Err(AuthFileError::TooMany { line });
            }
            let colon =
                text.iter().position(|b| *b == b':').ok_or(AuthFileError::NoColon { line })?;
            entries.push((text[..colon].to_vec(), text[colon + 1..].to_vec()));
        }
        if entries.is_empty() { Err(AuthFileError::Empty) } else { Ok(AuthFile { entries }) }
    }

    /// Whether this user has this password. The time taken does not depend on how much of them is right.
    pub fn check(&self, user: &[u8], password: &[u8]) -> bool {
        self.entries.iter().fold(false, |found, (u, p)| found | (same(u, user) & same(p, password)))
    }
}

/// The users of a server that runs; the file may be read again.
#[derive(Debug)]
pub struct Users(RwLock<AuthFile>);

impl From<AuthFile> for Users {
    fn from(file: AuthFile) -> Users {
        Users(RwLock::new(file))
    }
}

impl Users {
    /// From here on these may log in. Who has logged in stays so.
    pub fn set(&self, file: AuthFile) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = file;
    }

    /// [`AuthFile::check`].
    pub fn check(&self, user: &[u8], password: &[u8]) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).check(user, password)
    }
}

/// Compares without an early exit, so that timing does not tell how far a guess was right.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len()
        && std::hint::black_box(a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_users_and_checks_them() {
        let file = AuthFile::parse(b"foo:bar\r\nbaaaz:qu:ux\n").unwrap();
        assert!(file.check(b"foo", b"bar"));
        assert!(file.check(b"baaaz", b"qu:ux"));
        assert!(
            !file.check(b"foo", b"ba")
                && !file.check(b"fo", b"bar")
                && !file.check(b"foo", b"qu:ux")
        );
        assert!(AuthFile::parse(b"foo:bar").unwrap().check(b"foo", b"bar"));
        assert!(!format!("{file:?}").contains("bar"));
    }

    #[test]
    fn names_the_line_at_fault() {
        assert_eq!(
            AuthFile::parse(b"a:b\nnope\n").unwrap_err(),
            AuthFileError::NoColon { line: 2 }
        );
        assert_eq!(AuthFile::parse(b"\n").unwrap_err(), AuthFileError::Empty);
        assert_eq!(
            AuthFile::parse(&b"a:b\n".repeat(9)).unwrap_err(),
            AuthFileError::TooMany { line: 9 }
        );
        assert_eq!(AuthFile::parse(&[b'x'; 256]).unwrap_err(), AuthFileError::TooLong { line: 1 });
    }
}
