//! A command line cut into tokens at spaces, in place.

/// The most tokens that are told apart in one line; what follows them is ignored, as memcached does.
pub const MAX: usize = 23;

/// The tokens of one line.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    items: [&'a [u8]; MAX],
    count: usize,
}

impl<'a> Tokens<'a> {
    /// Cuts `line` (without its end of line) at runs of spaces.
    #[inline]
    pub fn new(line: &'a [u8]) -> Tokens<'a> {
        let mut items: [&[u8]; MAX] = [&[]; MAX];
        let mut count = 0;
        let mut at = 0;
        while count < MAX {
            while at < line.len() && line[at] == b' ' {
                at += 1;
            }
            if at == line.len() {
                break;
            }
            let start = at;
            while at < line.len() && line[at] != b' ' {
                at += 1;
            }
            items[count] = &line[start..at];
            count += 1;
        }
        Tokens { items, count }
    }

    /// The number of tokens, the command included.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether the line is blank.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Token `index`, or nothing.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        self.as_slice().get(index).copied()
    }

    /// All tokens.
    pub fn as_slice(&self) -> &[&'a [u8]] {
        &self.items[..self.count]
    }

    /// Whether the last token asks for silence.
    pub fn noreply(&self) -> bool {
        self.as_slice().last().is_some_and(|t| *t == b"noreply")
    }
}

/// The line without its LF or CR LF.
#[inline]
pub fn trim_end_of_line(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_at_runs_of_spaces() {
        let t = Tokens::new(trim_end_of_line(b"  set  a 0\t1 noreply \r\n"));
        assert_eq!(t.as_slice(), [&b"set"[..], b"a", b"0\t1", b"noreply"]);
        assert!(t.noreply());
        assert!(Tokens::new(b"   ").is_empty());
        assert_eq!(Tokens::new(b"").get(0), None);
    }

    #[test]
    fn ignores_what_exceeds_the_limit() {
        let line = b"x ".repeat(MAX + 5);
        assert_eq!(Tokens::new(&line).len(), MAX);
    }
}
